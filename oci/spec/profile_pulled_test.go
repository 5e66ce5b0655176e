package spec

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
)

func TestParsePulledProfile(t *testing.T) {
	t.Parallel()
	for _, text := range []string{
		`{"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": 1, "architectures": ["SCMP_ARCH_X86_64"], "flags": ["SECCOMP_FILTER_FLAG_LOG"],
			"syscalls": [{"names": ["read", "openat2"], "action": "SCMP_ACT_ALLOW", "args": [{"index": 0, "value": 1, "valueTwo": 0, "op": "SCMP_CMP_EQ"}]}]}`,
		`{"defaultAction": "SCMP_ACT_LOG", "archMap": [{"architecture": "SCMP_ARCH_X86_64", "subArchitectures": ["SCMP_ARCH_X86"]}],
			"syscalls": [{"name": "bpf", "action": "SCMP_ACT_ERRNO", "comment": "why", "errnoRet": 38, "includes": {}, "excludes": {"caps": ["CAP_BPF"], "minKernel": "4.8"}}]}`,
		`{"defaultAction": "SCMP_ACT_ALLOW"}`,
		`{"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": 38, "defaultErrno": "ENOSYS", "syscalls": [{"names": ["bpf"], "action": "SCMP_ACT_ERRNO", "errno": "EPERM"}]}`,
	} {
		if _, err := ParsePulledProfile([]byte(text)); err != nil {
			t.Errorf("%s: %v", text, err)
		}
	}
	rule := func(rest string) string {
		return `{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["read"], "action": "SCMP_ACT_ERRNO"` + rest + `}]}`
	}
	for text, why := range map[string]string{
		"":   "unexpected end",
		"{":  "unexpected end",
		"{}": "defaultAction",
		"[]": "cannot unmarshal",
		`{"defaultAction": "SCMP_ACT_ALLOW"} {"defaultAction": "SCMP_ACT_KILL"}`:      "after top-level value",
		`{"defaultAction": "SCMP_ACT_KILL", "defaultAction": "SCMP_ACT_ALLOW"}`:       "occurs twice",
		`{"defaultAction": "SCMP_ACT_KILL", "DefaultAction": "SCMP_ACT_ALLOW"}`:       "occurs twice",
		rule(`, "args": [{"index": 0, "value": 1, "op": "SCMP_CMP_EQ", "Value": 2}]`): "occurs twice",
		`{"defaultAction": "SCMP_ACT_ALLOW", "seccompFd": 3}`:                         "unknown field",
		rule(`, "arg": []`): "unknown field",
		`{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": ` + strings.Repeat("[", 9) + strings.Repeat("]", 9) + "}": "levels deep",
		strings.Repeat("[", 500_000):                                                                                     "max depth",
		`{"defaultAction": "SCMP_ACT_PERMIT"}`:                                                                           "SCMP_ACT_PERMIT",
		`{"defaultAction": "SCMP_ACT_NOTIFY"}`:                                                                           "listener",
		strings.Replace(rule(""), "ERRNO", "NOTIFY", 1):                                                                  "listener",
		`{"defaultAction": "SCMP_ACT_ALLOW", "listenerPath": "/run/l.sock"}`:                                             "listenerPath",
		`{"defaultAction": "SCMP_ACT_ALLOW", "listenerMetadata": "x"}`:                                                   "listenerMetadata",
		`{"defaultAction": "SCMP_ACT_ALLOW", "flags": ["SECCOMP_FILTER_FLAG_NEW_LISTENER"]}`:                             "NEW_LISTENER",
		`{"defaultAction": "SCMP_ACT_ALLOW", "flags": ["SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV"]}`:                       "WAIT_KILLABLE",
		`{"defaultAction": "SCMP_ACT_ALLOW", "architectures": ["SCMP_ARCH_VAX"]}`:                                        "SCMP_ARCH_VAX",
		`{"defaultAction": "SCMP_ACT_ALLOW", "archMap": [{"architecture": "SCMP_ARCH_X86", "subArchitectures": ["X"]}]}`: `"X"`,
		`{"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": 65536}`:                                                  "65536",
		`{"defaultAction": "SCMP_ACT_ERRNO", "defaultErrno": "EWRONG"}`:                                                  "EWRONG",
		rule(`, "errno": "EPERM", "errnoRet": 38`):                                                                       "EPERM is 1",
		`{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": [` + strings.Repeat(`"read",`, 4096) + `"read"], "action": "SCMP_ACT_ERRNO", "args": [{"index": 0, "value": 1, "op": "SCMP_CMP_EQ"}]}]}`: "4097 conditions",
		rule(`, "errnoRet": 65536`):                      "65536",
		strings.Replace(rule(""), `"read"`, `"raed"`, 1): "raed",
		rule(`, "args": [` + strings.Repeat(`{"index": 0, "value": 1, "op": "SCMP_CMP_EQ"},`, 6) + `{"index": 0, "value": 1, "op": "SCMP_CMP_EQ"}]`): "7 conditions",
		rule(`, "args": [{"index": 6, "value": 1, "op": "SCMP_CMP_EQ"}]`):                                                                            "argument 6",
		rule(`}` + strings.Repeat(`, {"names": ["read"], "action": "SCMP_ACT_ERRNO"}`, 1024) + `, {"names": ["read"], "action": "SCMP_ACT_ERRNO"`):   "1026 rules",
	} {
		if p, err := ParsePulledProfile([]byte(text)); !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), why) {
			t.Errorf("%.200s: %+v, %v; want %q", text, p, err, why)
		}
	}
}

