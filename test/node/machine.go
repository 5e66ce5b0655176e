package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// disks are those of one machine, in this order.
type disks struct {
	base   string // the root file system, which is never written
	input  string // an archive for the guest
	output string // takes the guest's archive
}

// overlay is the file in a machine's directory that receives writes to the root
// file system.
const overlay = "overlay.img"

// machine is a kind of virtual machine.
type machine interface {
	name() string
	arch() string                                          // its processor, as named by Go and Debian
	prepare(ctx context.Context, repo, cache string) error // builds what it needs
	adapt(*recipe)                                         // adds to the root file system what the machine needs
	argv(d disks) (argv, env []string)                     // in its own directory; its console is standard output
	patience() time.Duration                               // the longest time that a run may take
	processors() int                                       // that it keeps busy here
}

// machines are all kinds, by their names on the command line.
var machines = map[string]machine{"uml": new(uml), "qemu": amd64, "arm64": arm64, "selinux": new(selinux)}

// errPanic means that the machine's kernel panicked.
var errPanic = errors.New("the machine's kernel panicked")

// heldTime is how long the console of an ended machine may be held open.
const heldTime = 30 * time.Second

// boot runs a machine until it is powered off. One that panics or takes too
// long is killed with all its processes, which are in a PID namespace.
func boot(ctx context.Context, m machine, dir string, d disks) error {
	ctx, cancel := context.WithTimeoutCause(ctx, m.patience(), fmt.Errorf("the machine was not done after %v", m.patience()))
	defer cancel()
	ctx, abort := context.WithCancelCause(ctx)
	defer abort(nil)
	log := filepath.Join(dir, "console.log")
	file, err := os.Create(log)
	if err != nil {
		return err
	}
	defer file.Close()
	argv, env := m.argv(d)
	argv = append([]string{"unshare", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"}, argv...)
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), env...)
	console := &console{file: file, panicked: func() { abort(errPanic) }}
	cmd.Stdout, cmd.Stderr = console, console
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // this process passes on an interrupt
	cmd.WaitDelay = heldTime
	err = cmd.Run()
	if cause := context.Cause(ctx); cause != nil {
		err = cause
	}
	if err != nil {
		return fmt.Errorf("%w\nend of the console's log %s:\n%s", err, log, tail(console.last.Bytes(), 30))
	}
	return nil
}

// console writes a machine's output into a file, and watches it.
type console struct {
	file     *os.File
	last     bytes.Buffer // the end of it
	panicked func()
}

const panicMark = "Kernel panic - not syncing"

func (c *console) Write(p []byte) (int, error) {
	c.last.Write(p)
	if bytes.Contains(c.last.Bytes(), []byte(panicMark)) {
		c.panicked()
	}
	if over := c.last.Len() - 64<<10; over > 0 {
		c.last.Next(over)
	}
	return c.file.Write(p)
}

// tail returns the last lines of a text.
func tail(text []byte, lines int) string {
	all := strings.Split(strings.TrimRight(string(text), "\r\n"), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}
