package durable

import (
	"archive/tar"
	"bytes"
	"errors"
	"path"
	"strings"
	"testing"
)

// A layer's archive may name its files as it likes: looking for them ends, stays
// an error that says so, and changes nothing.
func FuzzLayerHeaders(f *testing.F) {
	archiveOf := func(headers ...*tar.Header) []byte {
		var out bytes.Buffer
		w := tar.NewWriter(&out)
		for _, h := range headers {
			if err := w.WriteHeader(h); err != nil {
				f.Fatal(err)
			}
		}
		return out.Bytes()
	}
	f.Add(archiveOf(&tar.Header{Name: "etc/", Typeflag: tar.TypeDir, Mode: 0o755}, &tar.Header{Name: "etc/motd", Typeflag: tar.TypeReg}))
	f.Add(archiveOf(&tar.Header{Name: "a", Typeflag: tar.TypeSymlink, Linkname: "/"}, &tar.Header{Name: "a/b/../../../c", Typeflag: tar.TypeLink, Linkname: ".."}))
	f.Add(archiveOf(&tar.Header{Name: "..", Typeflag: tar.TypeSymlink, Linkname: "x"}, &tar.Header{Name: "../a/b", Typeflag: tar.TypeReg}))
	f.Add(archiveOf(&tar.Header{Name: ".wh..wh..opq", Typeflag: tar.TypeReg}, &tar.Header{Name: "x/.wh.y", Typeflag: tar.TypeReg}, &tar.Header{Name: ".wh."}))
	f.Add(archiveOf(&tar.Header{Name: "/", Typeflag: tar.TypeXGlobalHeader, PAXRecords: map[string]string{"a": "b"}}))
	f.Fuzz(func(t *testing.T, raw []byte) {
		files := map[string]*tar.Header{}
		if err := garbled(readHeaders(bytes.NewReader(raw), files)); err != nil && !certain(err) {
			t.Errorf("an archive that cannot be read is no damage: %v", err)
		}
		dir := t.TempDir()
		for name, h := range files {
			if path.Clean(name) != name || h == nil {
				t.Errorf("file %q", name)
			}
			linked := false
			for i, c := range name {
				above := files[name[:i]]
				linked = linked || c == '/' && above != nil && above.Typeflag == tar.TypeSymlink
			}
			if behindLink(files, name) != linked {
				t.Errorf("%q is behind a link: %v", name, linked)
			}
			if strings.HasPrefix(name, "..") || strings.HasPrefix(name, "/") {
				continue // of no layer in the store: the library refuses it when it is pulled
			}
			if err := errors.Join(sameFile(dir, name, h), sameMode(dir, name, h, false)); err == nil && name != "." {
				t.Errorf("%q is in an empty directory", name)
			}
		}
	})
}