// A profile may be newer than crius: what it allows and crius does not know stays forbidden.
func TestUnknownSystemCallsAreNotAllowed(t *testing.T) {
	t.Parallel()
	p, err := ParsePulledProfile([]byte(`{"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [
		{"names": ["read", "read2049"], "action": "SCMP_ACT_ALLOW"}, {"names": ["write2049"], "action": "SCMP_ACT_ALLOW"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	if len(p.Syscalls) != 1 || !slices.Equal(p.Syscalls[0].Names, []string{"read"}) {
		t.Errorf("%+v", p.Syscalls)
	}
	for _, action := range []string{"ERRNO", "LOG", "TRACE", "KILL"} {
		_, err := ParsePulledProfile([]byte(`{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["read2049"], "action": "SCMP_ACT_` + action + `"}]}`))
		if !errors.Is(err, fault.Invalid) {
			t.Errorf("%s: %v", action, err)
		}
	}
}

// The default profile, as others publish it, can be pulled as well.
func TestSyscallsAreKnown(t *testing.T) {
	t.Parallel()
	for _, r := range DefaultProfile().Syscalls {
		for _, name := range r.Names {
			if !isSyscall(name) {
				t.Errorf("%s is not in syscalls.txt", name)
			}
		}
	}
	dir, err := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}", "golang.org/x/sys").Output()
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(strings.TrimSpace(string(dir)), "unix/zsysnum_linux_*.go"))
	if err != nil || len(files) < 10 {
		t.Fatalf("%q, %v", files, err)
	}
	number := regexp.MustCompile(`(?m)^\s+SYS_([A-Z0-9_]+)`)
	none := regexp.MustCompile(`^((reserved|unused)\d+|arch_specific_syscall|syscall_mask)$`)
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, found := range number.FindAllSubmatch(text, -1) {
			if name := strings.ToLower(string(found[1])); !isSyscall(name) && !none.MatchString(name) {
				t.Errorf("%s of %s is not in syscalls.txt", name, filepath.Base(file))
			}
		}
	}
}

// A pulled profile applies together with its base: the default profile, or one of the node.
func TestPulledProfileIsIntersected(t *testing.T) {
	t.Parallel()
	mine, err := ParsePulledProfile([]byte(`{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["mkdir"], "action": "SCMP_ACT_KILL_PROCESS"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	base, err := ParseProfile([]byte(`{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["rmdir"], "action": "SCMP_ACT_TRAP"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	const ref = "r.example/p@sha256:1"
	local := &cri.SecurityProfileBase{Type: cri.SecurityProfileBase_Localhost, LocalhostRef: "/etc/base.json"}
	of := func(profile *cri.SecurityProfile, change func(*Input)) (*specs.LinuxSeccomp, error) {
		in := typical()
		in.Request.Container.Linux.SecurityContext.Seccomp = profile
		in.Facts.PulledSeccomp = mine
		if change != nil {
			change(&in)
		}
		s, err := Container(in)
		if err != nil {
			return nil, err
		}
		return s.Linux.Seccomp, nil
	}
	action := func(f *specs.LinuxSeccomp, name string) specs.LinuxSeccompAction {
		for _, r := range f.Syscalls {
			if slices.Contains(r.Names, name) {
				return r.Action
			}
		}
		return f.DefaultAction
	}
	for what, c := range map[string]struct {
		base *cri.SecurityProfileBase
		want string // of mkdir, rmdir, read, keyctl
	}{
		"no base":           {nil, "[SCMP_ACT_KILL_PROCESS SCMP_ACT_ALLOW SCMP_ACT_ALLOW SCMP_ACT_ERRNO]"},
		"the default":       {&cri.SecurityProfileBase{}, "[SCMP_ACT_KILL_PROCESS SCMP_ACT_ALLOW SCMP_ACT_ALLOW SCMP_ACT_ERRNO]"},
		"one of the node's": {local, "[SCMP_ACT_KILL_PROCESS SCMP_ACT_TRAP SCMP_ACT_ALLOW SCMP_ACT_ALLOW]"},
	} {
		f, err := of(&cri.SecurityProfile{ProfileType: cri.SecurityProfile_OCI, OciRef: ref, BaseProfile: c.base}, func(in *Input) {
			if c.base == local {
				in.Facts.Seccomp = base
			}
		})
		if err != nil {
			t.Errorf("%s: %v", what, err)
			continue
		}
		var got []specs.LinuxSeccompAction
		for _, name := range []string{"mkdir", "rmdir", "read", "keyctl"} {
			got = append(got, action(f, name))
		}
		if fmt.Sprint(got) != c.want {
			t.Errorf("%s: %v, want %s", what, got, c.want)
		}
	}
	for what, c := range map[string]struct {
		profile *cri.SecurityProfile
		change  func(*Input)
		kind    error
	}{
		"not loaded":          {&cri.SecurityProfile{ProfileType: cri.SecurityProfile_OCI, OciRef: ref}, func(in *Input) { in.Facts.PulledSeccomp = nil }, fault.Precondition},
		"base not loaded":     {&cri.SecurityProfile{ProfileType: cri.SecurityProfile_OCI, OciRef: ref, BaseProfile: local}, nil, fault.Precondition},
		"no reference":        {&cri.SecurityProfile{ProfileType: cri.SecurityProfile_OCI}, nil, fault.Invalid},
		"no path of the base": {&cri.SecurityProfile{ProfileType: cri.SecurityProfile_OCI, OciRef: ref, BaseProfile: &cri.SecurityProfileBase{Type: cri.SecurityProfileBase_Localhost}}, nil, fault.Invalid},
		"an unknown base":     {&cri.SecurityProfile{ProfileType: cri.SecurityProfile_OCI, OciRef: ref, BaseProfile: &cri.SecurityProfileBase{Type: 7}}, nil, fault.Invalid},
		"no seccomp":          {&cri.SecurityProfile{ProfileType: cri.SecurityProfile_OCI, OciRef: ref}, func(in *Input) { in.Facts.Host.Seccomp = false }, fault.Unimplemented},
		"for AppArmor": {nil, func(in *Input) {
			in.Request.Container.Linux.SecurityContext.Apparmor = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_OCI, OciRef: ref}
		}, fault.Invalid},
	} {
		if f, err := of(c.profile, c.change); !errors.Is(err, c.kind) {
			t.Errorf("%s: %+v, %v; want %v", what, f, err, c.kind)
		}
	}
}

// Error numbers may be given by name.
// So do those of a node's profiles, of which CRI-O's users have many: without them a program gets EPERM where its
// C library falls back on ENOSYS alone. A number that runtimes cut to 16 bits is refused (gvisor#14721).
func TestErrnosOfProfilesOnTheNode_containers_common_573(t *testing.T) {
	t.Parallel()
	p, err := ParseProfile([]byte(`{"defaultAction": "SCMP_ACT_ERRNO", "defaultErrno": "ENOSYS", "syscalls": [
		{"names": ["bpf"], "action": "SCMP_ACT_ERRNO", "errno": "EINVAL"}, {"names": ["ptrace"], "action": "SCMP_ACT_TRACE", "errnoRet": 5000}]}`))
	if err != nil {
		t.Fatal(err)
	}
	if *p.DefaultErrnoRet != 38 || *p.Syscalls[0].ErrnoRet != 22 || *p.Syscalls[1].ErrnoRet != 5000 {
		t.Errorf("%d, %d and %d", *p.DefaultErrnoRet, *p.Syscalls[0].ErrnoRet, *p.Syscalls[1].ErrnoRet)
	}
	for text, word := range map[string]string{
		`{"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": 65536}`:                                                        "65536",
		`{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["bpf"], "action": "SCMP_ACT_ERRNO", "errnoRet": 65536}]}`: "65536",
		`{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["bpf"], "action": "SCMP_ACT_ERRNO", "errno": "EWRONG"}]}`: "EWRONG",
	} {
		if p, err := ParseProfile([]byte(text)); p != nil || !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), word) {
			t.Errorf("%s: %v", text, err)
		}
	}
}

func TestPulledErrnos(t *testing.T) {
	t.Parallel()
	p, err := ParsePulledProfile([]byte(`{"defaultAction": "SCMP_ACT_ERRNO", "defaultErrno": "ENOSYS", "syscalls": [{"names": ["bpf"], "action": "SCMP_ACT_ERRNO", "errno": "EINVAL"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	if *p.DefaultErrnoRet != 38 || *p.Syscalls[0].ErrnoRet != 22 {
		t.Errorf("%d and %d", *p.DefaultErrnoRet, *p.Syscalls[0].ErrnoRet)
	}
}
