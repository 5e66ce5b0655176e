package quota

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/crius-run/crius/internal/fault"
)

// fake is a file system with project quotas, for this package's tests, which may run without one;
// TestWritableLayerQuota of package storage uses a real one if there is one. A directory counts as
// one inode of its project.
type fake struct {
	mu       sync.Mutex
	projects map[string]uint32
	files    map[uint32]uint64 // inodes that are no directories
	limits   map[uint32]Limits
	taken    func(id uint32) // is called when an account has been read
	off      bool
}

func newFake() *fake {
	return &fake{projects: map[string]uint32{}, files: map[uint32]uint64{}, limits: map[uint32]Limits{}}
}

func (f *fake) enforced() bool { return !f.off }

func (f *fake) project(dir string) (uint32, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, err := os.Stat(dir); err != nil {
		return 0, err
	}
	return f.projects[dir], nil
}

func (f *fake) setProject(dir string, id uint32) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.projects[dir] = id
	return nil
}

func (f *fake) account(id uint32) (account, error) {
	f.mu.Lock()
	of := account{limits: f.limits[id], used: Limits{Inodes: f.files[id], Bytes: f.files[id] * 4096}}
	for dir, project := range f.projects {
		if _, err := os.Stat(dir); err == nil && project == id {
			of.used.Inodes++
		}
	}
	f.mu.Unlock()
	if f.taken != nil {
		f.taken(id)
	}
	return of, nil
}

