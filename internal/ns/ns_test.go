package ns

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/mount"
	"github.com/crius-run/crius/internal/thread"
)

const crashDir = "NS_TEST_CRASH_DIR"

func TestMain(m *testing.M) {
	if dir := os.Getenv(crashDir); dir != "" {
		createForever(crashSpec(dir))
	}
	os.Exit(m.Run())
}

// spec requests everything, in a directory below which nothing may be left.
func spec(t testing.TB) Spec {
	t.Helper()
	dir := t.TempDir()
	t.Cleanup(func() {
		for _, left := range remains(t, dir) {
			t.Errorf("left behind: %s", left)
			unix.Unmount(left, unix.MNT_DETACH)
		}
	})
	return Spec{Dir: dir, Name: "crius-" + strings.Repeat("5a", 32), Net: true, IPC: true, UTS: true, Hostname: "pod-1"}
}

// remains returns the mounts and files below dir.
func remains(t testing.TB, dir string) []string {
	t.Helper()
	left, err := mount.Under(dir)
	if err != nil {
		t.Fatal(err)
	}
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			left = append(left, path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return left
}

func create(t testing.TB, s Spec) Set {
	t.Helper()
	set, err := Create(s)
	if err != nil {
		t.Fatal(err)
	}
	return set
}

func remove(t testing.TB, s Spec) {
	t.Helper()
	if err := Remove(s); err != nil {
		t.Fatal(err)
	}
}

// inside runs f on a thread in all namespaces of set except the user namespace.
func inside(t testing.TB, set Set, f func() error) {
	t.Helper()
	err := thread.Run(func() error {
		for path, flag := range map[string]int{set.Net: unix.CLONE_NEWNET, set.IPC: unix.CLONE_NEWIPC, set.UTS: unix.CLONE_NEWUTS} {
			if path == "" {
				continue
			}
			if err := setns(path, flag); err != nil {
				return err
			}
		}
		return f()
	})
	if err != nil {
		t.Error(err)
	}
}

func TestCreateRemove(t *testing.T) {
	t.Parallel()
	s := spec(t)
	set := create(t, s)
	want := Set{
		Net: filepath.Join(s.Dir, "netns", s.Name),
		IPC: filepath.Join(s.Dir, "ipcns", s.Name),
		UTS: filepath.Join(s.Dir, "utsns", s.Name),
	}
	if set != want {
		t.Fatalf("set %+v, want %+v", set, want)
	}
	for proc, path := range map[string]string{"net": set.Net, "ipc": set.IPC, "uts": set.UTS} {
		made, err1 := Inode(path)
		host, err2 := Inode("/proc/self/ns/" + proc)
		if err1 != nil || err2 != nil || made == 0 || made == host {
			t.Errorf("%s: inode %d, %v; the host's %d, %v", proc, made, err1, host, err2)
		}
	}
	for dir, perm := range map[string]os.FileMode{"netns": 0o755, "ipcns": 0o700, "utsns": 0o700} {
		if info, err := os.Stat(filepath.Join(s.Dir, dir)); err != nil || info.Mode().Perm() != perm {
			t.Errorf("%s: %v, %v; want %o", dir, info.Mode(), err, perm)
		}
	}

	if _, err := Create(s); !errors.Is(err, fault.Exists) {
		t.Errorf("second Create: %v, want fault.Exists", err)
	}
	if _, err := Inode(set.Net); err != nil {
		t.Errorf("the failed second Create took the first one's pin: %v", err)
	}

	inside(t, set, func() error {
		name, err := os.Hostname()
		if err != nil || name != "pod-1" {
			t.Errorf("host name %q, %v", name, err)
		}
		return nil
	})
	for range 2 {
		remove(t, s)
	}
	for _, path := range []string{set.Net, set.IPC, set.UTS} {
		if _, err := Inode(path); !errors.Is(err, fault.NotFound) {
			t.Errorf("Inode(%s) after Remove: %v", path, err)
		}
	}
}

func TestOnlyWhatIsAsked(t *testing.T) {
	t.Parallel()
	for _, one := range []Spec{{Net: true}, {IPC: true}, {UTS: true}, {Net: true, UTS: true}} {
		s := spec(t)
		s.Net, s.IPC, s.UTS, s.Hostname = one.Net, one.IPC, one.UTS, ""
		set := create(t, s)
		if (set.Net != "") != s.Net || (set.IPC != "") != s.IPC || (set.UTS != "") != s.UTS || set.User != "" {
			t.Errorf("asked %+v, got %+v", one, set)
		}
		remove(t, Spec{Dir: s.Dir, Name: s.Name}) // the flags may be unknown
	}
}

// The addresses of lo are the kernel's: 127.0.0.1 and, with IPv6, ::1.
func TestLoopbackIsUp(t *testing.T) {
	t.Parallel()
	s := spec(t)
	set := create(t, s)
	defer remove(t, s)
	err := Do(set.Net, func() error {
		interfaces, err := net.Interfaces()
		if err != nil || len(interfaces) != 1 || interfaces[0].Flags&net.FlagUp == 0 {
			t.Errorf("interfaces %+v, %v", interfaces, err)
		}
		for _, address := range []string{"127.0.0.1:0", "[::1]:0"} {
			listener, err := net.Listen("tcp", address)
			if err != nil {
				return err
			}
			conn, err := net.DialTimeout("tcp", listener.Addr().String(), time.Minute)
			if err != nil {
				return err
			}
			conn.Close()
			listener.Close()
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

func TestSpecRefused(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	ids := []IDMap{{0, 100000, 65536}}
	for _, s := range []Spec{
		{Dir: "relative", Name: "x", Net: true},
		{Dir: dir, Name: "", Net: true},
		{Dir: dir, Name: "..", Net: true},
		{Dir: dir, Name: "a/../../b", Net: true},
		{Dir: dir, Name: "a\x00b", Net: true},
		{Dir: dir, Name: strings.Repeat("n", 256), Net: true},
		{Dir: dir, Name: "x"},
		{Dir: dir, Name: "x", Net: true, Hostname: "the-host-itself"},
		{Dir: dir, Name: "x", UTS: true, Hostname: strings.Repeat("h", 65)},
		{Dir: dir, Name: "x", UTS: true, Hostname: "a\nb"},
		{Dir: dir, Name: "x", Net: true, UIDs: ids},
		{Dir: dir, Name: "x", Net: true, GIDs: ids},
	} {
		if _, err := Create(s); !errors.Is(err, fault.Invalid) {
			t.Errorf("Create(%+v) = %v, want fault.Invalid", s, err)
		}
	}
	for _, s := range []Spec{{Dir: dir, Name: "../x"}, {Dir: "x", Name: "x"}, {Dir: dir}} {
		if err := Remove(s); !errors.Is(err, fault.Invalid) {
			t.Errorf("Remove(%+v) = %v, want fault.Invalid", s, err)
		}
	}
	if left := remains(t, dir); len(left) != 0 {
		t.Errorf("left %q", left)
	}
}

// Possible remains of a half-done or damaged Create: a file without a mount,
// stacked mounts, one pin of three.
func TestRemoveHalves(t *testing.T) {
	t.Parallel()
	s := spec(t)
	for _, k := range kinds() {
		if err := place(filepath.Join(s.Dir, k.dir), s.Name, k.perm); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		if err := unix.Mount("/proc/self/ns/net", s.path(network()), "", unix.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := Inode(filepath.Join(s.Dir, "ipcns", s.Name)); !errors.Is(err, fault.NotFound) {
		t.Errorf("Inode of a bare file: %v, want fault.NotFound", err)
	}
	remove(t, s)
}

func TestDo(t *testing.T) {
	t.Parallel()
	s := spec(t)
	set := create(t, s)
	defer remove(t, s)
	ino, err := Inode(set.Net)
	if err != nil {
		t.Fatal(err)
	}
	host, _ := Inode("/proc/self/ns/net")

	failure := errors.New("told")
	err = Do(set.Net, func() error {
		if now, err := Inode("/proc/thread-self/ns/net"); err != nil || now != ino {
			t.Errorf("inside: %d, %v; want %d", now, err, ino)
		}
		out, err := exec.Command("stat", "-Lc", "%i", "/proc/self/ns/net").Output()
		if got := strings.TrimSpace(string(out)); err != nil || got != strconv.FormatUint(ino, 10) {
			t.Errorf("a process started inside is in %s, %v", got, err)
		}
		return failure
	})
	if !errors.Is(err, failure) {
		t.Errorf("Do returned %v", err)
	}
	if err := Do(filepath.Join(s.Dir, "none"), func() error { return nil }); !errors.Is(err, fault.NotFound) {
		t.Errorf("Do without a namespace: %v", err)
	}
	if err := Do(set.IPC, func() error { return nil }); err == nil {
		t.Error("Do entered an IPC namespace")
	}
	if now, err := Inode("/proc/self/ns/net"); err != nil || now != host {
		t.Errorf("the process went from namespace %d to %d, %v", host, now, err)
	}
}

func TestEach(t *testing.T) {
	t.Parallel()
	a, b := spec(t), spec(t)
	first, second := create(t, a), create(t, b)
	defer remove(t, a)
	defer remove(t, b)
	empty := filepath.Join(t.TempDir(), "empty") // like a pin after a reboot
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	failure := errors.New("told")
	paths := []string{first.Net, "/none", second.Net, empty, first.Net}
	seen := map[int]uint64{}
	errs := Each(paths, func(i int) error {
		seen[i], _ = Inode("/proc/thread-self/ns/net")
		if i == 4 {
			return failure
		}
		return nil
	})
	for i, path := range map[int]string{0: first.Net, 2: second.Net, 4: first.Net} {
		if want, err := Inode(path); err != nil || seen[i] != want {
			t.Errorf("call %d was in %d, want %d, %v", i, seen[i], want, err)
		}
	}
	if len(seen) != 3 || len(errs) != 3 || !errors.Is(errs[1], fault.NotFound) || !errors.Is(errs[3], fault.NotFound) || !errors.Is(errs[4], failure) {
		t.Errorf("calls %v, errors %v", seen, errs)
	}
	if errs := Each(paths[:1], func(int) error { return nil }); errs != nil {
		t.Errorf("errors %v", errs)
	}
}

func TestParallel(t *testing.T) {
	t.Parallel()
	base := spec(t)
	var wait sync.WaitGroup
	for i := range 32 {
		wait.Go(func() {
			s := base
			s.Name, s.Hostname = fmt.Sprintf("pod-%d", i), fmt.Sprintf("host-%d", i)
			s.Sysctls = map[string]string{"kernel.shmmni": strconv.Itoa(1000 + i)}
			if i%4 == 0 {
				s.UIDs, s.GIDs = []IDMap{{0, 100000, 65536}}, []IDMap{{0, 100000, 65536}}
			}
			set := create(t, s)
			inside(t, set, func() error {
				if name, _ := os.Hostname(); name != s.Hostname || sysctl("kernel/shmmni") != s.Sysctls["kernel.shmmni"] {
					t.Errorf("host name %s, shmmni %s in %s", name, sysctl("kernel/shmmni"), s.Name)
				}
				return nil
			})
			remove(t, s)
		})
	}
	wait.Wait()
}

func TestPins(t *testing.T) {
	s := spec(t)
	if found, err := Pins(s.Dir, "crius-"); err != nil || len(found) > 0 {
		t.Errorf("before the first: %q, %v", found, err)
	}
	set, err := Create(s)
	if err != nil {
		t.Fatal(err)
	}
	foreign := filepath.Join(s.Dir, "netns", "cni-1")
	if err := os.WriteFile(foreign, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	found, err := Pins(s.Dir, "crius-")
	if want := []string{set.Net, set.IPC, set.UTS}; err != nil || len(found) != 1 || strings.Join(found[s.Name], " ") != strings.Join(want, " ") {
		t.Errorf("%q, %v, want %q", found, err, want)
	}
	if err := errors.Join(Remove(s), os.Remove(foreign)); err != nil {
		t.Fatal(err)
	}
}
