package oci

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/test/kit/wait"
)

// dumpable is the spec of a container that can be restored.
func dumpable() *specs.Spec {
	caps := []string{"CAP_CHOWN", "CAP_KILL"}
	return &specs.Spec{
		Process: &specs.Process{
			Args: []string{"a"}, Cwd: "/", Env: []string{"A=b", "HOSTNAME=old"}, User: specs.User{UID: 1000, GID: 1000, AdditionalGids: []uint32{5, 1000}},
			Capabilities: &specs.LinuxCapabilities{Bounding: caps, Effective: caps, Permitted: caps}, NoNewPrivileges: true,
		},
		Root:   &specs.Root{Path: "rootfs"},
		Mounts: []specs.Mount{{Destination: "/data", Type: "bind", Source: "/old", Options: []string{"rbind", "ro"}}},
		Linux: &specs.Linux{
			Seccomp:     &specs.LinuxSeccomp{DefaultAction: specs.ActErrno, Syscalls: []specs.LinuxSyscall{{Names: []string{"read"}, Action: specs.ActAllow, Args: []specs.LinuxSeccompArg{}}}},
			Namespaces:  []specs.LinuxNamespace{{Type: specs.NetworkNamespace, Path: "/ns/old"}, {Type: specs.PIDNamespace}},
			MaskedPaths: []string{"/proc/kcore"},
			Devices:     []specs.LinuxDevice{{Path: "/dev/null", Type: "c", Major: 1, Minor: 3}},
			CgroupsPath: "/old",
		},
	}
}

