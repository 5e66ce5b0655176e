package spec

import (
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"os/exec"
	"slices"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/opencontainers/runtime-spec/specs-go/features"
	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
)

// TestDefaultProfileGolden keeps every change of the profile in sight.
func TestDefaultProfileGolden(t *testing.T) {
	golden(t, "testdata/seccomp.json", DefaultProfile())
}

// TestDefaultProfileKnowsEveryCall: every system call of the kernel on the
// common processors has been considered. Those left to ENOSYS are named here.
func TestDefaultProfileKnowsEveryCall(t *testing.T) {
	leftOut := []string{
		// gone from the kernel, or never in it
		"_sysctl", "afs_syscall", "arch_specific_syscall", "bdflush", "break", "create_module", "epoll_ctl_old",
		"epoll_wait_old", "ftime", "get_kernel_syms", "getpmsg", "gtty", "idle", "lock", "lookup_dcookie", "mpx",
		"nfsservctl", "prof", "profil", "putpmsg", "query_module", "security", "stty", "tuxcall", "ulimit", "vserver",
		// superseded for decades
		"oldfstat", "oldlstat", "oldolduname", "oldstat", "olduname", "sgetmask", "ssetmask", "sysfs", "uselib", "ustat",
		// new, and not yet useful to any containerized program
		"file_getattr", "file_setattr", "listns", "lsm_get_self_attr", "lsm_list_modules", "lsm_set_self_attr",
		// specific to single processors
		"multiplexer", "pciconfig_iobase", "pciconfig_read", "pciconfig_write", "rtas", "s390_guarded_storage",
		"s390_sthyi", "spu_create", "spu_run", "subpage_prot", "switch_endian", "sys_debug_setcontext", "syscall_mask",
		"timerfd",
	}
	mentioned := map[string]bool{}
	for _, r := range DefaultProfile().Syscalls {
		for _, name := range r.Names {
			mentioned[name] = true
		}
	}
	for _, arch := range []string{"amd64", "arm64", "386", "arm", "riscv64", "s390x", "ppc64le", "loong64"} {
		for _, call := range kernelCalls(t, arch) {
			if !mentioned[call] && !slices.Contains(leftOut, call) {
				t.Errorf("%s of %s is in no list", call, arch)
			}
			if mentioned[call] && slices.Contains(leftOut, call) {
				t.Errorf("%s is in two lists", call)
			}
		}
	}
}

// kernelCalls are the SYS_ constants that x/sys generates from the kernel.
func kernelCalls(t *testing.T, arch string) []string {
	t.Helper()
	dir, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "golang.org/x/sys").Output()
	if err != nil {
		t.Fatal(err)
	}
	name := strings.TrimSpace(string(dir)) + "/unix/zsysnum_linux_" + arch + ".go"
	file, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	var calls []string
	ast.Inspect(file, func(n ast.Node) bool {
		if spec, ok := n.(*ast.ValueSpec); ok {
			calls = append(calls, strings.ToLower(strings.TrimPrefix(spec.Names[0].Name, "SYS_")))
		}
		return true
	})
	if len(calls) < 250 {
		t.Fatalf("only %d system calls of %s", len(calls), arch)
	}
	return calls
}

// TestDefaultProfileIsConsistent: for any capabilities, no call is both allowed
// without condition and refused.
func TestDefaultProfileIsConsistent(t *testing.T) {
	for _, caps := range []CapSet{0, typicalDefaults().Capabilities, 1 << unix.CAP_SYS_ADMIN, 1 << unix.CAP_BPF, 1 << unix.CAP_SYS_CHROOT, allCapabilities} {
		s := mutate(t, func(in *Input) { in.Defaults.Capabilities = caps })
		actions := map[string]specs.LinuxSeccompAction{}
		for _, call := range s.Linux.Seccomp.Syscalls {
			for _, name := range call.Names {
				if before, ok := actions[name]; ok && before != call.Action {
					t.Errorf("with %v: %s is both %s and %s", caps.Names(), name, before, call.Action)
				}
				actions[name] = call.Action
			}
		}
	}
}

