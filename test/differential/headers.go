//go:build differential

package differential

import (
	"archive/tar"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/crius-run/crius/test/kit/image"
)

// block is a header of an archive, field by field, as archive/tar would not write it.
type block struct {
	name, mode, uid, gid, size, mtime, link, magic, uname, gname, major, minor, prefix string
	kind                                                                               byte
	content                                                                            string // follows the header
	signed                                                                             bool   // the checksum is of signed bytes
}

const blockSize = 512

// bytes returns the header with its content.
func (b block) bytes() []byte {
	header := make([]byte, blockSize)
	for _, field := range []struct {
		at          int
		value, none string
	}{
		{0, b.name, ""}, {100, b.mode, "0000644\x00"}, {108, b.uid, "0000000\x00"}, {116, b.gid, "0000000\x00"},
		{124, b.size, fmt.Sprintf("%011o\x00", len(b.content))}, {136, b.mtime, "14542025400\x00"}, {157, b.link, ""},
		{257, b.magic, "ustar\x0000"}, {265, b.uname, ""}, {297, b.gname, ""}, {329, b.major, ""}, {337, b.minor, ""}, {345, b.prefix, ""},
	} {
		value := field.value
		if value == "" {
			value = field.none
		}
		copy(header[field.at:], value)
	}
	header[156] = b.kind
	copy(header[148:], "        ")
	sum := 0
	for _, c := range header {
		if b.signed {
			sum += int(int8(c))
		} else {
			sum += int(c)
		}
	}
	copy(header[148:], fmt.Sprintf("%06o\x00 ", sum))
	content := append([]byte(b.content), make([]byte, -len(b.content)&(blockSize-1))...)
	return append(header, content...)
}

// base256 returns a number in a field of some size, as GNU tar writes numbers that have too many octal digits.
func base256(size int, number int64) string {
	field := make([]byte, size)
	binary.BigEndian.PutUint64(field[size-8:], uint64(number))
	for i := range size - 8 {
		if number < 0 {
			field[i] = 0xff
		}
	}
	field[0] |= 0x80
	return string(field)
}

// record returns a record of a PAX header.
func record(key, value string) string {
	length := len(key) + len(value) + 3
	for digits := 1; ; digits++ {
		if text := fmt.Sprint(length + digits); len(text) == digits {
			return text + " " + key + "=" + value + "\n"
		}
	}
}

