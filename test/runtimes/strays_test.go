package runtimes

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// A runtime is killed in the middle of create, with every process that knew of
// it, and the record is lost: what the runtime had written by then is found,
// and removed.
func TestKilledCreateWithoutRecord(t *testing.T) {
	handlers := slices.DeleteFunc(wanted(), func(h string) bool { return sandboxed(h) && h != gvisor }) // which keep no state files here
	eachPrivateOf(t, handlers, func(t *testing.T, w *scene.World, handler string) {
		if err := w.Settle(t.Context(), handler); err != nil {
			t.Fatal(err)
		}
		p := w.Pod(t, handler)
		other := p.Start(t, "sleep")
		makes := map[string]func(){
			"containers": func() { _, _ = p.Try(t.Context(), "sleep") },
		}
		if sandboxed(handler) {
			// An address would not be reported while any of gVisor's pods has hidden
			// its own.
			config := w.PodConfig(t, func(c *cri.PodSandboxConfig) {
				c.Linux.SecurityContext.NamespaceOptions.Network = cri.NamespaceMode_NODE
			})
			makes["pods"] = func() {
				_, _ = w.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: config, RuntimeHandler: handler})
			}
		}
		for kind, request := range makes {
			id := killAmidCreate(t, w, handler, request)
			if err := os.RemoveAll(filepath.Join(w.StateRoot(), kind, id)); err != nil {
				t.Fatal(err)
			}
			books := runtimeFilesOf(t, w, handler, id)
			if len(books) == 0 {
				t.Fatalf("%s: the runtime was killed and has left nothing", kind)
			}
			found := findings(t, w)
			for _, book := range books {
				if !slices.ContainsFunc(found, func(f finding) bool {
					return f.Status == "FAIL" && containsAll(f.Text, []string{"orphan " + id, book})
				}) {
					t.Errorf("nothing is said of %s: %+v", book, found)
				}
			}
			for _, f := range findings(t, w, "--repair") {
				if f.Status == "FAIL" {
					t.Errorf("not repaired: %+v", f)
				}
			}
			if left := runtimeFilesOf(t, w, handler, id); len(left) > 0 {
				t.Errorf("left after the repair: %q", left)
			}
			if err := w.Start(t.Context()); err != nil {
				t.Fatal(err)
			}
			scene.Equal(t, "command in the container beside it", other.Exec(t, "echo here"), "here\n")
		}
		p.Start(t, "sleep")
		p.Remove(t)
		w.Bare(t)
	})
}

var anID = regexp.MustCompile("[0-9a-f]{64}")

// runtimeFilesOf returns the runtime's files and directories about containers; with
// id, only those about that one.
func runtimeFilesOf(t *testing.T, w *scene.World, handler, id string) []string {
	t.Helper()
	var all []string
	for _, pattern := range []string{"*", "k8s.io/*"} {
		paths, err := filepath.Glob(filepath.Join(w.RunRoot(), "runtime", handler, pattern))
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, paths...)
	}
	return slices.DeleteFunc(all, func(path string) bool {
		about := anID.FindString(filepath.Base(path))
		return about == "" || id != "" && about != id
	})
}

// killAmidCreate kills the server, the monitor and the runtime as soon as the
// runtime has written something about the new container, and returns its id.
func killAmidCreate(t *testing.T, w *scene.World, handler string, request func()) (id string) {
	t.Helper()
	before := runtimeFilesOf(t, w, handler, "")
	done := make(chan struct{})
	go func() {
		defer close(done)
		request()
	}()
	wait.For(t, "the runtime to write something", func() bool {
		for _, book := range runtimeFilesOf(t, w, handler, "") {
			if !slices.Contains(before, book) {
				id = anID.FindString(filepath.Base(book))
			}
		}
		return id != ""
	})
	if err := w.Kill(); err != nil {
		t.Fatal(err)
	}
	<-done
	for _, pid := range makers(id) {
		_ = unix.Kill(pid, unix.SIGKILL) // one may have ended with the previous one
		vanishes(t, pid)
	}
	return id
}

// makers returns the monitor of a container and the process that makes it for
// the monitor.
func makers(id string) []int {
	return running(func(args []string) bool {
		return strings.Contains(strings.Join(args, " "), id) && (filepath.Base(args[0]) == "crius-conmon" || slices.Contains(args, "create"))
	})
}

type finding struct{ Check, Status, Text string }

// findings returns crius check's findings about the records.
func findings(t *testing.T, w *scene.World, args ...string) []finding {
	t.Helper()
	out := crius(t, w, append([]string{"check", "-o", "json"}, args...)...)
	var all []finding
	if err := json.Unmarshal([]byte(out), &all); err != nil {
		t.Fatalf("crius check: %v: %s", err, out)
	}
	return slices.DeleteFunc(all, func(f finding) bool { return f.Check != "node" })
}
