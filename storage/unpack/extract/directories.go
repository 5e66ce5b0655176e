package extract

import (
	"context"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// directories are all directories of a layer. What is in one that was replaced by something else is
// gone with it, however much it is: only the entry of that one is removed from known.
type directories struct {
	all   []directory // each after the one that it is in; the first is the root
	known map[place]int32
}

// place is where a directory is.
type place struct {
	in   int32 // index of the directory that it is in
	name string
}

// directory is a directory of a layer. Files that are made in it change its times, so these are set
// at the end.
type directory struct {
	place
	implied bool // no entry describes it
	gone    bool
	opaque  bool             // nothing of the layers below is seen in it
	times   [2]unix.Timespec // unless it is implied
}

func newDirectories() *directories {
	return &directories{all: []directory{{place: place{in: -1}, implied: true}}, known: map[place]int32{}}
}

// at returns the index of a directory, which is implied if it was not known.
func (d *directories) at(path string) int32 {
	at := int32(0)
	for name := range strings.SplitSeq(strings.Trim(path, "/"), "/") {
		if name == "" {
			continue // the root
		}
		next, is := d.known[place{at, name}]
		if !is {
			next = int32(len(d.all))
			here := place{at, strings.Clone(name)} // paths may be long
			d.known[here] = next
			d.all = append(d.all, directory{place: here, implied: true})
		}
		at = next
	}
	return at
}

// describe notes what an entry says about a directory.
func (d *directories) describe(path string, times [2]unix.Timespec) {
	at := &d.all[d.at(path)]
	at.implied, at.times = false, times
}

// remove forgets a directory and all that is in it.
func (d *directories) remove(path string) {
	at := d.at(path)
	d.all[at].gone = true
	delete(d.known, d.all[at].place)
}

// finish removes what has gone, and sets the times that entries say.
func (d *directories) finish(ctx context.Context) error {
	d.known = nil
	for i := range d.all {
		dir := &d.all[i]
		if dir.gone = dir.gone || i > 0 && d.all[dir.in].gone; dir.gone || dir.implied {
			continue
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		path := filepath.Join("/", d.path(i))
		if err := setTimes(path, dir.times); err != nil {
			return failed(path, "set times", err)
		}
	}
	return nil
}

// path returns the path of a directory, from the root: "." for the root itself.
func (d *directories) path(i int) string {
	return pathOf(i, func(i int) place { return d.all[i].place })
}

// pathOf returns the path of a directory of a list, of which places returns the elements.
func pathOf(i int, places func(int) place) string {
	if i == 0 {
		return "."
	}
	var names []string
	size := 0
	for ; i > 0; i = int(places(i).in) {
		names = append(names, places(i).name)
		size += len(places(i).name) + 1
	}
	var path strings.Builder
	path.Grow(size)
	for n := len(names) - 1; n >= 0; n-- {
		path.WriteString(names[n])
		if n > 0 {
			path.WriteByte('/')
		}
	}
	return path.String()
}

// left returns the implied directories, and those that they are in.
func (d *directories) left() Implied {
	wanted := make([]bool, len(d.all))
	for i := len(d.all) - 1; i >= 0; i-- {
		wanted[i] = !d.all[i].gone && (wanted[i] || d.all[i].implied)
		if wanted[i] && i > 0 {
			wanted[d.all[i].in] = true
		}
	}
	var left Implied
	index := make([]int32, len(d.all))
	for i, dir := range d.all {
		if !wanted[i] {
			continue
		}
		index[i] = int32(len(left))
		if i > 0 {
			dir.in = index[dir.in]
		}
		seen := impliedDirectory{place: dir.place, implied: dir.implied}
		if dir.opaque && i > 0 { // overlayfs merges the roots of all layers
			seen.opaque = 1
		}
		left = append(left, seen)
	}
	return left
}
