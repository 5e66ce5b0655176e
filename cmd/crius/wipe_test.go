package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/cmd/crius/cli"
	"github.com/crius-run/crius/cmd/crius/config"
	"github.com/crius-run/crius/internal/owner"
	"github.com/crius-run/crius/pod"
	"github.com/crius-run/crius/pod/audit"
	"github.com/crius-run/crius/server/control"
)

// stateOf returns a configuration with used roots.
func stateOf(t *testing.T, paths ...string) config.Config {
	t.Helper()
	cfg := config.Default()
	dir := t.TempDir()
	cfg.Root, cfg.RunRoot = filepath.Join(dir, "lib"), filepath.Join(dir, "run")
	cfg.API.Listen = filepath.Join(cfg.RunRoot, "crius.sock")
	cfg.Image.Root = filepath.Join(cfg.Root, "images", "store")
	for _, path := range append([]string{"lib/pods/1/pod.json", "lib/lock", "lib/tuning/node/tuning.json", "lib/.crius-123", "lib/images/store/x", "run/runtime/runc/x", "run/crius.sock", "run/crius.sock.lock"}, paths...) {
		path = filepath.Join(dir, path)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, nil, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	return cfg
}

// Only crius's own entries are removed, and no link is followed out of the roots.
func TestRootsAreRemoved(t *testing.T) {
	cfg := stateOf(t)
	outside := filepath.Join(t.TempDir(), "kept")
	if err := os.WriteFile(outside, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Dir(outside), filepath.Join(cfg.Root, "containers")); err != nil {
		t.Fatal(err)
	}
	r := rootsOf(cfg)
	if err := errors.Join(r.ours(), r.remove()); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(outside); err != nil {
		t.Errorf("followed a link: %v", err)
	}
	if _, err := os.Stat(cfg.RunRoot); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the run root: %v", err)
	}
	var left []string
	entries, err := os.ReadDir(cfg.Root)
	for _, e := range entries {
		left = append(left, e.Name())
	}
	if err != nil || !slices.Equal(left, []string{"images"}) {
		t.Errorf("%q, %v: the images are another matter", left, err)
	}
	if err := r.remove(); err != nil {
		t.Errorf("again: %v", err)
	}
}

// A node that has signed, pushed or pulled a checkpoint can be wiped.
func TestWipeRemovesWhatCheckpointsLeave(t *testing.T) {
	cfg := stateOf(t, "lib/checkpoint.key", "lib/checkpoint.pub", "lib/transfers/1/pod/manifest.json")
	if err := os.RemoveAll(filepath.Join(cfg.Root, "images")); err != nil {
		t.Fatal(err)
	}
	r := rootsOf(cfg)
	if err := errors.Join(r.ours(), r.remove()); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(cfg.Root); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("left: %v, %v", left, err)
	}
}

// Entries that the configuration puts below a name of crius stay.
func TestAllowedNamesStay(t *testing.T) {
	cfg := stateOf(t, "lib/containers/storage/x", "run/runtime/images/x")
	cfg.Image.Root, cfg.Image.RunRoot = cfg.Root+"//containers/storage", filepath.Join(cfg.RunRoot, "runtime", "images")
	if err := os.RemoveAll(filepath.Join(cfg.Root, "images")); err != nil {
		t.Fatal(err)
	}
	r := rootsOf(cfg)
	if err := errors.Join(r.ours(), r.remove()); err != nil {
		t.Fatal(err)
	}
	for _, kept := range []string{cfg.Image.Root, cfg.Image.RunRoot} {
		if _, err := os.Stat(filepath.Join(kept, "x")); err != nil {
			t.Error(err)
		}
	}
	if _, err := os.Stat(filepath.Join(cfg.Root, "pods")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the pods: %v", err)
	}
}

// The directories of namespaces may be in a root itself (O11).
func TestRootsMayHoldNamespaces(t *testing.T) {
	cfg := stateOf(t, "run/netns/crius-1", "run/ipcns/crius-1", "run/utsns/crius-1", "run/userns/crius-1")
	cfg.Pod.NamespacesDir = cfg.RunRoot + "/"
	r := rootsOf(cfg)
	if err := errors.Join(r.ours(), r.remove()); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(cfg.RunRoot); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the run root: %v", err)
	}
}