// A request must say the same as the spec of the checkpoint, but for what is the new pod's.
func TestSpecsAreCompared(t *testing.T) {
	t.Parallel()
	dumped, err := json.Marshal(dumpable())
	if err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*specs.Spec){
		"nothing":        func(*specs.Spec) {},
		"hostname":       func(s *specs.Spec) { s.Process.Env[1] = "HOSTNAME=new" },
		"order":          func(s *specs.Spec) { s.Process.User.AdditionalGids = []uint32{1000, 5} },
		"source":         func(s *specs.Spec) { s.Mounts[0].Source = "/new" },
		"order of flags": func(s *specs.Spec) { s.Mounts[0].Options = []string{"ro", "rbind"} },
		"cgroup":         func(s *specs.Spec) { s.Linux.CgroupsPath = "/new" },
		"network":        func(s *specs.Spec) { s.Linux.Namespaces[0].Path = "/ns/new" },
		"empty list":     func(s *specs.Spec) { s.Linux.Seccomp.Syscalls[0].Args = nil },
		"early hooks":    func(s *specs.Spec) { s.Hooks = &specs.Hooks{CreateRuntime: []specs.Hook{{Path: "/h"}}} },
	} {
		asked := dumpable()
		change(asked)
		if err := compareSpecs(dumped, asked); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for words, change := range map[string]func(*specs.Spec){
		"command":           func(s *specs.Spec) { s.Process.Args = []string{"b"} },
		"working directory": func(s *specs.Spec) { s.Process.Cwd = "/tmp" },
		"environment":       func(s *specs.Spec) { s.Process.Env[0] = "A=c" },
		"terminal":          func(s *specs.Spec) { s.Process.Terminal = true },
		"user":              func(s *specs.Spec) { s.Process.User.UID = 0 },
		"group":             func(s *specs.Spec) { s.Process.User.GID = 0 },
		"additional groups": func(s *specs.Spec) { s.Process.User.AdditionalGids = nil },
		"capabilities":      func(s *specs.Spec) { s.Process.Capabilities.Bounding = nil },
		"no_new_privs":      func(s *specs.Spec) { s.Process.NoNewPrivileges = false },
		"rlimits":           func(s *specs.Spec) { s.Process.Rlimits = []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE"}} },
		"AppArmor profile":  func(s *specs.Spec) { s.Process.ApparmorProfile = "p" },
		"SELinux label":     func(s *specs.Spec) { s.Process.SelinuxLabel = "l" },
		"seccomp filter":    func(s *specs.Spec) { s.Linux.Seccomp.Syscalls[0].Names = []string{"write"} },
		"read-only root":    func(s *specs.Spec) { s.Root.Readonly = true },
		"mounts of":         func(s *specs.Spec) { s.Mounts[0].Options = []string{"rbind", "rw"} },
		"mounts of the":     func(s *specs.Spec) { s.Mounts = nil },
		"devices":           func(s *specs.Spec) { s.Linux.Devices[0].Minor = 5 },
		"masked paths":      func(s *specs.Spec) { s.Linux.MaskedPaths = []string{"/proc/keys"} },
		"read-only paths":   func(s *specs.Spec) { s.Linux.ReadonlyPaths = []string{"/proc/sys"} },
		"namespaces":        func(s *specs.Spec) { s.Linux.Namespaces = s.Linux.Namespaces[1:] },
		"personality":       func(s *specs.Spec) { s.Linux.Personality = &specs.LinuxPersonality{Domain: specs.PerLinux32} },
		"OCI hooks":         func(s *specs.Spec) { s.Hooks = &specs.Hooks{Poststart: []specs.Hook{{Path: "/h"}}} },
	} {
		asked := dumpable()
		change(asked)
		if err := compareSpecs(dumped, asked); !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), words) {
			t.Errorf("%s: %v", words, err)
		}
	}
	userns := dumpable()
	userns.Linux.Namespaces = append(userns.Linux.Namespaces, specs.LinuxNamespace{Type: specs.UserNamespace, Path: "/ns/user"})
	text, err := json.Marshal(userns)
	if err != nil {
		t.Fatal(err)
	}
	if err := compareSpecs(text, userns); !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), "user namespace") {
		t.Errorf("a user namespace: %v", err)
	}
	for _, text := range []string{"", "null", "{}", `{"process":{}}`, "[]"} {
		if err := compareSpecs([]byte(text), dumpable()); !errors.Is(err, fault.Invalid) {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// A restored process may have what one of the request can have or come to have by itself, and no more.
func TestStatusOfRestoredProcess(t *testing.T) {
	t.Parallel()
	const user = "Uid:\t1000\t1000\t1000\t1000\nGid:\t1000\t1000\t1000\t1000\nGroups:\t5 1000 \nCapInh:\t0000000000000000\nCapPrm:\t0000000000000000\n" +
		"CapEff:\t0000000000000000\nCapBnd:\t0000000000000021\nCapAmb:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t2\n"
	const root = "Uid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\nGroups:\t \nCapInh:\t0000000000000000\nCapPrm:\t00000000000000c0\n" +
		"CapEff:\t00000000000000c0\nCapBnd:\t00000000000000c0\nCapAmb:\t0000000000000000\nNoNewPrivs:\t0\nSeccomp:\t0\n"
	plain := dumpable().Process
	all := []string{"CAP_SETGID", "CAP_SETUID"}
	changing := &specs.Process{Capabilities: &specs.LinuxCapabilities{Bounding: all, Effective: all, Permitted: all}}
	for _, c := range []struct {
		of       *specs.Process
		status   string
		was, now string
		filtered bool
		words    string // of the refusal
	}{
		{plain, user, "", "", true, ""},
		{plain, user, "CapBnd:\t0000000000000021", "CapBnd:\t0000000000000000", true, ""},
		{plain, user, "1000\t1000\nGid", "0\t0\nGid", true, "user ids"},
		{plain, user, "Uid:\t1000", "Uid:\t0", true, "user ids"},
		{plain, user, "Gid:\t1000", "Gid:\t0", true, "group ids"},
		{plain, user, "5 1000", "5", true, "additional groups"},
		{plain, user, "5 1000", "5 6 1000", true, "additional groups"},
		{plain, user, "CapPrm:\t0000000000000000", "CapPrm:\t0000000000000020", true, "CapPrm"},
		{plain, user, "CapEff:\t0000000000000000", "CapEff:\t0000000000000001", true, "CapEff"},
		{plain, user, "CapBnd:\t0000000000000021", "CapBnd:\t000001ffffffffff", true, "CapBnd"},
		{plain, user, "CapInh:\t0000000000000000", "CapInh:\t0000000000000001", true, "CapInh"},
		{plain, user, "CapAmb:\t0000000000000000", "CapAmb:\t0000000000000001", true, "CapAmb"},
		{plain, user, "CapAmb:\t0000000000000000\n", "", true, "CapAmb"},
		{plain, user, "NoNewPrivs:\t1", "NoNewPrivs:\t0", true, "no_new_privs"},
		{plain, user, "Seccomp:\t2", "Seccomp:\t0", true, "seccomp mode"},
		{plain, user, "Seccomp:\t2", "Seccomp:\t0", false, ""},
		{changing, root, "", "", false, ""},
		{changing, root, "Uid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0", "Uid:\t101\t101\t101\t101\nGid:\t101\t101\t101\t101", false, ""},
		{changing, root, "CapPrm:\t00000000000000c0", "CapPrm:\t00000000000000c1", false, "CapPrm"},
	} {
		if !strings.Contains(c.status, c.was) {
			t.Fatalf("%q is not in the status", c.was)
		}
		err := checkStatus(parseStatus(strings.Replace(c.status, c.was, c.now, 1)), c.of, c.filtered)
		if err != nil && strings.Contains(err.Error(), "0000000000000000000") {
			t.Errorf("not to be read: %v", err)
		}
		if c.words == "" && err != nil || c.words != "" && (!errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), c.words)) {
			t.Errorf("%q for %q: %v, want %q", c.now, c.was, err, c.words)
		}
	}
}

