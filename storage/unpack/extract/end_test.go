package extract

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/crius-run/crius/internal/fault"
)

// forever is an archive without end: directories below each other, in and out of files that replace
// them.
type forever struct {
	rest  []byte
	count int
}

func (f *forever) Read(p []byte) (int, error) {
	if len(f.rest) == 0 {
		f.count++
		deep := strings.Repeat("d/", f.count%MaxDepth)
		if f.count%MaxDepth == 0 {
			f.rest = header("d", '0', "")
		} else if len(deep) <= 90 {
			f.rest = header(deep, '5', "")
		} else {
			f.rest = slices.Concat(header("p", tar.TypeXHeader, pax("path", deep)), header("p", '5', ""))
		}
	}
	n := copy(p, f.rest)
	f.rest = f.rest[n:]
	return n, nil
}

// cancels ends the work of the layer that it checks after some entries.
type cancels struct {
	lenient
	after  int
	cancel context.CancelCauseFunc
}

var errLeft = errors.New("the caller has left")

func (c *cancels) Entry(*tar.Header) error {
	if c.after--; c.after == 0 {
		c.cancel(errLeft)
	}
	return nil
}

// A layer that would keep the unpacker busy for ever ends with its pull.
func TestBusyLayerEndsWithItsPull(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancelCause(t.Context())
	check := &cancels{after: 300, cancel: cancel}
	if _, err := extractIn(ctx, t, t.TempDir(), &forever{}, check); !errors.Is(err, errLeft) {
		t.Errorf("%v", err)
	}
	if check.after < -1 {
		t.Errorf("%d entries were unpacked afterwards", -check.after)
	}
}

// So does one whose archive has been read: the times of its directories are not set then.
func TestReadLayerEndsWithItsPull(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancelCause(t.Context())
	var entries []tar.Header
	for i := range 10 {
		entries = append(entries, dir(fmt.Sprint(i), 0o755))
	}
	if _, err := extractIn(ctx, t, t.TempDir(), io.MultiReader(bytes.NewReader(packed(t, tar.FormatPAX, entries...)), &atEnd{cancel}), lenient{}); !errors.Is(err, errLeft) {
		t.Errorf("%v", err)
	}
}

// atEnd calls cancel when it is read.
type atEnd struct{ cancel context.CancelCauseFunc }

func (a *atEnd) Read([]byte) (int, error) {
	a.cancel(errLeft)
	return 0, io.EOF
}

// What is left of the directories of a layer without entries, and what they are in, is known at its
// end, whatever replaced what.
func TestDirectoriesWithoutEntries(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		entries []tar.Header
		want    []string
	}{
		"none":               {[]tar.Header{dir(".", 0o755), dir("a", 0o755), plain("a/f", 1)}, nil},
		"root":               {[]tar.Header{dir("a", 0o755), plain("a/f", 1)}, []string{"."}},
		"in one with":        {[]tar.Header{dir(".", 0o755), dir("a", 0o755), plain("a/b/f", 1), dir("c", 0o755)}, []string{"(.)", "(a)", "a/b"}},
		"before its entry":   {[]tar.Header{dir(".", 0o755), plain("a/b/f", 1), dir("a/b", 0o755)}, []string{"(.)", "a"}},
		"replaced":           {[]tar.Header{dir(".", 0o755), plain("a/b/f", 1), plain("a", 1)}, nil},
		"replaced and again": {[]tar.Header{dir(".", 0o755), dir("a", 0o755), plain("a/b/c/f", 1), plain("a", 1), dir("a", 0o755), plain("a/c/f", 1)}, []string{"(.)", "(a)", "a/c"}},
		"behind a link":      {[]tar.Header{dir(".", 0o755), link("l", "a/b"), plain("l/f", 1)}, []string{"(.)", "a", "a/b"}},
		"for a whiteout":     {[]tar.Header{dir(".", 0o755), plain("a/.wh.f", 1)}, []string{"(.)", "a"}},
	} {
		u, err := extractTo(t, t.TempDir(), bytes.NewReader(packed(t, tar.FormatPAX, test.entries...)), lenient{})
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for i, d := range u.Implied {
			path := (&inheritance{Implied: u.Implied}).path(i)
			if !d.implied {
				path = "(" + path + ")"
			}
			got = append(got, path)
		}
		if !slices.Equal(got, test.want) {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
}

// An image that implies directories without number in its layers does not have each looked up in each
// layer; and one whose lower layer is gone says so.
func TestInheritIsBounded(t *testing.T) {
	t.Parallel()
	lower, upper := t.TempDir(), t.TempDir()
	var entries []tar.Header
	for i := range 10 {
		entries = append(entries, plain(fmt.Sprintf("%d/f", i), 1))
	}
	u, err := extractTo(t, upper, bytes.NewReader(packed(t, tar.FormatPAX, entries...)), lenient{})
	if err != nil {
		t.Fatal(err)
	}
	for lookups, want := range map[int]error{11: nil, 10: fault.Invalid} {
		left := lookups
		if err := u.Implied.Inherit(t.Context(), upper, []string{lower}, &left); !errors.Is(err, want) {
			t.Errorf("%d lookups: %v", lookups, err)
		}
	}
	left := MaxLookups
	if err := u.Implied.Inherit(t.Context(), upper, []string{lower + "/none"}, &left); !errors.Is(err, ErrBelowMissing) {
		t.Errorf("%v", err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errLeft)
	if err := u.Implied.Inherit(ctx, upper, []string{lower}, &left); !errors.Is(err, errLeft) {
		t.Errorf("%v", err)
	}
}

// A layer in an additional layer store is behind a link; in a layer nothing is.
func TestInheritFollowsNoLinkInLayers(t *testing.T) {
	t.Parallel()
	lower, upper := t.TempDir(), t.TempDir()
	below := packed(t, tar.FormatPAX, dir("a", 0o711), dir("t", 0o711), dir("t/b", 0o700), link("l", "t"), link("b", "t/b"))
	if _, err := extractTo(t, lower, bytes.NewReader(below), lenient{}); err != nil {
		t.Fatal(err)
	}
	u, err := extractTo(t, upper, bytes.NewReader(packed(t, tar.FormatPAX, plain("a/f", 1), plain("l/b/f", 1), plain("b/f", 1))), lenient{})
	if err != nil {
		t.Fatal(err)
	}
	behind, left := filepath.Join(t.TempDir(), "diff"), MaxLookups
	if err := errors.Join(os.Symlink(lower, behind), u.Implied.Inherit(t.Context(), upper, []string{behind}, &left)); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]os.FileMode{"a": 0o711, "l": 0o755, "l/b": 0o755, "b": 0o755} {
		if info, err := os.Lstat(filepath.Join(upper, path)); err != nil || info.Mode() != os.ModeDir|want {
			t.Errorf("%s: %v, %v", path, info, err)
		}
	}
}

// BenchmarkReplacedDirectories has directories as deep as may be that files replace.
func BenchmarkReplacedDirectories(b *testing.B) {
	var entries []tar.Header
	deep := strings.Repeat("d/", 200)
	for i := range 2000 {
		entries = append(entries, dir(fmt.Sprintf("%s%d", deep, i), 0o755))
	}
	for i := range 200 {
		entries = append(entries, dir(fmt.Sprintf("r%d", i), 0o755), plain(fmt.Sprintf("r%d", i), 1))
	}
	archive := packed(b, tar.FormatPAX, entries...)
	for b.Loop() {
		if _, err := extractTo(b, b.TempDir(), bytes.NewReader(archive), lenient{}); err != nil {
			b.Fatal(err)
		}
	}
}
