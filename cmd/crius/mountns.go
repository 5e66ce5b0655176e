package main

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// mountNamespaceVariable names a file of the mount namespace in which the kubelet and its runtime
// are to be, so that their mounts are hidden from the rest of the node (OpenShift).
const mountNamespaceVariable = "KUBENSMNT"

// joinMountNamespace starts this program again in the mount namespace of KUBENSMNT, unless there is
// none or it is there already. All threads of a process must be in the same one, so it cannot just
// enter it.
func joinMountNamespace() error {
	path := os.Getenv(mountNamespaceVariable)
	if path == "" {
		return nil
	}
	err := enterMountNamespace(path)
	if err != nil {
		return fmt.Errorf("%s=%s: cannot enter this mount namespace: %w; unset the variable to run in that of the node", mountNamespaceVariable, path, err)
	}
	return nil
}

func enterMountNamespace(path string) error {
	target, err := os.Open(path)
	if err != nil {
		return err
	}
	defer target.Close()
	wanted, err := target.Stat()
	if err != nil {
		return err
	}
	own, err := os.Stat("/proc/self/ns/mnt")
	if err != nil || os.SameFile(own, wanted) {
		return err
	}
	dir, err := os.Getwd()
	if err != nil {
		return err
	}
	runtime.LockOSThread() // and not unlocked: after an error the thread is of no use
	if err := errors.Join(unix.Unshare(unix.CLONE_FS), unix.Setns(int(target.Fd()), unix.CLONE_NEWNS)); err != nil {
		return err
	}
	_ = os.Chdir(dir) // where paths on the command line begin, if it is there
	return unix.Exec("/proc/self/exe", os.Args, os.Environ())
}
