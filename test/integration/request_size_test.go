package integration

import (
	"fmt"
	"io/fs"
	"os"
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
		last := w.run(t, handler).start(t, "exit 3", variables(6, 100<<10, "\x01")) // nearly 4 MB of JSON
		equal(t, "exit code", last.wait(t).ExitCode, 3)
		wait.For(t, "the bundle to be shortened", func() bool { return held(t, w.RunRoot()) < mib })
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

// What one pod may use of the node's memory is bounded, and a refusal names the
// pod. A command keeps a copy of its container's environment until it runs, and
// a pod decides how long that takes: that counts, too.
func TestPodHasABoundInTheRunDirectory(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	p := w.run(t, "crun")
	large := variables(19, 100<<10, "\x01") // two MiB, which become twelve in JSON
	target := p.start(t, "sleep", large)
	// As if there were more of them, which would take minutes. Another one, and a
	// command, would fit beside the file alone: crun keeps a copy of the bundle.
	ballast := filepath.Join(w.RunRoot(), "containers", target.id, "ballast")
	put(t, ballast, strings.Repeat("x", 40*mib))
	before := held(t, w.RunRoot())
	_, err := p.try(t.Context(), steps("exit 0"), large)
	wantCode(t, err, codes.ResourceExhausted, p.id, p.config.Metadata.Name, "67108864", "exited")
	command := func() error {
		_, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: target.id, Cmd: []string{"/probe", "echo x"}, Timeout: scene.LimitSeconds})
		return err
	}
	wantCode(t, command(), codes.ResourceExhausted, p.id, p.config.Metadata.Name, "67108864")
	if now := held(t, w.RunRoot()); now > before+mib {
		t.Errorf("what was refused has left %d bytes in the run directory", now-before)
	}
	p.start(t, "exit 0").wait(t) // something small fits, as in any other pod
	must(t, os.Remove(ballast))
	must(t, command())
	p.start(t, "exit 0", large).wait(t)
}
