package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// exec starts a command with a kata-shim in its place on this machine. One with
// a terminal is runc's own.
func (c call) exec() error {
	if c.flag("--console-socket") != "" || !slices.Contains(c.args, "--detach") {
		return c.runc(append([]string{"exec"}, c.args...)...)
	}
	process, err := os.ReadFile(c.flag("--process"))
	if err != nil {
		return err
	}
	var wanted struct{ Args []string }
	bundle, err := os.ReadFile(c.mapping())
	if err == nil {
		err = json.Unmarshal(process, &wanted)
	}
	if err == nil {
		err = refusal(string(bundle), wanted.Args[0])
	}
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp(c.path("bundles", c.id), "exec")
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "process.json"), process, 0o600); err != nil {
		return err
	}
	// The command runs on when the shim is dead: it is no child of that.
	guest := exec.Command("runc", "--root", c.path("runc"), "exec", "--process", filepath.Join(dir, "process.json"), "--pid-file", filepath.Join(dir, "pid"), c.id)
	wrapped := exec.Command("/bin/sh", append([]string{"-c", `"$@"; echo $? >` + dir + `/new; mv ` + dir + `/new ` + dir + `/code`, "sh"}, guest.Args...)...)
	wrapped.Stdin, wrapped.Stdout, wrapped.Stderr = os.Stdin, os.Stdout, os.Stderr
	wrapped.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := wrapped.Start(); err != nil {
		return err
	}
	cmd := command(shimProgram, c.state, c.id, dir)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	if err := cmd.Start(); err != nil {
		return err
	}
	return os.WriteFile(c.flag("--pid-file"), []byte(strconv.Itoa(cmd.Process.Pid)), 0o600)
}

// shim waits for a command, passes signals on to it and exits with its code. If the
// machine dies it waits for ever.
func shim(state, id, dir string) error {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, unix.SIGTERM, unix.SIGINT, unix.SIGHUP)
	go func() {
		for s := range signals {
			if pid := guestPID(dir); pid > 1 {
				_ = unix.Kill(pid, s.(syscall.Signal))
			}
		}
	}()
	var text []byte
	for {
		var err error
		if text, err = os.ReadFile(filepath.Join(dir, "code")); err == nil {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	for (call{state: state, id: id}).machineDied() {
		time.Sleep(time.Hour)
	}
	code, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return fmt.Errorf("code of the command: %w", err)
	}
	os.Exit(code)
	return nil
}

// guestPID waits for runc to start the command.
func guestPID(dir string) int {
	for range 1000 {
		if text, err := os.ReadFile(filepath.Join(dir, "pid")); err == nil && len(text) > 0 {
			pid, _ := strconv.Atoi(string(text))
			return pid
		}
		time.Sleep(10 * time.Millisecond)
	}
	return 0
}
