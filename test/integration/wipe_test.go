package integration

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/inventory"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/turn"
)

// wipe runs crius wipe in the node's network; answer, if not empty, is typed on
// a terminal.
func (w *world) wipe(t *testing.T, answer string, args ...string) (out string, code int) {
	t.Helper()
	argv := w.Argv(append([]string{"wipe"}, args...)...)
	cmd := exec.CommandContext(t.Context(), argv[0], argv[1:]...)
	var text bytes.Buffer
	cmd.Stdout, cmd.Stderr = &text, &text
	if answer != "" {
		master, slave := pseudoTerminal(t)
		cmd.Stdin, cmd.SysProcAttr = slave, &syscall.SysProcAttr{Setsid: true, Setctty: true}
		if _, err := io.WriteString(master, answer+"\n"); err != nil {
			t.Fatal(err)
		}
	}
	err := w.Do(cmd.Run)
	if exit := new(exec.ExitError); errors.As(err, &exit) {
		return text.String(), exit.ExitCode()
	}
	if err != nil {
		t.Fatal(err)
	}
	return text.String(), 0
}

// pseudoTerminal is a pseudo-terminal.
func pseudoTerminal(t *testing.T) (master, slave *os.File) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { master.Close() })
	must(t, unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0))
	number, err := unix.IoctlGetUint32(int(master.Fd()), unix.TIOCGPTN)
	must(t, err)
	slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	must(t, err)
	t.Cleanup(func() { slave.Close() })
	return master, slave
}

// counts returns the numbers of the server's pods, containers and images.
func (w *world) counts(t *testing.T) [3]int {
	t.Helper()
	pods, err := w.Runtime().ListPodSandbox(t.Context(), &cri.ListPodSandboxRequest{})
	must(t, err)
	containers, err := w.Runtime().ListContainers(t.Context(), &cri.ListContainersRequest{})
	must(t, err)
	images, err := w.Images().ListImages(t.Context(), &cri.ListImagesRequest{})
	must(t, err)
	return [3]int{len(pods.Items), len(containers.Containers), len(images.Images)}
}

// crowd makes pods with containers in several states, and objects without a
// record.
func (w *world) crowd(t *testing.T) {
	t.Helper()
	for _, h := range handlers {
		p := w.run(t, h)
		p.start(t, "sleep")
		p.create(t, "sleep")
		p.start(t, "exit 3").wait(t)
	}
	turn.SeeAddresses(t)
	for _, h := range strayHarms() {
		if h.name != "firewall element" { // there is no table
			h.do(t, w, victim{})
		}
	}
}

// Everything is removed; the server that did it serves an empty node, on which
// pods run as before.
func TestWipeBesideAServer(t *testing.T) {
	t.Parallel()
	w := spotless(t, node.Options{})
	w.crowd(t)
	all := w.counts(t)
	if out, code := w.wipe(t, "", "--yes", "--keep-images"); code != 0 ||
		!strings.Contains(out, fmt.Sprintf("containers  %d, of which ", all[1])) || !strings.HasSuffix(out, fmt.Sprintf("removed: pods %d, containers %d\n", all[0], all[1])) {
		t.Fatalf("code %d: %s", code, out)
	}
	equal(t, "pods, containers, images", w.counts(t), [3]int{0, 0, 1})
	w.Restored(t, w.empty)
	w.run(t, "crun").finish(t, "echo runs")
	if out, code := w.wipe(t, "", "--yes"); code != 0 {
		t.Fatalf("code %d: %s", code, out)
	}
	equal(t, "pods, containers, images", w.counts(t), [3]int{})
	w.silent(t, "an empty node")
	w.Restored(t, w.empty)
}

// Without a server the directories are removed as well, and nothing outside of
// them.
func TestWipeWithoutAServer(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	w.crowd(t)
	must(t, w.Kill())
	outside := filepath.Join(w.dir(t), "outside")
	must(t, os.Mkdir(outside, 0o700))
	kept := filepath.Join(outside, "kept")
	put(t, kept, "")
	must(t, os.Symlink(outside, filepath.Join(w.StateRoot(), "pods", "link")))
	if out, code := w.wipe(t, "", "--yes"); code != 0 {
		t.Fatalf("code %d: %s", code, out)
	}
	for _, line := range mustInventory(t, w).Lines() { // once the killed processes are dead
		if !strings.HasPrefix(line, "file: "+w.Path("ns")) && !strings.HasPrefix(line, "cgroup: ") {
			t.Errorf("left: %s", line)
		}
		if strings.Contains(line, "crius-") {
			t.Errorf("left: %s", line)
		}
	}
	if _, err := os.Stat(kept); err != nil {
		t.Errorf("what a link led to: %v", err)
	}
	if out, code := w.wipe(t, "", "--yes"); code != 0 || !strings.Contains(out, "no state") {
		t.Errorf("again: code %d: %s", code, out)
	}
	must(t, w.Start(t.Context()))
	equal(t, "pods, containers, images", w.counts(t), [3]int{})
}

// It asks, and does nothing without a yes.
func TestWipeAsks(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	c := w.run(t, "crun").start(t, "sleep")
	foreign := filepath.Join(w.StateRoot(), "thesis.tex")
	before := mustInventory(t, w)
	for name, refuse := range map[string]struct {
		answer string
		args   []string
		code   int
		want   string
	}{
		"no terminal":       {"", nil, 2, "--yes"},
		"no":                {"no", nil, 1, "containers  1, of which 1 run and are killed"},
		"not quite yes":     {"y", nil, 1, "images      1, "},
		"a root by mistake": {"yes", []string{"--root", "/"}, 1, "do not belong to crius"},
		"an argument":       {"", []string{"everything"}, 2, "everything"},
	} {
		out, code := w.wipe(t, refuse.answer, refuse.args...)
		if code != refuse.code || !strings.Contains(out, refuse.want) {
			t.Errorf("%s: code %d: %s", name, code, out)
		}
	}
	if changed := inventory.Diff(before, mustInventory(t, w)); !changed.Empty() {
		t.Errorf("refusals have changed\n%s", changed)
	}
	put(t, foreign, "")
	if out, code := w.wipe(t, "", "--yes"); code != 1 || !strings.Contains(out, "thesis.tex") {
		t.Errorf("a directory with other things: code %d: %s", code, out)
	}
	c.exec(t, "echo alive")
	must(t, os.Remove(foreign))
	if out, code := w.wipe(t, "yes"); code != 0 || !strings.HasSuffix(out, "removed: pods 1, containers 1, images 1\n") {
		t.Errorf("yes: code %d: %s", code, out)
	}
	equal(t, "pods, containers, images", w.counts(t), [3]int{})
}
