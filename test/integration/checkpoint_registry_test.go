package integration

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/crius-run/crius/storage/checkpoint/remote"
	"github.com/crius-run/crius/test/kit/distribution"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/registry"
	"github.com/crius-run/crius/test/kit/wait"
)

// A running pod goes to a registry that wants a password, and continues from there in another pod. Nothing is left on
// the node, and what a killed pull leaves is removed by the next one.
func TestCheckpointThroughRegistry(t *testing.T) {
	t.Parallel()
	w, ok := dumps(t)
	if !ok {
		return
	}
	var r *distribution.Registry
	must(t, w.Do(func() error {
		r = distribution.Start(t, func(config distribution.Section) { config["auth"] = distribution.Htpasswd(t) })
		return nil
	}))
	must(t, os.MkdirAll(w.Path("registries.conf.d"), 0o700))
	must(t, w.Write("registries.conf.d/checkpoints.conf", fmt.Sprintf("[[registry]]\nlocation = %q\ninsecure = true\n", r.Address)))
	transfers := filepath.Join(w.StateRoot(), remote.Transfers)
	p := w.run(t, "runc")
	name := p.config.Metadata.Name
	c := p.start(t, "write /dev/shm/shared memory ; lines 1000000000 20ms")
	c.says(t, "line 5")
	ref := r.Address + "/checkpoints/" + name + ":1"
	creds := []string{"--creds", distribution.Username + ":" + distribution.Password}
	push := append([]string{"checkpoint", "default/" + name, "--push", ref}, creds...)

	if code, said, errs := w.try(t, "", push[:4]...); code != 1 || said != "" || !strings.Contains(errs, "give some with --creds") {
		t.Errorf("push without a password: exit code %d, %q, %q", code, said, errs)
	}
	code, said, errs := w.try(t, "", push...)
	digested := strings.TrimSpace(said)
	if code != 0 || !strings.HasPrefix(digested, r.Address+"/checkpoints/"+name+"@sha256:") {
		t.Fatalf("crius %q: exit code %d, %q, %q", push, code, said, errs)
	}
	missing(t, transfers)
	before := c.lines(t)
	c.goesOnCounting(t)

	beside := w.restoredBy(t, c, append([]string{digested, "--name", name + "-2", "--timeout", "5m"}, creds...)...)
	if first := beside.number(t); first < 5 || first > before+1 {
		t.Errorf("the counter goes on with %d; it had written %d", first, before)
	}
	equal(t, "/dev/shm", beside.exec(t, "cat /dev/shm/shared"), "memory")
	missing(t, transfers)
	w.cannotRestore(t, name+"-2", []string{"already exists"}, append([]string{ref, "--name", name + "-2"}, creds...)...)
	w.cannotRestore(t, name, []string{"give some with --creds"}, ref)
	missing(t, transfers)

	stalled := node.RegistryAddress + "/checkpoints/stalled:1"
	w.Registry.Inject(registry.Fault{Path: "/checkpoints/stalled/", Do: registry.Stall(0)})
	argv := w.Argv("restore", stalled)
	killed := exec.CommandContext(t.Context(), argv[0], argv[1:]...)
	must(t, w.Do(killed.Start))
	wait.For(t, "the pull to begin", func() bool {
		return slices.ContainsFunc(w.Registry.Requests(), func(r registry.Request) bool { return strings.Contains(r.Path, "/checkpoints/stalled/") })
	})
	must(t, killed.Process.Kill())
	_ = killed.Wait()
	if left := names(t, transfers); len(left) != 1 {
		t.Errorf("a killed pull leaves %q", left)
	}
	w.cannotRestore(t, name+"-2", []string{"already exists"}, append([]string{ref, "--name", name + "-2"}, creds...)...)
	missing(t, transfers)
}

// missing checks that nothing is at a path.
func missing(t *testing.T, path string) {
	t.Helper()
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s: %v", path, err)
	}
}