// verdict returns the profile's action for a call with that first argument.
func verdict(p *specs.LinuxSeccomp, call string, arg uint64) string {
	for _, r := range p.Syscalls {
		if !slices.Contains(r.Names, call) {
			continue
		}
		if slices.ContainsFunc(r.Args, func(a specs.LinuxSeccompArg) bool {
			switch a.Op {
			case specs.OpEqualTo:
				return arg != a.Value
			case specs.OpMaskedEqual:
				return arg&a.Value != a.ValueTwo
			}
			return true
		}) {
			continue
		}
		if r.Action == specs.ActAllow {
			return "allow"
		}
		return unix.ErrnoName(unix.Errno(*r.ErrnoRet))
	}
	return unix.ErrnoName(unix.Errno(*p.DefaultErrnoRet))
}

// AF_ALG and AF_VSOCK are out of reach; the kernel looks at the low half of the
// register only, and so must the filter. Every other family is allowed.
func TestSocketFamilies_CVE_2026_31431(t *testing.T) {
	p := mutate(t, func(*Input) {}).Linux.Seccomp
	for family := range uint64(unix.AF_MAX) {
		for _, high := range []uint64{0, 1 << 32, 1 << 63, 0xffffffff << 32} {
			want := "allow"
			if family == unix.AF_ALG || family == unix.AF_VSOCK {
				want = "ENOSYS"
			}
			if got := verdict(p, "socket", high|family); got != want {
				t.Errorf("socket(%#x): %s, want %s", high|family, got, want)
			}
		}
	}
	for _, family := range []uint64{64, 1 << 16, 0xffffffff} {
		if got := verdict(p, "socket", family); got != "ENOSYS" {
			t.Errorf("socket(%#x): %s", family, got)
		}
	}
}

func TestDefaultProfileVerdicts(t *testing.T) {
	profile := func(caps ...string) *specs.LinuxSeccomp {
		return mutate(t, func(in *Input) {
			in.Request.Container.Linux.SecurityContext.Capabilities = &cri.Capability{
				DropCapabilities: []string{"ALL"}, AddCapabilities: caps,
			}
		}).Linux.Seccomp
	}
	plain, admin := profile(), profile("SYS_ADMIN")
	for _, c := range []struct {
		profile *specs.LinuxSeccomp
		call    string
		arg     uint64
		want    string
	}{
		{plain, "read", 0, "allow"}, {plain, "execve", 0, "allow"}, {plain, "ptrace", 0, "allow"},
		{plain, "clone", uint64(unix.SIGCHLD), "allow"},
		{plain, "clone", unix.CLONE_VM | unix.CLONE_THREAD, "allow"},
		{plain, "clone", unix.CLONE_NEWUSER, "ENOSYS"}, {plain, "clone", unix.CLONE_NEWNS | uint64(unix.SIGCHLD), "ENOSYS"},
		{plain, "clone", unix.CLONE_NEWCGROUP, "ENOSYS"}, {plain, "clone", unix.CLONE_NEWPID, "ENOSYS"},
		{plain, "clone3", 0, "ENOSYS"},
		{plain, "personality", 0, "allow"}, {plain, "personality", 8, "allow"}, {plain, "personality", 0xffffffff, "allow"},
		{plain, "personality", 0x20008, "allow"}, {plain, "personality", 0x40000, "ENOSYS"},
		{plain, "mount", 0, "EPERM"}, {plain, "unshare", 0, "EPERM"}, {plain, "bpf", 0, "EPERM"}, {plain, "keyctl", 0, "EPERM"},
		{plain, "io_uring_setup", 0, "EPERM"}, {plain, "a_call_of_the_future", 0, "ENOSYS"},
		{admin, "mount", 0, "allow"}, {admin, "clone", unix.CLONE_NEWUSER, "allow"}, {admin, "clone3", 0, "allow"},
		{admin, "bpf", 0, "allow"}, {admin, "chroot", 0, "EPERM"}, {admin, "keyctl", 0, "EPERM"}, {admin, "io_uring_setup", 0, "EPERM"},
		{profile("BPF"), "bpf", 0, "allow"}, {profile("PERFMON"), "perf_event_open", 0, "allow"},
		{profile("SYSLOG"), "syslog", 0, "allow"}, {profile("SYS_CHROOT"), "chroot", 0, "allow"},
		{profile("SYS_TIME"), "clock_settime", 0, "allow"}, {profile("SYS_MODULE"), "finit_module", 0, "allow"},
		{profile("DAC_READ_SEARCH"), "open_by_handle_at", 0, "allow"}, {profile("SYS_BOOT"), "reboot", 0, "allow"},
		{profile("SYS_PTRACE"), "pidfd_getfd", 0, "allow"}, {profile("SYS_RAWIO"), "iopl", 0, "allow"},
		{profile("SYS_NICE"), "mbind", 0, "allow"}, {profile("SYS_PACCT"), "acct", 0, "allow"}, {profile("SYS_TTY_CONFIG"), "vhangup", 0, "allow"},
		{profile("ALL"), "kexec_load", 0, "EPERM"}, {profile("ALL"), "socket", unix.AF_ALG, "ENOSYS"},
	} {
		if got := verdict(c.profile, c.call, c.arg); got != c.want {
			t.Errorf("%s(%#x): %s, want %s", c.call, c.arg, got, c.want)
		}
	}
}

