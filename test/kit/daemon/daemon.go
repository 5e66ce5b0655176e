// Package daemon runs programs beside the server of a node, in the node's network.
package daemon

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"

	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
)

// Daemon is a program that runs until it is stopped, or ends by itself.
type Daemon struct {
	name string
	log  string
	cmd  *exec.Cmd
	done chan struct{} // closed when it has ended
}

// Start runs a command in a node's network, appends what it prints to NAME.log in the
// node's directory, and returns when it is healthy.
func Start(ctx context.Context, n *node.Node, name string, cmd *exec.Cmd, healthy func() bool) (*Daemon, error) {
	d := &Daemon{name: name, log: n.Path(name + ".log"), cmd: cmd, done: make(chan struct{})}
	log, err := os.OpenFile(d.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := n.Do(cmd.Start); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	go func() {
		_ = cmd.Wait()
		close(d.done)
	}()
	if wait.Until(ctx, func() bool { return d.ended() || healthy() }) && !d.ended() {
		return d, nil
	}
	err = fmt.Errorf("%s is not healthy (ended: %v); the end of its log:\n%s", name, d.ended(), d.Tail(30))
	return nil, errors.Join(err, d.Stop(syscall.SIGKILL))
}

func (d *Daemon) ended() bool {
	select {
	case <-d.done:
		return true
	default:
		return false
	}
}

// Stop ends the program with a signal and waits for it. It may be called again,
// and on nil.
func (d *Daemon) Stop(how syscall.Signal) error {
	if d == nil {
		return nil
	}
	if err := d.cmd.Process.Signal(how); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	if !wait.Until(context.Background(), d.ended) {
		_ = d.cmd.Process.Kill()
		return fmt.Errorf("%s did not end within %v of %v", d.name, wait.Limit, how)
	}
	return nil
}

// Tail returns the end of the program's log; nothing for nil.
func (d *Daemon) Tail(lines int) string {
	if d == nil {
		return ""
	}
	data, err := os.ReadFile(d.log)
	if err != nil {
		return err.Error()
	}
	all := strings.Split(strings.TrimRight(string(data), "\n"), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}