// A wipe or check refuses a run root, and the server in it, that belongs to another crius.
func TestRunRootOfAnotherIsRefused(t *testing.T) {
	mine, other := stateOf(t), stateOf(t, "lib/pods/"+strings.Repeat("a", 64)+"/pod.json")
	unlock, err := lockRoots(t.Context(), other, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := unlock(); err != nil { // its server is not running, but its pods are
		t.Fatal(err)
	}
	mine.RunRoot = other.RunRoot
	refused := func(when string, err error) {
		t.Helper()
		if taken := new(owner.TakenError); !errors.As(err, &taken) || !strings.Contains(err.Error(), other.Root) {
			t.Errorf("%s: %v, want a refusal that names %s", when, err, other.Root)
		}
	}
	_, err = lockRoots(t.Context(), mine, 0)
	refused("a start", err)
	_, _, err = findKeeper(t.Context(), mine)
	refused("without a server", err)
	server, err := pod.Lock(t.Context(), mine.Root, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, _, err = findKeeper(t.Context(), mine)
	refused("with a server that has another run root", err)
	if err := server.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(filepath.Join(other.Root, "pods")); err != nil {
		t.Fatal(err)
	}
	unlock, err = lockRoots(t.Context(), mine, 0)
	if err != nil {
		t.Fatalf("once the other has no pods: %v", err)
	}
	if err := unlock(); err != nil {
		t.Fatal(err)
	}
}

// A root that contains a mount is not removed at all. A root that is a mount point, and
// mounts in entries that stay, are fine.
func TestRootsWithMountsAreNotRemoved(t *testing.T) {
	cfg := stateOf(t, "volume/data")
	volume := filepath.Join(filepath.Dir(cfg.Root), "volume")
	bind := func(source, point string) {
		if err := errors.Join(os.MkdirAll(point, 0o700), unix.Mount(source, point, "", unix.MS_BIND, "")); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { // unless the test has done it
			if err := unix.Unmount(point, 0); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
				t.Error(err)
			}
		})
	}
	bind(cfg.RunRoot, cfg.RunRoot)
	bind(cfg.Image.Root, cfg.Image.Root)
	inRoot, inRunRoot := filepath.Join(cfg.Root, "pods", "1", "volume"), filepath.Join(cfg.RunRoot, "containers", "rootfs")
	bind(volume, inRoot)
	bind(volume, inRunRoot)
	for _, point := range []string{inRoot, inRunRoot} {
		err := rootsOf(cfg).remove()
		if err == nil || !strings.Contains(err.Error(), point) || strings.Contains(err.Error(), cfg.Image.Root) {
			t.Errorf("%v, want one that names %s", err, point)
		}
		for _, kept := range []string{filepath.Join(volume, "data"), filepath.Join(cfg.Root, "lock"), filepath.Join(cfg.RunRoot, "runtime")} {
			if _, err := os.Stat(kept); err != nil {
				t.Error(err)
			}
		}
		if err := unix.Unmount(point, 0); err != nil {
			t.Fatal(err)
		}
	}
	if err := rootsOf(cfg).remove(); err != nil {
		t.Errorf("without them: %v", err)
	}
	if _, err := os.Stat(filepath.Join(cfg.Image.Root, "x")); err != nil {
		t.Errorf("the images: %v", err)
	}
}

// A server that finds no lock may start, so the lock is removed last.
func TestTheLockIsRemovedLast(t *testing.T) {
	cfg := stateOf(t, "lib/zzz", "lib/pod-cidr", "lib/containers/1/x")
	r := rootsOf(cfg)
	state := r[len(r)-1]
	if state.path != cfg.Root {
		t.Fatalf("%s is removed last, want the one with the lock", state.path)
	}
	entries, err := os.ReadDir(cfg.Root)
	if err != nil {
		t.Fatal(err)
	}
	if order := state.order(entries); !slices.Equal(order, []string{".crius-123", "containers", "pod-cidr", "pods", "tuning", "lock"}) {
		t.Errorf("%q", order)
	}
}

func TestRootsWithUnknownFilesAreRefused(t *testing.T) {
	for _, path := range []string{"lib/home", "run/systemd/x", "lib/pods.bak"} {
		cfg := stateOf(t, path)
		code, _, errs := crius(t, "--root", cfg.Root, "--run-root", cfg.RunRoot, "--image-root", cfg.Image.Root, "--api-listen", cfg.API.Listen, "wipe", "--yes")
		if code != 1 || !strings.Contains(errs, "do not belong to crius") || !strings.Contains(errs, strings.Split(path, "/")[1]) {
			t.Errorf("%s: code %d, %s", path, code, errs)
		}
		if _, err := os.Stat(filepath.Join(cfg.Root, "pods", "1", "pod.json")); err != nil {
			t.Errorf("%s: %v", path, err)
		}
	}
}

func TestQuestion(t *testing.T) {
	var out strings.Builder
	if err := question(strings.NewReader("yes\n"), &out)("all"); !errors.As(err, new(cli.UsageError)) || out.Len() > 0 {
		t.Errorf("no terminal: %v, %q", err, out.String())
	}
}