func TestSeccompByHost(t *testing.T) {
	s := mutate(t, func(in *Input) { in.Facts.Host.Arch = "arm64" })
	if want := []specs.Arch{specs.ArchAARCH64, specs.ArchARM}; !slices.Equal(s.Linux.Seccomp.Architectures, want) {
		t.Errorf("arm64: %v", s.Linux.Seccomp.Architectures)
	}
	s = mutate(t, func(in *Input) { in.Facts.Host.Arch = "s390x" })
	clone := slices.IndexFunc(s.Linux.Seccomp.Syscalls, func(c specs.LinuxSyscall) bool { return slices.Contains(c.Names, "clone") })
	if s.Linux.Seccomp.Syscalls[clone].Args[0].Index != 1 {
		t.Error("clone's flags are the second argument on s390")
	}
	s = mutate(t, func(in *Input) { in.Facts.Host.Kernel = "4.7.0" })
	if verdict(s.Linux.Seccomp, "ptrace", 0) != "ENOSYS" {
		t.Error("ptrace on a kernel whose filters it evades")
	}
}

func TestSeccompChoice(t *testing.T) {
	own := &Profile{DefaultAction: specs.ActKillProcess}
	local := cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost, LocalhostRef: "/etc/p.json"}
	for _, c := range []struct {
		name   string
		change func(*Input, *cri.LinuxContainerSecurityContext)
		want   specs.LinuxSeccompAction // "" means none
		err    error
	}{
		{"default", func(*Input, *cri.LinuxContainerSecurityContext) {}, specs.ActErrno, nil},
		{"nothing asked for", func(_ *Input, sc *cri.LinuxContainerSecurityContext) { sc.Seccomp = nil }, "", nil},
		{"unconfined", func(_ *Input, sc *cri.LinuxContainerSecurityContext) {
			sc.Seccomp = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Unconfined}
		}, "", nil},
		{"the node's own default", func(in *Input, _ *cri.LinuxContainerSecurityContext) { in.Defaults.Seccomp = own }, specs.ActKillProcess, nil},
		{"localhost", func(in *Input, sc *cri.LinuxContainerSecurityContext) { sc.Seccomp, in.Facts.Seccomp = &local, own }, specs.ActKillProcess, nil},
		{"localhost that was not loaded", func(in *Input, sc *cri.LinuxContainerSecurityContext) { sc.Seccomp = &local }, "", fault.Precondition},
		{"localhost, relative", func(in *Input, sc *cri.LinuxContainerSecurityContext) {
			sc.Seccomp = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost, LocalhostRef: "p.json"}
			in.Facts.Seccomp = own
		}, "", fault.Invalid},
		{"localhost, detour", func(in *Input, sc *cri.LinuxContainerSecurityContext) {
			sc.Seccomp = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost, LocalhostRef: "/var/lib/kubelet/seccomp/../../p.json"}
			in.Facts.Seccomp = own
		}, "", fault.Invalid},
		{"CVE-2023-2431", func(in *Input, sc *cri.LinuxContainerSecurityContext) {
			sc.Seccomp = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost}
		}, "", fault.Invalid},
		{"old string", func(_ *Input, sc *cri.LinuxContainerSecurityContext) {
			sc.Seccomp, sc.SeccompProfilePath = nil, "runtime/default"
		}, specs.ActErrno, nil},
		{"a kernel without", func(in *Input, _ *cri.LinuxContainerSecurityContext) { in.Facts.Host.Seccomp = false }, "", fault.Unimplemented},
		{"a kernel without, unconfined", func(in *Input, sc *cri.LinuxContainerSecurityContext) {
			in.Facts.Host.Seccomp, sc.Seccomp = false, nil
		}, "", nil},
		{"a runtime without", func(in *Input, _ *cri.LinuxContainerSecurityContext) {
			no := false
			in.Facts.Features = &features.Features{Linux: &features.Linux{Seccomp: &features.Seccomp{Enabled: &no}}}
		}, "", fault.Unimplemented},
	} {
		in := typical()
		c.change(&in, in.Request.Container.Linux.SecurityContext)
		s, err := Container(in)
		if !errors.Is(err, c.err) {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if err != nil {
			continue
		}
		got := specs.LinuxSeccompAction("")
		if s.Linux.Seccomp != nil {
			got = s.Linux.Seccomp.DefaultAction
		}
		if got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

// TestSeccompFit: an element unknown to the runtime is left out if that allows
// less, and refuses the container if it would allow more.
func TestSeccompFit(t *testing.T) {
	rule := func(action specs.LinuxSeccompAction, op specs.LinuxSeccompOperator) Rule {
		return Rule{LinuxSyscall: specs.LinuxSyscall{Names: []string{"read"}, Action: action, Args: []specs.LinuxSeccompArg{{Op: op}}}}
	}
	known := &features.Seccomp{
		Actions:   []string{"SCMP_ACT_ERRNO", "SCMP_ACT_ALLOW"},
		Operators: []string{"SCMP_CMP_EQ"},
		Archs:     []string{"SCMP_ARCH_X86_64"},
	}
	fit := func(p *Profile) (*specs.LinuxSeccomp, error) {
		in := typical()
		in.Defaults.Seccomp = p
		in.Facts.Features = &features.Features{Linux: &features.Linux{Seccomp: known}}
		s, err := Container(in)
		if err != nil {
			return nil, err
		}
		return s.Linux.Seccomp, nil
	}
	got, err := fit(&Profile{
		DefaultAction: specs.ActErrno,
		Architectures: []specs.Arch{specs.ArchX86_64, specs.ArchX86},
		Syscalls: []Rule{
			rule(specs.ActAllow, specs.OpEqualTo), rule(specs.ActAllow, specs.OpMaskedEqual), rule(specs.ActErrno, specs.OpEqualTo),
		},
	})
	if err != nil || len(got.Syscalls) != 2 || !slices.Equal(got.Architectures, []specs.Arch{specs.ArchX86_64}) {
		t.Errorf("%+v, %v", got, err)
	}
	for name, p := range map[string]*Profile{
		"default action":   {DefaultAction: specs.ActKillProcess},
		"forbidding rule":  {DefaultAction: specs.ActAllow, Syscalls: []Rule{rule(specs.ActErrno, specs.OpMaskedEqual)}},
		"killing rule":     {DefaultAction: specs.ActAllow, Syscalls: []Rule{rule(specs.ActKill, specs.OpEqualTo)}},
		"notifying action": {DefaultAction: specs.ActAllow, Syscalls: []Rule{rule(specs.ActNotify, specs.OpEqualTo)}},
	} {
		if got, err := fit(p); !errors.Is(err, fault.Unimplemented) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
	if _, err := fit(DefaultProfile()); err != nil {
		t.Errorf("the default profile: %v", err)
	}
}

// A flag that a runtime does not know is left out if the filter is as strict without it. runc 1.1 has no list of
// flags, later ones know one that their libseccomp may not support, and nothing is known of a runtime without features.
func TestSeccompFlags_runc_2430_moby_42619(t *testing.T) {
	const log, spec, wait, sync = "SECCOMP_FILTER_FLAG_LOG", "SECCOMP_FILTER_FLAG_SPEC_ALLOW", "SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV", "SECCOMP_FILTER_FLAG_TSYNC"
	actions := []string{"SCMP_ACT_ALLOW"}
	old := &features.Seccomp{Actions: actions}
	current := &features.Seccomp{Actions: actions, KnownFlags: []string{log, spec, wait, sync}, SupportedFlags: []string{log, spec, sync}}
	for _, c := range []struct {
		has         *features.Seccomp
		asked, want []specs.LinuxSeccompFlag
		refused     bool
	}{
		{old, []specs.LinuxSeccompFlag{spec, wait, sync}, nil, false},
		{old, []specs.LinuxSeccompFlag{log}, nil, true},
		{current, []specs.LinuxSeccompFlag{log, spec, wait, sync}, []specs.LinuxSeccompFlag{log, spec, sync}, false},
		{current, []specs.LinuxSeccompFlag{"SECCOMP_FILTER_FLAG_OTHER"}, nil, true},
		{nil, []specs.LinuxSeccompFlag{log, "SECCOMP_FILTER_FLAG_OTHER"}, []specs.LinuxSeccompFlag{log, "SECCOMP_FILTER_FLAG_OTHER"}, false},
	} {
		in := typical()
		in.Defaults.Seccomp = &Profile{DefaultAction: specs.ActAllow, Flags: c.asked}
		in.Facts.Features = &features.Features{Linux: &features.Linux{Seccomp: c.has}}
		s, err := Container(in)
		if c.refused {
			if !errors.Is(err, fault.Unimplemented) || !strings.Contains(err.Error(), string(c.asked[0])) {
				t.Errorf("%v with %+v: %v", c.asked, c.has, err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%v with %+v: %v", c.asked, c.has, err)
		} else if !slices.Equal(s.Linux.Seccomp.Flags, c.want) {
			t.Errorf("%v with %+v: %v, want %v", c.asked, c.has, s.Linux.Seccomp.Flags, c.want)
		}
	}
}

func TestParseProfile(t *testing.T) {
	docker := `{
	 "defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": 1,
	 "archMap": [{"architecture": "SCMP_ARCH_X86_64", "subArchitectures": ["SCMP_ARCH_X86", "SCMP_ARCH_X32"]}],
	 "syscalls": [
	  {"names": ["read", "write"], "action": "SCMP_ACT_ALLOW", "comment": "", "includes": {}, "excludes": {}},
	  {"name": "ptrace", "action": "SCMP_ACT_ALLOW", "args": null, "includes": {"minKernel": "4.8"}},
	  {"names": ["clone"], "action": "SCMP_ACT_ALLOW", "args": [{"index": 0, "value": 2114060288, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}], "excludes": {"caps": ["CAP_SYS_ADMIN"], "arches": ["s390", "s390x"]}},
	  {"names": ["mount"], "action": "SCMP_ACT_ALLOW", "includes": {"caps": ["CAP_SYS_ADMIN"]}},
	  {"names": ["arm_only"], "action": "SCMP_ACT_ALLOW", "includes": {"arches": ["arm", "arm64"]}},
	  {"names": ["old_only"], "action": "SCMP_ACT_ALLOW", "excludes": {"minKernel": "5.0"}}
	 ]}`
	p, err := ParseProfile([]byte(docker))
	if err != nil {
		t.Fatal(err)
	}
	s := mutate(t, func(in *Input) { in.Defaults.Seccomp = p }).Linux.Seccomp
	var names []string
	for _, call := range s.Syscalls {
		names = append(names, call.Names...)
	}
	if !slices.Equal(names, []string{"read", "write", "ptrace", "clone"}) || len(s.Architectures) != 3 || *s.DefaultErrnoRet != 1 {
		t.Errorf("got %v %v", names, s.Architectures)
	}

	oci, err := ParseProfile([]byte(`{"defaultAction": "SCMP_ACT_ALLOW", "architectures": ["SCMP_ARCH_X86_64"],
	 "flags": ["SECCOMP_FILTER_FLAG_LOG"], "listenerPath": "/run/l", "listenerMetadata": "m",
	 "syscalls": [{"names": ["chmod"], "action": "SCMP_ACT_ERRNO", "errnoRet": 13}]}`))
	if err != nil {
		t.Fatal(err)
	}
	s = mutate(t, func(in *Input) { in.Defaults.Seccomp = oci }).Linux.Seccomp
	if s.ListenerPath != "/run/l" || s.ListenerMetadata != "m" || len(s.Flags) != 1 || *s.Syscalls[0].ErrnoRet != 13 || s.DefaultErrnoRet != nil {
		t.Errorf("got %+v", s)
	}
}

// TestParseProfileRoundTrip: the built-in profile can be written out, changed
// by hand and loaded again.
func TestParseProfileRoundTrip(t *testing.T) {
	p, err := ParseProfile(marshal(t, DefaultProfile()))
	if err != nil {
		t.Fatal(err)
	}
	if got, want := marshal(t, p), marshal(t, DefaultProfile()); string(got) != string(want) {
		t.Error("the profile changed on the way")
	}
}

func TestParseProfileRefused(t *testing.T) {
	for name, text := range map[string]string{
		"empty":              ``,
		"no action":          `{}`,
		"unknown action":     `{"defaultAction": "SCMP_ACT_SMILE"}`,
		"trailing data":      `{"defaultAction": "SCMP_ACT_ALLOW"} {}`,
		"both kinds of arch": `{"defaultAction": "SCMP_ACT_ALLOW", "architectures": ["SCMP_ARCH_X86"], "archMap": [{"architecture": "SCMP_ARCH_X86"}]}`,
		"rule without names": `{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"action": "SCMP_ACT_ERRNO"}]}`,
		"rule, empty name":   `{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["a", ""], "action": "SCMP_ACT_ERRNO"}]}`,
		"rule, two forms":    `{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"name": "a", "names": ["b"], "action": "SCMP_ACT_ERRNO"}]}`,
		"rule, no action":    `{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["a"]}]}`,
		"rule, argument 6":   `{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["a"], "action": "SCMP_ACT_ERRNO", "args": [{"index": 6, "op": "SCMP_CMP_EQ"}]}]}`,
		"rule, operator":     `{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["a"], "action": "SCMP_ACT_ERRNO", "args": [{"op": "=="}]}]}`,
		"rule, kernel":       `{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["a"], "action": "SCMP_ACT_ERRNO", "includes": {"minKernel": "new"}}]}`,
	} {
		if p, err := ParseProfile([]byte(text)); !errors.Is(err, fault.Invalid) {
			t.Errorf("%s: %+v, %v", name, p, err)
		}
	}
}

func FuzzParseProfile(f *testing.F) {
	f.Add(`{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"name": "a", "action": "SCMP_ACT_ERRNO"}]}`)
	f.Fuzz(func(t *testing.T, text string) {
		p, err := ParseProfile([]byte(text))
		if err != nil {
			if !errors.Is(err, fault.Invalid) {
				t.Fatal(err)
			}
			return
		}
		in := typical()
		in.Defaults.Seccomp = p
		if _, err := Container(in); err != nil {
			t.Fatal(err)
		}
	})
}

// The profile that the pod requests by annotation applies to containers that
// have no other.
func TestAskedProfile(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*cri.LinuxContainerSecurityContext)
		asked  bool
	}{
		"none":       {func(sc *cri.LinuxContainerSecurityContext) { sc.Seccomp = nil }, true},
		"unconfined": {func(sc *cri.LinuxContainerSecurityContext) { sc.Seccomp.ProfileType = cri.SecurityProfile_Unconfined }, true},
		"default":    {func(*cri.LinuxContainerSecurityContext) {}, false},
		"deprecated": {func(sc *cri.LinuxContainerSecurityContext) {
			sc.Seccomp, sc.SeccompProfilePath = nil, "runtime/default"
		}, false},
		"privileged": {func(sc *cri.LinuxContainerSecurityContext) { sc.Seccomp, sc.Privileged = nil, true }, false},
	} {
		var left bool
		s := mutate(t, func(in *Input) {
			sc := in.Request.Container.Linux.SecurityContext
			in.Request.Pod.Linux.SecurityContext.Privileged = true
			c.change(sc)
			in.Asked.Seccomp = &Profile{DefaultAction: specs.ActLog}
			left = LeftUnconfined(sc)
		})
		if asked := s.Linux.Seccomp != nil && s.Linux.Seccomp.DefaultAction == specs.ActLog; asked != c.asked || left != c.asked {
			t.Errorf("%s: the profile is %+v, left unconfined: %v", name, s.Linux.Seccomp, left)
		}
	}
}
