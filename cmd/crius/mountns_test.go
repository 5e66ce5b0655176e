package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
)

// TestJoinsMountNamespaceOfEnvironment runs itself in a process that is to join another one.
func TestJoinsMountNamespaceOfEnvironment(t *testing.T) {
	const helper = "CRIUS_TEST_MOUNTNS"
	if os.Getenv(helper) != "" {
		err := joinMountNamespace()
		link, _ := os.Readlink("/proc/self/ns/mnt")
		dir, _ := os.Getwd()
		fmt.Printf("[%s %s %d %v]\n", link, dir, os.Getpid(), err)
		os.Exit(0)
	}
	t.Parallel()
	runtime.LockOSThread() // Pdeathsig is sent at the end of the thread
	defer runtime.UnlockOSThread()
	hidden := exec.Command("sleep", "1000")
	hidden.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	if err := hidden.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = hidden.Process.Kill(); _ = hidden.Wait() }()
	namespace := fmt.Sprintf("/proc/%d/ns/mnt", hidden.Process.Pid)
	want, err := os.Readlink(namespace)
	if err != nil {
		t.Fatal(err)
	}
	own, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil || own == want {
		t.Fatal(own, want, err)
	}
	file := filepath.Join(t.TempDir(), "no-namespace")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for path, parts := range map[string][]string{
		namespace: {"[" + want, " " + dir + " ", "<nil>"},
		"":        {"[" + own, "<nil>"},
		file:      {"[" + own, "KUBENSMNT=" + file + ": cannot enter this mount namespace: invalid argument"},
		"/none":   {"[" + own, "no such file or directory; unset the variable"},
	} {
		cmd := exec.Command("/proc/self/exe", "-test.run=^TestJoinsMountNamespaceOfEnvironment$")
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), helper+"=1", mountNamespaceVariable+"="+path)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Errorf("%q: %v: %s", path, err, out)
		}
		for _, part := range append(parts, fmt.Sprintf(" %d ", cmd.ProcessState.Pid())) {
			if !strings.Contains(string(out), part) {
				t.Errorf("%q: %q is not in %s", path, part, out)
			}
		}
	}
}