// Findings come with advice, and decide the exit code.
func TestNodeFindings(t *testing.T) {
	for want, c := range map[string]control.Checked{
		"ok: the node matches crius's records: 2 pods, 3 containers -> ": {Pods: 2, Containers: 3},
		"ok: repaired: pod 1: it is dead (stop it) -> ": {
			Findings: []audit.Finding{{Object: "pod 1", Wrong: "it is dead", Remedy: "stop it", Repaired: true}}},
		"FAIL: pod 1: it is dead -> run crius check --repair, which will stop it": {
			Findings: []audit.Finding{{Object: "pod 1", Wrong: "it is dead", Remedy: "stop it"}}},
		"FAIL: pod 1: it is dead; the repair failed: no -> fix the cause, then run crius check --repair again": {
			Findings: []audit.Finding{{Object: "pod 1", Wrong: "it is dead", Remedy: "stop it", Err: "no"}}},
		"FAIL: pod 1: it is dead -> call": {
			Findings: []audit.Finding{{Object: "pod 1", Wrong: "it is dead", Advice: "call"}}},
		"FAIL: the check is incomplete: x -> ": {Incomplete: "x"},
	} {
		found := nodeFindings(c)
		if len(found) != 1 {
			t.Errorf("%+v", found)
			continue
		}
		f := found[0]
		if got := string(f.Status) + ": " + f.Text + " -> " + f.Do; got != want {
			t.Errorf("%q, want %q", got, want)
		}
		f.Check = nodeCheck
		if bad := verdict([]finding{f}); (bad != nil) != (f.Status == statusFail) || bad != nil && !strings.Contains(bad.Error(), "does not match crius's records") {
			t.Errorf("%q: %v", want, bad)
		}
	}
	minor := nodeFindings(control.Checked{Findings: []audit.Finding{{Object: "record file a.damaged", Wrong: "moved aside", Advice: "rm a.damaged", Minor: true}}})
	if len(minor) != 1 || minor[0].Status != statusWarn || minor[0].Do != "rm a.damaged" {
		t.Errorf("minor: %+v", minor)
	}
	found := nodeFindings(control.Checked{OpaqueIPAM: []string{"calico-ipam"}})
	if len(found) != 2 || find(t, found, "calico-ipam").Status != statusOK {
		t.Errorf("%+v", found)
	}
}

func TestCheckOfANodeWithoutState(t *testing.T) {
	cfg := config.Default()
	cfg.Root, cfg.RunRoot = filepath.Join(t.TempDir(), "lib"), filepath.Join(t.TempDir(), "run")
	found := checkNode(t.Context(), cfg, false)
	if len(found) != 1 || found[0].Status != statusOK || !strings.Contains(found[0].Text, "no state yet") {
		t.Errorf("%+v", found)
	}
	cfg.Image.Root, cfg.Image.RunRoot = filepath.Join(t.TempDir(), "img"), filepath.Join(t.TempDir(), "imgrun")
	if err := os.Mkdir(cfg.RunRoot, 0o700); err != nil {
		t.Fatal(err)
	}
	checkNode(t.Context(), cfg, false)
	if _, err := os.Stat(cfg.Root); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("looking has made the root: %v", err)
	}
	if entries, err := os.ReadDir(cfg.RunRoot); err != nil || len(entries) > 0 {
		t.Errorf("looking has made %v, %v", entries, err)
	}
}

// If no server can start because the SELinux policy has no types for containers, the state
// can still be checked and wiped.
func TestStandInNeedsNoSELinuxTypes(t *testing.T) {
	cfg := config.Default()
	cfg.Root, cfg.RunRoot = filepath.Join(t.TempDir(), "lib"), filepath.Join(t.TempDir(), "run")
	who, release, err := findKeeper(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	if s, ok := who.(standIn); !ok || s.cfg.Pod.SELinux {
		t.Errorf("%T looks for SELinux types", who)
	}
}

// A node that hangs does not make the command hang.
func TestAskedEndsWithItsContext(t *testing.T) {
	release := make(chan struct{})
	defer close(release)
	ctx, cancel := context.WithTimeoutCause(t.Context(), time.Millisecond, errors.New("it took too long"))
	defer cancel()
	_, err := asked(ctx, func(context.Context) (int, error) { <-release; return 0, nil })
	if err == nil || err.Error() != "it took too long" {
		t.Errorf("%v", err)
	}
}

// Only for a server that has its lock but not yet its socket is the advice to try again.
func TestAdviceOfACheckThatFails(t *testing.T) {
	cfg := stateOf(t)
	cfg.Image.Options = []string{"overlay.nonsense=1"}
	findings := describeNode(t.Context(), cfg, false)
	if len(findings) != 1 || !strings.HasPrefix(findings[0].Text, "cannot compare the node with crius's records: ") || findings[0].Do != "" {
		t.Errorf("an image store that cannot be opened: %+v", findings)
	}
	unlock, err := lockRoots(t.Context(), cfg, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unlock(); err != nil {
			t.Error(err)
		}
	}()
	findings = describeNode(t.Context(), cfg, false)
	if len(findings) != 1 || !strings.Contains(findings[0].Do, "try again") {
		t.Errorf("a server without a socket: %+v", findings)
	}
}
