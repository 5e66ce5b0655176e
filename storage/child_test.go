package storage

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// Tests of crashes need a process that can be killed: the test binary itself,
// started again with its task in the environment.
const childVariable = "STORAGE_TEST_CHILD"

type task struct {
	Verb   string
	Config Options
	Ref    string
	Times  int
}

type child struct {
	t   testing.TB
	cmd *exec.Cmd
}

// childFails starts a process with a store, which must end with an error, and returns its output.
func (n *node) childFails(verb string, cfg Options) string {
	n.t.Helper()
	var said strings.Builder
	cmd := n.childCommand(task{Verb: verb, Config: cfg})
	cmd.Stderr = &said
	if err := cmd.Run(); err == nil {
		n.t.Error("the child has not failed")
	}
	return said.String()
}

func (n *node) childCommand(what task) *exec.Cmd {
	n.t.Helper()
	raw, err := json.Marshal(what)
	if err != nil {
		n.t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), childVariable+"="+string(raw))
	return cmd
}

// child starts a process with the node's store and waits until it is ready.
func (n *node) child(verb string, ref ...string) *child {
	n.t.Helper()
	what := task{Verb: verb, Config: n.cfg}
	if len(ref) > 0 {
		what.Ref = ref[0]
	}
	cmd := n.childCommand(what)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		n.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		n.t.Fatal(err)
	}
	c := &child{t: n.t, cmd: cmd}
	n.t.Cleanup(c.kill)
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		n.t.Fatalf("child: %q, %v", line, err)
	}
	return c
}

// kill is kill -9.
func (c *child) kill() {
	if c.cmd.ProcessState == nil {
		c.cmd.Process.Kill()
		c.cmd.Wait()
	}
}

// runChild does the task of a child process and says whether there was one.
func runChild() bool {
	raw := os.Getenv(childVariable)
	if raw == "" {
		return false
	}
	if err := do(raw); err != nil {
		fmt.Fprintln(os.Stderr, "child:", err)
		os.Exit(1)
	}
	return true
}

func do(raw string) error {
	var what task
	if err := json.Unmarshal([]byte(raw), &what); err != nil {
		return err
	}
	if what.Verb == "lock" { // the records of images, until killed
		return lockImages(what.Config.Root)
	}
	s, err := Open(context.Background(), what.Config)
	if err != nil {
		return err
	}
	ctx := context.Background()
	switch what.Verb {
	case "own":
		return nil
	case "pull":
		fmt.Println("ready")
		_, err := s.Pull(ctx, PullRequest{Image: what.Ref})
		return err
	case "measure":
		return measure(ctx, s, what.Ref, what.Times)
	case "churn": // pulls and removes until killed
		fmt.Println("ready")
		for {
			img, err := s.Pull(ctx, PullRequest{Image: what.Ref})
			if err == nil {
				err = s.Remove(ctx, img.ID)
			}
			if err != nil {
				return err
			}
		}
	}
	return fmt.Errorf("unknown verb %q", what.Verb)
}

// lockImages does as another tool that uses the store.
func lockImages(root string) error {
	f, err := os.OpenFile(filepath.Join(root, "overlay-images", "images.lock"), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.FcntlFlock(f.Fd(), unix.F_SETLKW, &unix.Flock_t{Type: unix.F_WRLCK}); err != nil {
		return err
	}
	fmt.Println("ready")
	select {}
}
