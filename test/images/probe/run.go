package main

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// runProgram executes a program of the container's and waits for its end.
func runProgram(args []string) error {
	if len(args) == 0 {
		return errUsage
	}
	c := exec.Command(args[0], args[1:]...)
	c.Stdin, c.Stdout, c.Stderr = os.Stdin, os.Stdout, os.Stderr
	return c.Run()
}

func chown(args []string) error {
	if len(args) != 3 {
		return errUsage
	}
	uid, err := strconv.Atoi(args[1])
	if err != nil {
		return errUsage
	}
	gid, err := strconv.Atoi(args[2])
	if err != nil {
		return errUsage
	}
	return os.Lchown(args[0], uid, gid)
}

// remount clears the flags that keep a mount from being written to and run,
// but those named.
func remount(args []string) error {
	if len(args) == 0 {
		return errUsage
	}
	flags := uintptr(unix.MS_REMOUNT | unix.MS_BIND)
	for name, flag := range map[string]uintptr{"ro": unix.MS_RDONLY, "nosuid": unix.MS_NOSUID, "nodev": unix.MS_NODEV, "noexec": unix.MS_NOEXEC} {
		if slices.Contains(args[1:], name) {
			flags |= flag
		}
	}
	if err := unix.Mount("", args[0], "", flags, ""); err != nil {
		return fmt.Errorf("remount %s %s: %w", args[0], strings.Join(args[1:], ","), err)
	}
	return nil
}