// headers returns images with headers that programs have written, or may write.
func headers(string) (all []sample, err error) {
	text := func(name string) block { return block{name: name, kind: tar.TypeReg, content: "content of " + name} }
	pax := func(pairs ...string) block {
		b := block{name: "PaxHeaders/x", kind: tar.TypeXHeader}
		for i := 0; i < len(pairs); i += 2 {
			b.content += record(pairs[i], pairs[i+1])
		}
		return b
	}
	global := func(pairs ...string) block { b := pax(pairs...); b.kind = tar.TypeXGlobalHeader; return b }
	with := func(b block, change func(*block)) block { change(&b); return b }
	kind := func(k byte, b block) block { b.kind = k; return b }
	long := strings.Repeat("long/", 40) + "name"
	archives := map[string][]block{
		"global header of git":         {global("comment", strings.Repeat("a", 40)), text("x")},
		"global header with times":     {global("mtime", "1234567890.5"), text("x")},
		"global header with an owner":  {global("uid", "1234", "gid", "5678"), text("x"), text("y")},
		"global header at the end":     {text("x"), global("comment", "c")},
		"global header, then PAX":      {global("uid", "5"), pax("gid", "6"), text("x")},
		"GNU long name":                {{name: "././@LongLink", kind: tar.TypeGNULongName, magic: "ustar  \x00", content: long + "\x00"}, with(text(long[:99]), func(b *block) { b.magic = "ustar  \x00" })},
		"GNU long link":                {{name: "././@LongLink", kind: tar.TypeGNULongLink, magic: "ustar  \x00", content: long + "\x00"}, {name: "l", kind: tar.TypeSymlink, link: long[:99], magic: "ustar  \x00"}},
		"long name and PAX path":       {{name: "././@LongLink", kind: tar.TypeGNULongName, magic: "ustar  \x00", content: "by-gnu\x00"}, pax("path", "by-pax"), text("x")},
		"base-256 owner":               {with(text("x"), func(b *block) { b.uid, b.gid, b.magic = base256(8, 3_000_000_000), base256(8, 1<<21), "ustar  \x00" })},
		"base-256 size":                {with(text("x"), func(b *block) { b.size, b.magic = base256(12, int64(len(b.content))), "ustar  \x00" })},
		"base-256 negative time":       {with(text("x"), func(b *block) { b.mtime, b.magic = base256(12, -1000), "ustar  \x00" })},
		"base-256 far time":            {with(text("x"), func(b *block) { b.mtime, b.magic = base256(12, 1<<33), "ustar  \x00" })},
		"owner of 33 bits":             {pax("uid", "4294967296"), text("x")},
		"owner of 32 bits":             {pax("uid", "4294967294", "gid", "4294967294"), text("x")},
		"negative PAX time":            {pax("mtime", "-1.5"), text("x")},
		"far PAX time":                 {pax("mtime", "16725225600"), text("x")},
		"PAX time of many digits":      {pax("mtime", "1234567890.123456789123456789"), text("x")},
		"PAX size":                     {pax("size", "5"), with(text("x"), func(b *block) { b.content, b.size = "12345", "00000000000\x00" })},
		"PAX path twice":               {pax("path", "first", "path", "second"), text("x")},
		"PAX path empty":               {pax("path", ""), text("x")},
		"PAX link path":                {pax("linkpath", long), block{name: "l", kind: tar.TypeSymlink, link: "short"}},
		"PAX names of vendors":         {pax("SCHILY.fflags", "nodump", "LIBARCHIVE.xattr.user.a", "Yg", "RHT.security.selinux", "x", "MSWINDOWS.rawsd", "AA", "LIBARCHIVE.creationtime", "1.5", "SCHILY.dev", "5", "SCHILY.ino", "7", "SCHILY.nlink", "3"), text("x")},
		"PAX character set":            {pax("hdrcharset", "BINARY", "path", "caf\xe9"), text("x")},
		"PAX attribute with = and NUL": {pax("SCHILY.xattr.user.a", "b=c\x00d\n"), text("x")},
		"PAX header before PAX header": {pax("path", "one"), pax("uid", "7"), text("x")},
		"PAX names of users":           {pax("uname", "nobody", "gname", "ünïx"), text("x")},
		"Solaris extended header":      {kind('X', pax("path", "by-x")), text("x")},
		"ustar prefix":                 {with(text("name"), func(b *block) { b.prefix = strings.Repeat("p", 100) + "/q" })},
		"v7, directory by its slash":   {{name: "d/", magic: "\x00", mode: "0000755\x00"}, with(text("d/x"), func(b *block) { b.magic, b.kind = "\x00", 0 })},
		"regular file with a slash":    {with(text("d/"), func(b *block) { b.content = "" })},
		"volume label":                 {{name: "label", kind: 'V', magic: "ustar  \x00"}, text("x")},
		"dump directory":               {{name: "d/", kind: 'D', magic: "ustar  \x00", content: "Yx\x00\x00"}, text("d/x")},
		"multiple volumes":             {kind('M', text("x"))},
		"unknown type":                 {kind('Z', text("x")), text("y")},
		"signed checksum":              {with(text("caf\xe9"), func(b *block) { b.signed = true })},
		"numbers with spaces":          {with(text("x"), func(b *block) { b.mode, b.uid, b.gid, b.mtime = "  755 \x00", "     7 ", " 10 \x00", "      12345\x00" })},
		"empty numbers":                {with(text("x"), func(b *block) { b.uid, b.gid, b.mtime = "\x00\x00", "\x00\x00", "\x00\x00" })},
		"mode with the type":           {with(text("x"), func(b *block) { b.mode = "0100755\x00" })},
		"mode of all ones":             {with(text("x"), func(b *block) { b.mode = "7777777\x00" })},
		"link with a size":             {{name: "l", kind: tar.TypeSymlink, link: "x", size: "00000001000\x00"}, text("x")},
		"hard link with a size":        {text("x"), {name: "h", kind: tar.TypeLink, link: "x", size: "00000000015\x00"}, text("y")},
		"link to nothing":              {{name: "l", kind: tar.TypeSymlink}},
		"directory with content":       {{name: "d/", kind: tar.TypeDir, mode: "0000755\x00", size: "00000000000\x00"}, text("d/x")},
		"root as /":                    {{name: "/", kind: tar.TypeDir, mode: "0000711\x00"}, text("x")},
		"root as empty name":           {{name: "", kind: tar.TypeDir, mode: "0000711\x00"}, text("x")},
		"root as .//.":                 {{name: ".//.", kind: tar.TypeDir, mode: "0000711\x00"}, text("x")},
		"device without numbers":       {{name: "c", kind: tar.TypeChar, mode: "0000600\x00"}, {name: "b", kind: tar.TypeBlock, mode: "0000600\x00"}},
		"base-256 device":              {{name: "c", kind: tar.TypeChar, major: base256(8, 300), minor: base256(8, 70000), magic: "ustar  \x00"}},
		"directory without access":     {{name: "d/", kind: tar.TypeDir, mode: "0000000\x00"}, text("d/x"), {name: "d/e/", kind: tar.TypeDir, mode: "0000000\x00"}, text("d/e/y")},
		"setuid on a directory":        {{name: "d/", kind: tar.TypeDir, mode: "0006755\x00", uid: "0000007\x00"}, text("d/x")},
		"capability on a directory":    {pax("SCHILY.xattr.security.capability", "\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"), {name: "d/", kind: tar.TypeDir, mode: "0000755\x00"}},
		"whiteout of a newline":        {text("x"), with(text(".wh.a\nb"), func(b *block) { b.content = "" })},
		"whiteout with content":        {text(".wh.gone")},
		"whiteout that is a link":      {{name: ".wh.l", kind: tar.TypeSymlink, link: "x"}},
		"whiteout of a whiteout":       {with(text(".wh..wh.x"), func(b *block) { b.content = "" })},
		"opaque twice":                 {{name: "d/", kind: tar.TypeDir, mode: "0000755\x00"}, with(text("d/.wh..wh..opq"), func(b *block) { b.content = "" }), with(text("d/.wh..wh..opq"), func(b *block) { b.content = "" })},
		"hard link to a whiteout":      {with(text(".wh.x"), func(b *block) { b.content = "" }), {name: "h", kind: tar.TypeLink, link: ".wh.x"}},
	}
	for _, name := range slices.Sorted(maps.Keys(archives)) {
		var archive []byte
		for _, b := range archives[name] {
			archive = append(archive, b.bytes()...)
		}
		end := make([]byte, 2*blockSize)
		all = append(all, sample{"header " + name, []image.Layer{image.RawLayer(append(archive, end...))}})
	}
	x := text("x").bytes()
	zero := make([]byte, blockSize)
	for name, archive := range map[string][]byte{
		"garbage after the end":          slices.Concat(x, zero, zero, []byte(strings.Repeat("garbage", 300))),
		"an archive after the end":       slices.Concat(x, zero, zero, text("y").bytes(), zero, zero),
		"one block of zeros in between":  slices.Concat(x, zero, text("y").bytes(), zero, zero),
		"an end that is no whole block":  slices.Concat(x, zero, zero[:100]),
		"nothing but an end":             slices.Concat(zero, zero),
		"no bytes at all":                {},
		"a padding that is not of zeros": slices.Concat(append(slices.Clone(x[:blockSize+12]), []byte(strings.Repeat("p", blockSize-12))...), zero, zero),
	} {
		all = append(all, sample{"archive with " + name, []image.Layer{image.RawLayer(archive)}})
	}
	return all, nil
}
