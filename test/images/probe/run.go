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

// runProgram executes a program of the container and waits for its end.
func runProgram(args []string) error {
	if len(args) == 0 {
		return errUsage
	}
	c := exec.Command(args[0], args[1:]...)
	c.Stdin, c.Stdout, c.Stderr = os.Stdin, os.Stdout, os.Stderr
	return c.Run()
}

// poseEnv tells a program that pose has executed its new name.
const poseEnv = "PROBE_POSES_AS"

// pose becomes a process that imitates another program in everything that a
// process says about itself.
func pose(args []string) error {
	if len(args) == 0 {
		return errUsage
	}
	upper, err := upperDir()
	if err != nil {
		return err
	}
	for i := range args {
		args[i] = strings.ReplaceAll(args[i], "{upper}", upper)
	}
	return unix.Exec("/proc/self/exe", args, append(os.Environ(), poseEnv+"="+args[0]))
}

// upperDir returns the host's directory with what this container writes, from
// the mount options of its root.
func upperDir() (string, error) {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", err
	}
	_, rest, found := strings.Cut(string(text), ",upperdir=")
	if !found {
		return "", fmt.Errorf("no upper directory among the mounts:\n%s", text)
	}
	upper, _, _ := strings.Cut(rest, ",")
	return upper, nil
}

func posing(name string) {
	if err := os.WriteFile("/proc/self/comm", []byte(name), 0); err != nil {
		fmt.Fprintln(os.Stderr, "probe:", err)
		os.Exit(1)
	}
	fmt.Println("ready")
	_ = sleep(nil)
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

// remount clears the flags that keep a mount from being written to and
// executed, except for those named.
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
