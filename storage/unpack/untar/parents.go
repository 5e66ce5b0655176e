package untar

import (
	"archive/tar"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	securejoin "github.com/cyphar/filepath-securejoin"

	"github.com/crius-run/crius/storage/unpack/headers"
	"github.com/crius-run/crius/storage/unpack/layers"
)

// Limits of links in a layer. No known image has links that lead deeper than its names, or to more
// than a few directories without entries.
const (
	maxSteps  = 100_000 // to resolve names, in addition to layers.MaxDepth for each entry
	maxBehind = 1_000   // directories that are made behind links
)

// parents follows the links of a layer before each entry is unpacked: the names alone say neither
// how deep an entry will be, nor how long it takes to find.
type parents struct {
	root string // the layer's directory

	last          string // parent of the previous entry; empty if that was a link
	resolved      string // where last leads
	steps, behind int
}

// check refuses an entry before it is unpacked.
func (p *parents) check(e *headers.Entry) error {
	parent := parentOf(e.Name)
	p.steps -= layers.MaxDepth
	if parent != p.last {
		resolved, err := p.resolve(parent)
		if err != nil {
			return err
		}
		p.behind += max(missing(p.root, resolved)-strings.Count(parent, "/"), 0)
		p.resolved = resolved
	}
	if e.Typeflag != tar.TypeDir {
		// At its end the unpacker looks up all directories again, then through links in their
		// place.
		at := filepath.Join(p.resolved, filepath.Base(filepath.Clean("/"+e.Name)))
		if st, err := os.Lstat(at); err == nil && st.IsDir() && at != p.root {
			return fmt.Errorf("%.100q takes the place of a directory that it has; rebuild the image without it", e.Name)
		}
	}
	p.last = parent
	if e.Typeflag == tar.TypeLink || e.Typeflag == tar.TypeSymlink {
		p.last = ""
	}
	if e.Typeflag == tar.TypeLink {
		if _, err := p.resolve(parentOf(e.Linkname)); err != nil {
			return err
		}
	}
	if p.behind > maxBehind {
		return fmt.Errorf("its links lead to more than %d directories that it does not have; rebuild the image without them", maxBehind)
	}
	return nil
}

// parentOf returns the directory of an entry as archive.Unpack interprets its name.
func parentOf(name string) string { return filepath.Dir(filepath.Clean("/" + name)) }

// resolve returns the path of a directory of the layer, behind all links.
func (p *parents) resolve(dir string) (string, error) {
	resolved, err := securejoin.SecureJoinVFS(p.root, dir, p)
	if err != nil {
		return "", err
	}
	if below, err := filepath.Rel(p.root, resolved); err != nil || strings.Count(below, "/")+1 > layers.MaxDepth {
		return "", fmt.Errorf("it has a path of more than %d directories behind links, %.100q...; rebuild the image without it", layers.MaxDepth, dir)
	}
	return resolved, nil
}

// Lstat implements securejoin.VFS. It fails when resolving names has taken too many steps.
func (p *parents) Lstat(name string) (os.FileInfo, error) {
	if p.steps++; p.steps > maxSteps {
		return nil, errors.New("its names lead through too many links; rebuild the image with fewer")
	}
	return os.Lstat(name)
}

// Readlink implements securejoin.VFS.
func (p *parents) Readlink(name string) (string, error) { return os.Readlink(name) }

// missing returns how many directories of dir do not exist, below root.
func missing(root, dir string) (count int) {
	for ; len(dir) > len(root); dir = filepath.Dir(dir) {
		if _, err := os.Lstat(dir); err == nil {
			break
		}
		count++
	}
	return count
}
