package integration

import (
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// variables adds n variables of size bytes each.
func variables(n, size int, of string) containerChange {
	return func(c *cri.ContainerConfig) {
		for i := range n {
			c.Envs = append(c.Envs, &cri.KeyValue{Key: fmt.Sprint("V", i), Value: []byte(strings.Repeat(of, size))})
		}
	}
}

// held returns the total size of files below dir, without what is mounted in
// containers.
func held(t *testing.T, dir string) (size int64) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() && (d.Name() == "rootfs" || d.Name() == "shm" || d.Name() == "files") {
			return fs.SkipDir
		}
		if info, err := d.Info(); err == nil && info.Mode().IsRegular() {
			size += info.Size()
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return size
}

// JSON's six bytes per control character would take 97 MB on /run for each
// container.
func TestEnvironmentThatNoProgramTakesIsRefusedBeforeAnythingIsDone(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		before := held(t, w.RunRoot())
		for words, change := range map[string]containerChange{
			"V0": variables(15, 1<<20, "\x01"),
			"BIG": func(c *cri.ContainerConfig) {
				c.Envs = append(c.Envs, &cri.KeyValue{Key: "SMALL", Value: []byte("1")}, &cri.KeyValue{Key: "BIG", Value: make([]byte, 128<<10)})
			},
			"args[0]":  func(c *cri.ContainerConfig) { c.Args[0] = strings.Repeat("x", 128<<10) },
			"in total": variables(70, 100<<10, "x"),
			"2097152":  variables(40, 100<<10, "x"), // a quarter of the stack
		} {
			_, err := p.try(t.Context(), steps("sleep"), change)
			wantCode(t, err, codes.InvalidArgument, words)
		}
		if now := held(t, w.RunRoot()); now > before+mib {
			t.Errorf("refused containers left %d bytes in the run directory", now-before)
		}
		c := p.start(t, "sleep", variables(19, 100<<10, "x"))
		if env := c.facts(t).Env; len(env) < 19 {
			t.Errorf("the container has %d variables", len(env))
		}
		for _, cmd := range [][]string{{"/probe", strings.Repeat("x", 128<<10)}, append([]string{"/probe"}, slicesOf(70, 100<<10)...)} {
			_, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: c.id, Cmd: cmd, Timeout: scene.LimitSeconds})
			wantCode(t, err, codes.InvalidArgument, "cmd")
			_, err = w.Runtime().Exec(t.Context(), &cri.ExecRequest{ContainerId: c.id, Cmd: cmd, Stdout: true})
			wantCode(t, err, codes.InvalidArgument, "cmd")
		}
		_, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: c.id, Cmd: append([]string{"/probe"}, slicesOf(3, 100<<10)...), Timeout: scene.LimitSeconds})
		wantCode(t, err, codes.InvalidArgument, "2097152") // with the container's own variables
	})
}

func slicesOf(n, size int) []string {
	var all []string
	for range n {
		all = append(all, strings.Repeat("x", size))
	}
	return all
}

// The bundle of an exited container shrinks, so that a pod may restart its
// containers for ever.
func TestExitedContainersGiveTheirBundleBack(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		large := variables(19, 100<<10, "\x01") // 12 MB of JSON
		var last *container
		for range 8 {
			last = p.start(t, "exit 3", large)
			equal(t, "exit code", last.wait(t).ExitCode, 3)
		}
		wait.For(t, "the bundles to be shortened", func() bool { return held(t, w.RunRoot()) < 2*mib })
		resp, err := w.Runtime().ContainerStatus(t.Context(), &cri.ContainerStatusRequest{ContainerId: last.id, Verbose: true})
		if err != nil || !strings.Contains(resp.Info["info"], `"runtimeSpec"`) {
			t.Errorf("the status of an exited container: %v, %v", resp.GetInfo(), err)
		}
		if err := w.Crash(t.Context()); err != nil {
			t.Fatal(err)
		}
		equal(t, "exit code after a restart", last.status(t).ExitCode, 3)
		last.remove(t)
	})
}

// A command keeps a copy of its container's environment until it runs, and a
// pod decides how long that takes.
func TestExecsHaveNoRoomBeyondThatOfTheirPod(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		target := p.start(t, "sleep", variables(19, 100<<10, "\x01")) // 12 MB of JSON
		var all []*container
		for _, n := range []int{19, 9} { // until less is left than the command needs
			for {
				c, err := p.try(t.Context(), steps("exit 0"), variables(n, 100<<10, "\x01"))
				if err != nil {
					wantCode(t, err, codes.ResourceExhausted, p.id)
					break
				}
				all = append(all, c)
			}
		}
		before := held(t, w.RunRoot())
		exec := func() error {
			_, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: target.id, Cmd: []string{"/probe", "echo x"}, Timeout: scene.LimitSeconds})
			return err
		}
		wantCode(t, exec(), codes.ResourceExhausted, p.id, p.config.Metadata.Name, "67108864")
		if now := held(t, w.RunRoot()); now > before+mib {
			t.Errorf("the refused command left %d bytes in the run directory", now-before)
		}
		for _, c := range all {
			c.remove(t)
		}
		if err := exec(); err != nil {
			t.Errorf("in a pod that has room again: %v", err)
		}
	})
}

// What one pod may use of the node's memory is bounded, and a refusal names the
// pod.
func TestPodHasABoundInTheRunDirectory(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		// Two MiB that become twelve in JSON.
		large := variables(19, 100<<10, "\x01")
		var all []*container
		for {
			c, err := p.try(t.Context(), steps("exit 0"), large)
			if err != nil {
				wantCode(t, err, codes.ResourceExhausted, p.id, p.config.Metadata.Name, "67108864", "exited")
				break
			}
			if all = append(all, c); len(all) > 6 {
				t.Fatal("a pod has more than 64 MiB in the run directory")
			}
		}
		if len(all) < 2 {
			t.Errorf("only %d containers fit", len(all))
		}
		if now := held(t, w.RunRoot()); now > 70*mib {
			t.Errorf("the pod has %d bytes in the run directory", now)
		}
		p.start(t, "exit 0").wait(t) // something small fits, as in any other pod
		for _, c := range all {
			c.start(t)
			c.wait(t)
			c.remove(t)
		}
		p.start(t, "exit 0", large).wait(t)
	})
}