// The namespaces of a restored container are those of its request, and its processes are in them.
func TestNamespacesOfRestoredProcesses(t *testing.T) {
	t.Parallel()
	apart := exec.CommandContext(t.Context(), "sleep", "1000")
	apart.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWPID}
	if err := apart.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = apart.Wait() }) // killed with the context of the test
	pid := apart.Process.Pid
	at := func(kind string) string { return fmt.Sprintf("/proc/%d/ns/%s", pid, kind) }
	for _, c := range []struct {
		asked specs.LinuxNamespace
		bad   bool
	}{
		{specs.LinuxNamespace{Type: specs.NetworkNamespace, Path: at("net")}, false},
		{specs.LinuxNamespace{Type: specs.NetworkNamespace, Path: "/proc/self/ns/net"}, true},
		{specs.LinuxNamespace{Type: specs.PIDNamespace}, false},
		{specs.LinuxNamespace{Type: specs.UTSNamespace, Path: "/proc/self/ns/uts"}, false},
		{specs.LinuxNamespace{Type: specs.MountNamespace}, true},
		{specs.LinuxNamespace{Type: specs.IPCNamespace}, true},
	} {
		if err := checkInit(pid, []specs.LinuxNamespace{c.asked}); errors.Is(err, fault.Precondition) != c.bad || !c.bad && err != nil {
			t.Errorf("%+v: %v", c.asked, err)
		}
	}
	if err := checkNamespaces(pid, pid); err != nil {
		t.Error(err)
	}
	if err := checkNamespaces(os.Getpid(), pid); !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), "net:[") {
		t.Errorf("a process in another network: %v", err)
	}
}

// What criu runs goes through a shell and a file of words.
func TestPathsThatCriuCannotRun(t *testing.T) {
	t.Parallel()
	for path, bad := range map[string]bool{
		"/usr/libexec/crius-conmon": false, "/opt/a_b/1.2+3": false, "/opt/a b": true, "/opt/$x": true, "/opt/a;b": true, "/opt/a\nb": true, "/opt/é": true,
	} {
		if strings.ContainsFunc(path, notInOptions) != bad {
			t.Errorf("%q: %t", path, !bad)
		}
	}
}

// A process of a container counts as one wherever it is: its PID namespace has it, even if its cgroup does not.
func TestProcessesBesides(t *testing.T) {
	t.Parallel()
	init := exec.CommandContext(t.Context(), "sh", "-c", "sleep 1000 & exec sleep 1000")
	init.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}
	if err := init.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = init.Wait() }) // killed with the context of the test
	var pids []int
	wait.For(t, "the process beside it", func() bool {
		var err error
		if pids, err = besides(init.Process.Pid); err != nil {
			t.Fatal(err)
		}
		return len(pids) > 0
	})
	if len(pids) != 1 || pids[0] == init.Process.Pid {
		t.Fatalf("beside %d there are %v", init.Process.Pid, pids)
	}
	if err := syscall.Kill(pids[0], syscall.SIGKILL); err != nil { // init is its parent, and reaps nobody
		t.Fatal(err)
	}
	wait.For(t, "it to count no more", func() bool {
		left, err := besides(init.Process.Pid)
		return err == nil && len(left) == 0
	})
	if _, err := pidNamespace(strconv.Itoa(pids[0])); err != nil {
		t.Errorf("it has left the namespace, so nothing was shown: %v", err)
	}
}