func (f *fake) setLimits(id uint32, limits Limits) error {
	if f.off {
		return errors.New("quotas are off")
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.limits[id] = limits
	if limits == (Limits{}) {
		delete(f.limits, id)
	}
	return nil
}

func (f *fake) next(id uint32) (uint32, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var all []uint32
	for found := range f.limits {
		if found >= id {
			all = append(all, found)
		}
	}
	if len(all) == 0 {
		return 0, false
	}
	return slices.Min(all), true
}

// layer makes the directories of a writable layer.
func layer(t *testing.T, in string) (upper, work string) {
	t.Helper()
	upper, work = filepath.Join(in, "upper"), filepath.Join(in, "work")
	for _, dir := range []string{upper, work} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	return upper, work
}

func projects(t *testing.T, limits Limits) (*Projects, *fake) {
	f := newFake()
	return &Projects{dir: t.TempDir(), limits: limits, kernel: f}, f
}

var some = Limits{Bytes: 10 << 20, Inodes: 1000}

// A layer's two directories are in one project, which has the limits, and no other layer's
// are in it. Deleted, it leaves nothing.
func TestLayerHasProjectOfItsOwn(t *testing.T) {
	p, f := projects(t, some)
	layers := map[uint32]string{} // by project
	for range 50 {
		dir := t.TempDir()
		upper, work := layer(t, dir)
		if err := p.Bound(upper, work, false); err != nil {
			t.Fatal(err)
		}
		id := f.projects[upper]
		if !ours(id) || f.projects[work] != id || f.limits[id] != some {
			t.Fatalf("project %d, work %d, limits %v", id, f.projects[work], f.limits[id])
		}
		if other, ok := layers[id]; ok {
			t.Fatalf("project %d is that of %s and of %s", id, other, dir)
		}
		layers[id] = dir
		if err := p.Bound(upper, work, false); err != nil || f.projects[upper] != id {
			t.Fatalf("mounted once more: project %d, %v", f.projects[upper], err)
		}
	}
	for _, dir := range layers {
		if err := p.Remove(filepath.Join(dir, "work"), func() error { return os.RemoveAll(dir) }); err != nil {
			t.Fatal(err)
		}
	}
	if len(f.limits) > 0 {
		t.Errorf("left: %v", f.limits)
	}
}

// What somebody else takes at the same moment is left to them.
func TestProjectTakenByAnother(t *testing.T) {
	p, f := projects(t, some)
	upper, work := layer(t, t.TempDir())
	var first uint32
	f.taken = func(id uint32) {
		if first == 0 {
			first = id
			f.mu.Lock()
			f.files[id] = 7
			f.mu.Unlock()
		}
	}
	if err := p.Bound(upper, work, false); err != nil || f.projects[upper] == first {
		t.Errorf("project %d of another: %v", f.projects[upper], err)
	}
	if len(f.limits) != 1 || f.limits[first] != (Limits{}) {
		t.Errorf("limits %v, of which %d are the other's", f.limits, first)
	}
}

func TestNoFreeProject(t *testing.T) {
	p, f := projects(t, some)
	f.taken = func(id uint32) { f.files[id] = 1 }
	upper, work := layer(t, t.TempDir())
	if err := p.Bound(upper, work, false); !errors.Is(err, fault.Exhausted) {
		t.Error(err)
	}
}

// A container in the node's user namespace can take its files out of the project (ioctl
// FS_IOC_FSSETXATTR), so its usage is counted file by file.
func TestUsageIsTrustedInUserNamespacesOnly(t *testing.T) {
	p, f := projects(t, some)
	for _, userNS := range []bool{false, true} {
		upper, work := layer(t, t.TempDir())
		if err := p.Bound(upper, work, userNS); err != nil {
			t.Fatal(err)
		}
		f.files[f.projects[upper]] = 3
		used, ok := p.Usage(work)
		if ok != userNS || ok && used != (Limits{Bytes: 3 * 4096, Inodes: 5}) {
			t.Errorf("user namespace %t: %v, %t", userNS, used, ok)
		}
	}
	_, work := layer(t, t.TempDir())
	if used, ok := p.Usage(work); ok {
		t.Errorf("no project: %v", used)
	}
	f.projects[work] = 1048577 // the kubelet's
	if used, ok := p.Usage(work); ok {
		t.Errorf("another's project: %v", used)
	}
}

// The upper directory is the container's /, and its root may change its project: that neither hides
// its usage nor affects the project of another.
func TestProjectThatContainerSets(t *testing.T) {
	p, f := projects(t, some)
	dir := t.TempDir()
	upper, work := layer(t, dir)
	other, otherWork := layer(t, t.TempDir())
	if err := errors.Join(p.Bound(upper, work, false), p.Bound(other, otherWork, true)); err != nil {
		t.Fatal(err)
	}
	own, others := f.projects[work], f.projects[other]
	f.projects[upper] = others
	if used, ok := p.Usage(work); ok {
		t.Errorf("usage of another's project: %v", used)
	}
	if err := p.Bound(upper, work, false); err != nil || f.projects[upper] != own {
		t.Errorf("mounted once more: project %d, want %d, %v", f.projects[upper], own, err)
	}
	f.projects[upper] = others
	if err := p.Remove(work, func() error { return os.RemoveAll(dir) }); err != nil {
		t.Fatal(err)
	}
	if f.limits[others] != some || f.limits[own] != (Limits{}) {
		t.Errorf("limits %v, of which %d is another's", f.limits, others)
	}
}

// A layer whose removal failed half-way still gives its project back.
func TestRemoveRepeated(t *testing.T) {
	p, f := projects(t, some)
	dir := t.TempDir()
	upper, work := layer(t, dir)
	if err := p.Bound(upper, work, false); err != nil {
		t.Fatal(err)
	}
	failing := errors.New("failing")
	if err := p.Remove(work, func() error { return errors.Join(os.Remove(upper), failing) }); !errors.Is(err, failing) {
		t.Fatal(err)
	}
	if err := p.Remove(work, func() error { return os.RemoveAll(dir) }); err != nil || len(f.limits) > 0 {
		t.Errorf("%v, limits %v", err, f.limits)
	}
}

// A layer that has files and no project would have some of them in and some out of one.
func TestOlderLayerStaysUnlimited(t *testing.T) {
	p, f := projects(t, some)
	upper, work := layer(t, t.TempDir())
	if err := os.WriteFile(filepath.Join(upper, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := p.Bound(upper, work, false); err != nil || len(f.projects) > 0 || len(f.limits) > 0 {
		t.Errorf("%v, projects %v, limits %v", err, f.projects, f.limits)
	}
}

// A changed limit applies to a layer when it is mounted again; without a limit the layer keeps its
// own.
func TestChangedLimit(t *testing.T) {
	p, f := projects(t, some)
	upper, work := layer(t, t.TempDir())
	for _, limits := range []Limits{some, {Bytes: 1 << 30}, {}} {
		p.limits = limits
		if err := p.Bound(upper, work, false); err != nil {
			t.Fatal(err)
		}
		want := limits
		if want == (Limits{}) {
			want = Limits{Bytes: 1 << 30}
		}
		if got := f.limits[f.projects[upper]]; got != want {
			t.Errorf("%v, want %v", got, want)
		}
	}
}

// After a crash the limits of projects without files are removed, and those of others stay.
func TestSweep(t *testing.T) {
	p, f := projects(t, some)
	upper, work := layer(t, t.TempDir())
	if err := p.Bound(upper, work, true); err != nil {
		t.Fatal(err)
	}
	live, dead, open := f.projects[upper], uint32(firstProject+5), uint32(firstProject+kinds+9)
	for _, id := range []uint32{1000, 1048577, dead, open, firstProject + 2*kinds} {
		f.limits[id] = some
	}
	f.files[open] = 1 // deleted and still open
	if err := p.Sweep(); err != nil {
		t.Fatal(err)
	}
	for id, want := range map[uint32]bool{1000: true, 1048577: true, dead: false, open: true, live: true, firstProject + 2*kinds: true} {
		if _, has := f.limits[id]; has != want {
			t.Errorf("project %d has limits: %t", id, has)
		}
	}
}

// A layer that cannot be deleted keeps its limits; a file system that has lost its quotas
// keeps no layer.
func TestRemoveErrors(t *testing.T) {
	p, f := projects(t, some)
	dir := t.TempDir()
	upper, work := layer(t, dir)
	if err := p.Bound(upper, work, false); err != nil {
		t.Fatal(err)
	}
	failing := errors.New("failing")
	if err := p.Remove(work, func() error { return failing }); !errors.Is(err, failing) || len(f.limits) != 1 {
		t.Errorf("%v, limits %v", err, f.limits)
	}
	f.off = true
	if err := p.Remove(work, func() error { return os.RemoveAll(dir) }); err != nil {
		t.Error(err)
	}
	if err := p.Remove(work, func() error { return nil }); err != nil {
		t.Errorf("once more: %v", err)
	}
}

func TestTakeOptions(t *testing.T) {
	rest, limits, err := TakeOptions([]string{"overlay.mountopt=nodev", "overlay.size=10G", ".inodes=500", "overlay.sync=none"})
	if err != nil || !slices.Equal(rest, []string{"overlay.mountopt=nodev", "overlay.sync=none"}) || limits != (Limits{Bytes: 10 << 30, Inodes: 500}) {
		t.Errorf("%q, %v, %v", rest, limits, err)
	}
	for _, option := range []string{"overlay.size=much", "overlay.size=", "overlay.inodes=-1"} {
		if _, _, err := TakeOptions([]string{option}); !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), option) {
			t.Errorf("%s: %v", option, err)
		}
	}
}

// On a file system without quotas no limit can be set, and none is wanted without one.
func TestCheck(t *testing.T) {
	if err := In("/proc/none", some).Check(); !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), "the proc file system mounted at /proc has no project quotas") {
		t.Error(err)
	}
	if err := In("/proc", Limits{}).Check(); err != nil {
		t.Error(err)
	}
}
