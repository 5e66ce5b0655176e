package headers

import (
	"bytes"
	"fmt"
	"math"
	"strconv"
)

// headerOnly reports whether an entry of this type has no content, whatever its size says.
func headerOnly(kind byte) bool {
	return kind >= '1' && kind <= '6' // links, devices, directories and pipes
}

// padding returns how many bytes fill the last block of content.
func padding(size int64) int64 { return -size & (blockSize - 1) }

// text returns a field up to its first NUL.
func text(field []byte) []byte {
	before, _, _ := bytes.Cut(field, []byte{0})
	return before
}

// number parses a numeric field, octal or in GNU tar's binary form, like archive/tar.
func number(field []byte) (int64, error) {
	if field[0]&0x80 != 0 {
		return binary(field)
	}
	digits := text(bytes.Trim(field, " \x00"))
	if len(digits) == 0 {
		return 0, nil
	}
	n, err := strconv.ParseUint(string(digits), 8, 63)
	return int64(n), err
}

func binary(field []byte) (int64, error) {
	invert := byte(0) // negative numbers are the complement of two
	if field[0]&0x40 != 0 {
		invert = 0xff
	}
	var n uint64
	for i, b := range field {
		b ^= invert
		if i == 0 {
			b &= 0x7f
		}
		if n>>56 > 0 {
			return 0, strconv.ErrRange
		}
		n = n<<8 | uint64(b)
	}
	if n > math.MaxInt64 {
		return 0, strconv.ErrRange
	}
	if invert != 0 {
		return ^int64(n), nil
	}
	return int64(n), nil
}

// record is one of a PAX header. Key and value are parts of the header.
type record struct{ key, value []byte }

// parse splits the content of a PAX header: "LENGTH KEY=VALUE\n", where LENGTH is the length of the
// whole record.
func parse(content []byte) (records []record, err error) {
	for len(content) > 0 {
		length, rest, found := bytes.Cut(content, []byte(" "))
		n, err := strconv.Atoi(string(length))
		if !found || err != nil || n > len(content) || n < len(length)+2 || content[n-1] != '\n' {
			return nil, fmt.Errorf("%w: broken PAX record", ErrInvalid)
		}
		key, value, found := bytes.Cut(rest[:n-len(length)-2], []byte("="))
		if !found || len(key) == 0 {
			return nil, fmt.Errorf("%w: broken PAX record", ErrInvalid)
		}
		records = append(records, record{key, value})
		content = content[n:]
	}
	return records, nil
}
