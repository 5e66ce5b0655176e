// Package idlists keeps the file owners that images name out of records.
//
// containers/storage lists all uids and gids of a layer's files in the layer's record. Every
// process that opens the store has the records in memory, and writes them again with each layer
// that it adds. Images choose the ids: a megabyte of layers can make a megabyte of records. Only
// podman uses the lists, to guess how many ids --userns=auto needs.
package idlists

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"go.podman.io/storage/pkg/lockfile"

	"github.com/crius-run/crius/storage/unpack/layers"
)

// DropFromLayers calls Drop for the records of layers in a root of a store, under their lock: all
// processes that have the store open read them again. If there is nothing to do, it does not wait
// for the lock.
func DropFromLayers(root string) error {
	file := filepath.Join(root, "overlay-layers", "layers.json")
	if long, err := long(file); !long || err != nil {
		return err
	}
	lock, err := lockfile.GetLockFile(filepath.Join(filepath.Dir(file), "layers.lock"))
	if err != nil {
		return failed(file, err)
	}
	lock.Lock()
	defer lock.Unlock()
	if err := Drop(file); err != nil {
		return err
	}
	if _, err := lock.RecordWrite(); err != nil {
		return failed(file, err)
	}
	return nil
}

// Drop removes all lists of owners from a file of records if one is longer than layers.KeptOwners. At every
// moment the file has the old content, or the new content, which has been synced. The memory that
// Drop needs does not depend on the size of the file. A missing or damaged file stays as it is.
func Drop(file string) error {
	to := temporary(file)
	if err := os.Remove(to); err != nil && !errors.Is(err, fs.ErrNotExist) { // of a killed process
		return failed(file, err)
	}
	if long, err := long(file); !long || err != nil {
		return err
	}
	err := write(file, to)
	if err == nil {
		err = os.Rename(to, file)
	}
	if err != nil {
		return failed(file, errors.Join(err, os.Remove(to)))
	}
	return nil
}

// temporary returns the name of a file of records until it is complete. The library uses such names
// as well, so package durable finds leftovers.
func temporary(file string) string {
	return filepath.Join(filepath.Dir(file), ".tmp-"+filepath.Base(file))
}

// write writes a file without lists of owners, and syncs it.
func write(file, as string) error {
	from, err := os.Open(file)
	if err != nil {
		return err
	}
	defer from.Close()
	to, err := os.OpenFile(as, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = strip(from, to)
	if err == nil {
		err = to.Sync()
	}
	return errors.Join(err, to.Close())
}

func failed(file string, err error) error {
	return fmt.Errorf("take owners of files from %s: %w", file, err)
}

// Read returns the content of a file of records without lists of owners.
func Read(file string) ([]byte, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var content bytes.Buffer
	if _, err := strip(f, &content); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return content.Bytes(), nil
}

// long reports whether a file can be parsed and has a list that is longer than layers.KeptOwners.
func long(file string) (bool, error) {
	f, err := os.Open(file)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, failed(file, err)
	}
	defer f.Close()
	longest, err := strip(f, io.Discard)
	if errors.Is(err, errDamaged) {
		return false, nil
	}
	if err != nil {
		return false, failed(file, err)
	}
	return longest > layers.KeptOwners, nil
}

var errDamaged = errors.New("it is damaged")

// stripper copies JSON without lists of owners.
type stripper struct {
	from    *bufio.Reader
	to      *bufio.Writer
	longest int  // length of the longest list that was left out
	depth   int  // of lists and objects
	comma   bool // a comma was read, and may have to be written
	skip    bool // the next comma is not needed
}

// strip copies JSON without lists of owners, and returns the length of the longest.
func strip(from io.Reader, to io.Writer) (longest int, err error) {
	s := &stripper{from: bufio.NewReaderSize(from, 64<<10), to: bufio.NewWriterSize(to, 64<<10)}
	for {
		b, err := s.from.ReadByte()
		if errors.Is(err, io.EOF) {
			break
		}
		if err == nil {
			err = s.take(b)
		}
		if err != nil {
			return 0, err
		}
	}
	if s.depth != 0 {
		return 0, errDamaged
	}
	return s.longest, s.to.Flush()
}

// take copies or leaves out the element that begins with b. Flush returns errors of writing.
func (s *stripper) take(b byte) error {
	if b == ',' {
		s.comma = !s.skip
		s.skip = false
		return nil
	}
	if b == '"' {
		if length := s.ownersAhead(); length > 0 {
			s.skip = !s.comma
			s.comma = false
			return s.leaveOut(length)
		}
	}
	if s.comma && !strings.ContainsRune(space, rune(b)) {
		_ = s.to.WriteByte(',')
		s.comma = false
	}
	_ = s.to.WriteByte(b)
	switch b {
	case '"':
		return s.copyString()
	case '[', '{':
		s.depth++
	case ']', '}':
		s.depth--
		s.skip = false
	}
	return nil
}

// ownersAhead returns the length of the beginning of a list of owners, up to its first element, or
// 0 if something else follows.
func (s *stripper) ownersAhead() int {
	ahead, _ := s.from.Peek(32)
	for _, key := range []string{`uidset"`, `gidset"`} {
		rest, is := bytes.CutPrefix(ahead, []byte(key))
		if !is {
			continue
		}
		rest, is = bytes.CutPrefix(bytes.TrimLeft(rest, space), []byte(":"))
		rest = bytes.TrimLeft(rest, space)
		if is && len(rest) > 0 && rest[0] == '[' {
			return len(ahead) - len(rest) + 1
		}
	}
	return 0
}

const space = " \t\r\n"

// leaveOut skips the beginning of a list of owners, and the list.
func (s *stripper) leaveOut(beginning int) error {
	if _, err := s.from.Discard(beginning); err != nil {
		return err
	}
	for count := 1; ; {
		part, err := s.from.ReadSlice(']')
		if bytes.ContainsAny(part, "[{\"") {
			return errDamaged
		}
		count += bytes.Count(part, []byte(","))
		s.longest = max(s.longest, count)
		if err == nil {
			return nil
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			return errDamaged
		}
	}
}

// copyString copies a string after its first quotation mark.
func (s *stripper) copyString() error {
	for escaped := false; ; {
		b, err := s.from.ReadByte()
		if err != nil {
			return errDamaged
		}
		_ = s.to.WriteByte(b)
		if b == '"' && !escaped {
			return nil
		}
		escaped = b == '\\' && !escaped
	}
}
