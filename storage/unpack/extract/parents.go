package extract

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	securejoin "github.com/cyphar/filepath-securejoin"

	"github.com/crius-run/crius/internal/fault"
)

// Limits of paths in a layer. No known image has a path of a hundred directories, links that lead
// deeper than its names, or links to more than a few directories without entries.
//
// MaxDepth is how many directories a path may have above its last part.
const (
	MaxDepth  = 256     // directories of a path: each system call takes longer with more
	maxSteps  = 100_000 // to resolve names, in addition to MaxDepth for each entry
	maxBehind = 1_000   // directories that are made behind links
)

// parents finds the directories of entries, and follows the links of the layer that are in their
// names: the names alone say neither how deep an entry will be, nor how long it takes to find.
type parents struct {
	last          string // parent of the previous entry; empty if that was a link
	resolved      string // where last leads
	steps, behind int
}

// of returns the directory of an entry with this parent, behind all links.
func (p *parents) of(parent string) (string, error) {
	p.steps -= MaxDepth
	if parent == p.last {
		return p.resolved, nil
	}
	resolved, err := p.resolve(parent)
	if err != nil {
		return "", err
	}
	if p.behind += max(missing(resolved)-strings.Count(parent, "/"), 0); p.behind > maxBehind {
		return "", fmt.Errorf("its links lead to more than %d directories that it does not have; rebuild the image without them: %w", maxBehind, fault.Invalid)
	}
	p.last, p.resolved = parent, resolved
	return resolved, nil
}

// forget makes the next entry's directory be found again.
func (p *parents) forget() { p.last = "" }

// split returns the directory and the last part of the path of an entry. The name is below the
// root, wherever it leads to; the last part is "." for the root.
func split(name string) (dir, base string) {
	path := filepath.Clean("/" + name)
	if path == "/" {
		return path, "."
	}
	return filepath.Dir(path), filepath.Base(path)
}

// resolve returns the path of a directory of the layer, behind all links.
func (p *parents) resolve(dir string) (string, error) {
	resolved, err := securejoin.SecureJoinVFS("/", dir, p)
	if err != nil {
		return "", err
	}
	if resolved != "/" && strings.Count(resolved, "/") > MaxDepth {
		return "", fmt.Errorf("it has a path of more than %d directories behind links, %.100q...; rebuild the image without it: %w", MaxDepth, dir, fault.Invalid)
	}
	return resolved, nil
}

// Lstat implements securejoin.VFS. It fails when resolving names has taken too many steps.
func (p *parents) Lstat(name string) (os.FileInfo, error) {
	if p.steps++; p.steps > maxSteps {
		return nil, fmt.Errorf("its names lead through too many links; rebuild the image with fewer: %w", fault.Invalid)
	}
	return os.Lstat(name)
}

// Readlink implements securejoin.VFS.
func (p *parents) Readlink(name string) (string, error) { return os.Readlink(name) }

// missing returns how many directories of dir do not exist.
func missing(dir string) (count int) {
	for ; len(dir) > len("/"); dir = filepath.Dir(dir) {
		if _, err := os.Lstat(dir); err == nil {
			break
		}
		count++
	}
	return count
}
