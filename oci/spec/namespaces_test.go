package spec

import (
	"errors"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/opencontainers/runtime-spec/specs-go/features"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
)

const (
	podMode  = cri.NamespaceMode_POD
	ownMode  = cri.NamespaceMode_CONTAINER
	nodeMode = cri.NamespaceMode_NODE
	target   = cri.NamespaceMode_TARGET
)

func TestPIDNamespace(t *testing.T) {
	const absent = "absent"
	options := func(mode cri.NamespaceMode) *cri.NamespaceOption { return &cri.NamespaceOption{Pid: mode} }
	for _, c := range []struct {
		name string
		pod  cri.NamespaceMode
		own  *cri.NamespaceOption
		path string
		want string // "absent", "" for new, or a path
		err  error
	}{
		{"its own", ownMode, options(ownMode), "/p", "", nil},
		{"the pod's", podMode, options(podMode), "/p", "/p", nil},
		{"the pod's, which has none", podMode, options(podMode), "", "", fault.Precondition},
		{"the pod's, which shares none", ownMode, options(podMode), "", "", fault.Precondition},
		{"the node's", nodeMode, options(nodeMode), "", absent, nil},
		{"the pod's, which is the node's", nodeMode, options(podMode), "", absent, nil},
		{"its own in a pod with the node's", nodeMode, options(ownMode), "", "", nil},
		{"a target's", ownMode, options(target), "/t", "/t", nil},
		{"a target's that is gone", ownMode, options(target), "", "", fault.Precondition},
		{"unsaid, pod shares", podMode, nil, "/p", "/p", nil},
		{"unsaid, pod does not share", ownMode, nil, "", "", nil},
		{"unsaid, pod has the node's", nodeMode, nil, "", absent, nil},
		{"nonsense", podMode, options(9), "/p", "", fault.Invalid},
	} {
		in := typical()
		in.Request.Pod.Linux.SecurityContext.NamespaceOptions.Pid = c.pod
		in.Request.Container.Linux.SecurityContext.NamespaceOptions = c.own
		in.Facts.Namespaces.PID = c.path
		s, err := Container(in)
		if c.err != nil {
			if !errors.Is(err, c.err) {
				t.Errorf("%s: %v", c.name, err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		got, listed := namespacePaths(s)[specs.PIDNamespace]
		if !listed {
			got = absent
		}
		if got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

func TestPodNamespaces(t *testing.T) {
	s := mutate(t, func(in *Input) {})
	for kind, want := range map[specs.LinuxNamespaceType]string{
		specs.NetworkNamespace: "/run/netns/p", specs.IPCNamespace: "/run/ipcns/p", specs.UTSNamespace: "/run/utsns/p", specs.MountNamespace: "",
	} {
		if got, ok := namespacePaths(s)[kind]; !ok || got != want {
			t.Errorf("%s: %q, %v", kind, got, ok)
		}
	}
	if s.Hostname != "" {
		t.Error("a joined UTS namespace has its name already")
	}

	// The pod decides, whatever the container says.
	s = mutate(t, func(in *Input) {
		hostNamespaces(in)
		in.Request.Container.Linux.SecurityContext.NamespaceOptions = &cri.NamespaceOption{Pid: nodeMode}
	})
	if got := kinds(s); len(got) != 1 || got[0] != specs.MountNamespace {
		t.Errorf("host pod: %v", got)
	}
	s = mutate(t, func(in *Input) {
		in.Request.Container.Linux.SecurityContext.NamespaceOptions = &cri.NamespaceOption{Pid: ownMode, Network: nodeMode, Ipc: nodeMode}
	})
	if namespacePaths(s)[specs.NetworkNamespace] == "" || namespacePaths(s)[specs.IPCNamespace] == "" {
		t.Error("a container left its pod's namespaces")
	}

	s = mutate(t, func(in *Input) { in.Facts.Namespaces.UTS, in.Facts.Namespaces.IPC = "", "" })
	if path, ok := namespacePaths(s)[specs.UTSNamespace]; !ok || path != "" || s.Hostname != "web" {
		t.Errorf("new UTS namespace: %q %v, hostname %q", path, ok, s.Hostname)
	}
	in := typical()
	in.Facts.Namespaces.Net = ""
	if _, err := Container(in); !errors.Is(err, fault.Precondition) {
		t.Errorf("no network namespace: %v", err)
	}
}

func TestCgroupNamespace(t *testing.T) {
	for _, c := range []struct{ v2, privileged, want bool }{
		{false, false, false}, {true, false, true}, {true, true, false}, {false, true, false},
	} {
		s := mutate(t, func(in *Input) {
			in.Facts.Host.CgroupV2 = c.v2
			if c.privileged {
				privilegedPod(in)
			}
		})
		if _, got := namespacePaths(s)[specs.CgroupNamespace]; got != c.want {
			t.Errorf("v2 %v privileged %v: %v", c.v2, c.privileged, got)
		}
	}
}

func TestUserNamespaceOptions(t *testing.T) {
	ids := func(host, container, length uint32) []*cri.IDMapping {
		return []*cri.IDMapping{{HostId: host, ContainerId: container, Length: length}}
	}
	good := ids(100000, 0, 65536)
	for name, c := range map[string]struct {
		options *cri.UserNamespace
		own, ok bool
	}{
		"absent":        {nil, false, true},
		"node":          {&cri.UserNamespace{Mode: nodeMode}, false, true},
		"pod":           {&cri.UserNamespace{Mode: podMode, Uids: good, Gids: ids(1, 0, 1)}, true, true},
		"node with ids": {&cri.UserNamespace{Mode: nodeMode, Uids: good}, false, false},
		"container":     {&cri.UserNamespace{Mode: ownMode, Uids: good, Gids: good}, false, false},
		"target":        {&cri.UserNamespace{Mode: target, Uids: good, Gids: good}, false, false},
		"no ids":        {&cri.UserNamespace{Mode: podMode}, false, false},
		"no gids":       {&cri.UserNamespace{Mode: podMode, Uids: good}, false, false},
		"two":           {&cri.UserNamespace{Mode: podMode, Uids: append(ids(1, 1, 1), good...), Gids: good}, false, false},
		"no root":       {&cri.UserNamespace{Mode: podMode, Uids: good, Gids: ids(100000, 1, 65536)}, false, false},
		"empty":         {&cri.UserNamespace{Mode: podMode, Uids: ids(100000, 0, 0), Gids: good}, false, false},
		"too long":      {&cri.UserNamespace{Mode: podMode, Uids: ids(1<<32-1, 0, 2), Gids: good}, false, false},
	} {
		in := typical()
		in.Request.Pod.Linux.SecurityContext.NamespaceOptions.UsernsOptions = c.options
		in.Facts.Namespaces.User = "/run/userns/p"
		s, err := Container(in)
		if podErr := ValidatePod(in.Request.Pod); (podErr == nil) != c.ok {
			t.Errorf("%s: ValidatePod: %v", name, podErr)
		}
		if !c.ok {
			if !errors.Is(err, fault.Invalid) {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		path, got := namespacePaths(s)[specs.UserNamespace]
		if got != c.own || got && (path != "/run/userns/p" || len(s.Linux.UIDMappings)+len(s.Linux.GIDMappings) != 0) {
			t.Errorf("%s: %v %+v", name, got, s.Linux.UIDMappings)
		}
	}
	in := typical()
	userNamespacePod(&in)
	in.Request.Container.Mounts = nil
	in.Facts.Features = &features.Features{Linux: &features.Linux{Namespaces: []string{"pid"}}}
	if _, err := Container(in); !errors.Is(err, fault.Unimplemented) {
		t.Errorf("a runtime without user namespaces: %v", err)
	}
	in.Facts.Features.Linux.Namespaces = nil
	if _, err := Container(in); err != nil {
		t.Errorf("a runtime that does not tell: %v", err)
	}
}

// TestSysOfUserNamespace: sysfs cannot be mounted over a network that the user
// namespace does not own, and an unmapped group cannot own a terminal.
func TestSysOfUserNamespace(t *testing.T) {
	in := typical()
	hostNamespaces(&in)
	in.Request.Pod.Linux.SecurityContext.NamespaceOptions.UsernsOptions = &cri.UserNamespace{
		Uids: []*cri.IDMapping{{HostId: 1000, Length: 5}}, Gids: []*cri.IDMapping{{HostId: 1000, Length: 5}},
	}
	in.Request.Pod.Linux.SecurityContext.NamespaceOptions.Pid = ownMode
	in.Request.Container.Linux.SecurityContext.NamespaceOptions = nil
	s, err := Container(in)
	if err != nil {
		t.Fatal(err)
	}
	if m := mountAt(t, s, "/sys"); m.Type != "bind" || m.Source != "/sys" || m.Options[0] != "rbind" {
		t.Errorf("%+v", m)
	}
	for _, option := range mountAt(t, s, "/dev/pts").Options {
		if option == "gid=5" {
			t.Error("gid=5 is not mapped")
		}
	}
}

func TestValidatePod(t *testing.T) {
	if err := ValidatePod(nil); err != nil {
		t.Errorf("nothing asked for: %v", err)
	}
	if err := ValidatePod(typicalPod()); err != nil {
		t.Error(err)
	}
	for name, change := range map[string]func(*cri.PodSandboxConfig, *cri.LinuxSandboxSecurityContext){
		"group without user": func(_ *cri.PodSandboxConfig, sc *cri.LinuxSandboxSecurityContext) { sc.RunAsGroup = value(1) },
		"user 2^32":          func(_ *cri.PodSandboxConfig, sc *cri.LinuxSandboxSecurityContext) { sc.RunAsUser = value(1 << 32) },
		"negative group": func(_ *cri.PodSandboxConfig, sc *cri.LinuxSandboxSecurityContext) {
			sc.RunAsUser, sc.RunAsGroup = value(1), value(-1)
		},
		"supplemental group": func(_ *cri.PodSandboxConfig, sc *cri.LinuxSandboxSecurityContext) {
			sc.SupplementalGroups = []int64{-5}
		},
		"target network": func(_ *cri.PodSandboxConfig, sc *cri.LinuxSandboxSecurityContext) {
			sc.NamespaceOptions.Network = target
		},
		"target PID": func(_ *cri.PodSandboxConfig, sc *cri.LinuxSandboxSecurityContext) { sc.NamespaceOptions.Pid = target },
		"IPC mode 9": func(_ *cri.PodSandboxConfig, sc *cri.LinuxSandboxSecurityContext) { sc.NamespaceOptions.Ipc = 9 },
		"seccomp without a name": func(_ *cri.PodSandboxConfig, sc *cri.LinuxSandboxSecurityContext) {
			sc.Seccomp = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost}
		},
		"deprecated seccomp": func(_ *cri.PodSandboxConfig, sc *cri.LinuxSandboxSecurityContext) {
			sc.Seccomp, sc.SeccompProfilePath = nil, "localhost/"
		},
		"AppArmor without a name": func(_ *cri.PodSandboxConfig, sc *cri.LinuxSandboxSecurityContext) {
			sc.Apparmor = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost}
		},
		"sysctl of the node": func(p *cri.PodSandboxConfig, _ *cri.LinuxSandboxSecurityContext) {
			p.Linux.Sysctls = map[string]string{"vm.swappiness": "1"}
		},
		"sysctl with host network": func(p *cri.PodSandboxConfig, sc *cri.LinuxSandboxSecurityContext) {
			sc.NamespaceOptions.Network = nodeMode
			p.Linux.Sysctls = map[string]string{"net.ipv4.ip_forward": "1"}
		},
	} {
		pod := typicalPod()
		change(pod, pod.Linux.SecurityContext)
		if err := ValidatePod(pod); !errors.Is(err, fault.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A pod with its own kernel has its own hostname, with or without the node's
// network.
func TestHostnameOfAnOwnKernel(t *testing.T) {
	for _, network := range []cri.NamespaceMode{cri.NamespaceMode_POD, cri.NamespaceMode_NODE} {
		s := mutate(t, func(in *Input) {
			in.Facts.OwnKernel = true
			in.Request.Pod.Linux.SecurityContext.NamespaceOptions.Network = network
		})
		if _, ok := namespacePaths(s)[specs.UTSNamespace]; s.Hostname != "web" || !ok {
			t.Errorf("%s: hostname %q, namespaces %v", network, s.Hostname, namespacePaths(s))
		}
	}
}

// The id maps of a pod's user namespace contain exactly the ids in their
// ranges, up to the largest possible id.
func FuzzIDMap(f *testing.F) {
	f.Add(uint32(0), uint32(65536), uint32(65535))
	f.Add(uint32(0), uint32(65536), uint32(65536))
	f.Add(uint32(1<<32-1), uint32(1), uint32(1<<32-1))
	f.Add(uint32(1), uint32(1<<32-1), uint32(0))
	f.Fuzz(func(t *testing.T, first, length, id uint32) {
		ids := []*cri.IDMapping{{ContainerId: first, HostId: 100_000, Length: length}}
		want := uint64(id) >= uint64(first) && uint64(id) < uint64(first)+uint64(length)
		if got := mapped(ids, id); got != want {
			t.Errorf("%d is in %d ids from %d on: %v", id, length, first, got)
		}
	})
}
