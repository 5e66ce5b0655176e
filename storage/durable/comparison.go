package durable

import (
	"archive/tar"
	"errors"
	"hash/maphash"
	"io"
	"path"
)

// comparison compares the files of a layer with the headers of its archive as they come. An image
// may have a million files, with names of any length: it keeps a hash of each name and, for files
// that differ, the name and the reason. The last entry of a name counts.
type comparison struct {
	dir    string
	owners bool // compare owners as well
	seed   maphash.Seed
	traits map[uint64]trait      // of names, by hash
	differ map[string]difference // by name
	room   int                   // bytes left for files that differ; without any the layer is damaged
	behind string                // a name that leads through a symbolic link of the layer; may be empty
}

// trait is a property of a name that decides how its file is judged.
type trait uint8

const (
	elsewhere trait = 1 << iota // a symbolic link, or no directory any more: names below it lead to other files, or nowhere
	above                       // a directory of another name
	linked                      // there are more names for the file, whose entries may set its owner
)

// difference is how a file differs from its entry.
type difference struct{ file, mode error }

// differRoom is enough for some ten thousand files that differ.
const differRoom = 64 << 20 // bytes

func newComparison(dir string, owners bool) *comparison {
	return &comparison{dir: dir, owners: owners, seed: maphash.MakeSeed(), traits: map[uint64]trait{}, differ: map[string]difference{}, room: differRoom}
}

// readAll reads an archive to its end.
func (c *comparison) readAll(all io.Reader) error {
	for r := tar.NewReader(all); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			_, err = io.Copy(io.Discard, all) // the padding
			return err
		}
		if err == nil && h.Typeflag != tar.TypeXGlobalHeader {
			err = c.take(path.Clean(h.Name), h)
		}
		if err != nil {
			return err
		}
	}
}

// take compares a file with its entry.
func (c *comparison) take(name string, h *tar.Header) error {
	delete(c.differ, name)
	id := maphash.String(c.seed, name)
	is := c.traits[id] & above
	switch {
	case h.Typeflag == tar.TypeSymlink:
		is |= elsewhere
		if is&above != 0 {
			c.behind = name
		}
	case h.Typeflag != tar.TypeDir && is&above != 0:
		is |= elsewhere
	}
	if h.Typeflag == tar.TypeLink {
		is |= linked
		c.traits[maphash.String(c.seed, path.Clean(h.Linkname))] |= linked
	}
	c.traits[id] = is
	if c.behindLink(name) {
		// The place of the file depends on the link, which is compared by itself.
		c.behind = name
		return nil
	}
	d := difference{file: sameFile(c.dir, name, h)}
	if d.file == nil && h.Typeflag != tar.TypeLink {
		d.mode = sameMode(c.dir, name, h, c.owners)
	}
	if d == (difference{}) {
		return nil
	}
	c.differ[name] = d
	if c.room -= 4*len(name) + 512; c.room < 0 { // the errors contain the name as well
		return damage("too many of its files differ from its archive: %w", errors.Join(d.file, d.mode))
	}
	return nil
}

// behindLink reports whether the layer reaches a file through a symbolic link, or has put something else in
// the place of its directory. It also notes the directories above the file.
func (c *comparison) behindLink(name string) (behind bool) {
	var hash maphash.Hash
	hash.SetSeed(c.seed)
	for i := range len(name) {
		if name[i] == '/' && i > 0 {
			id := hash.Sum64()
			behind = behind || c.traits[id]&elsewhere != 0
			c.traits[id] |= above
		}
		_ = hash.WriteByte(name[i]) // never fails
	}
	return behind
}

// result returns the differences as an error.
func (c *comparison) result() error {
	for name, d := range c.differ {
		if c.behindLink(name) {
			continue
		}
		if d.file != nil {
			return d.file
		}
		if c.traits[maphash.String(c.seed, name)]&linked == 0 {
			return d.mode
		}
	}
	return nil
}
