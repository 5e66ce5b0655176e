package spec

import (
	"errors"
	"slices"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/opencontainers/runtime-spec/specs-go/features"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
)

func TestPrivileged(t *testing.T) {
	s := mutate(t, func(in *Input) {
		privilegedPod(in)
		in.Facts.Host.AppArmor, in.Defaults.SELinux = true, &SELinux{}
		in.Defaults.AppArmorProfile = "crius-default"
	})
	if len(s.Linux.MaskedPaths)+len(s.Linux.ReadonlyPaths) != 0 || s.Linux.Seccomp != nil ||
		s.Process.ApparmorProfile != "" || s.Process.SelinuxLabel != "" || s.Linux.MountLabel != "" {
		t.Errorf("still confined: %+v", s.Linux)
	}
	for _, path := range []string{"/sys", "/sys/fs/cgroup"} {
		if m := mountAt(t, s, path); !slices.Contains(m.Options, "rw") {
			t.Errorf("%s: %v", path, m.Options)
		}
	}
	in := typical()
	privilegedPod(&in)
	in.Request.Pod.Linux.SecurityContext.Privileged = false
	if _, err := Container(in); !errors.Is(err, fault.Invalid) {
		t.Errorf("in a pod that is not: %v", err)
	}
}

// The lists are the kubelet's, empty for procMount Unmasked.
func TestPathMasks_GHSA_7ww5_4wqc_m92c(t *testing.T) {
	s := mutate(t, func(*Input) {})
	if !slices.Equal(s.Linux.MaskedPaths, append(kubeletMaskedPaths(), powercap)) {
		t.Errorf("masked %v", s.Linux.MaskedPaths)
	}
	s = mutate(t, func(in *Input) {
		in.Request.Container.Linux.SecurityContext.MaskedPaths = []string{powercap, "/x"}
		in.Request.Container.Linux.SecurityContext.ReadonlyPaths = []string{"/y"}
	})
	if !slices.Equal(s.Linux.MaskedPaths, []string{powercap, "/x"}) || !slices.Equal(s.Linux.ReadonlyPaths, []string{"/y"}) {
		t.Errorf("masked %v, readonly %v", s.Linux.MaskedPaths, s.Linux.ReadonlyPaths)
	}
	s = mutate(t, func(in *Input) {
		in.Request.Container.Linux.SecurityContext = &cri.LinuxContainerSecurityContext{}
		in.Facts.Namespaces.PID = "/p"
		in.Request.Pod.Linux.SecurityContext.NamespaceOptions.Pid = cri.NamespaceMode_POD
	})
	if len(s.Linux.MaskedPaths)+len(s.Linux.ReadonlyPaths) != 0 {
		t.Errorf("unmasked: %v %v", s.Linux.MaskedPaths, s.Linux.ReadonlyPaths)
	}
	s = mutate(t, func(in *Input) { in.Request.Container.Linux.SecurityContext = nil })
	for _, path := range []string{
		"/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list", "/proc/timer_stats",
		"/proc/sched_debug", "/proc/scsi", "/proc/interrupts", "/sys/firmware", powercap,
	} {
		if !slices.Contains(s.Linux.MaskedPaths, path) {
			t.Errorf("%s is not masked by default", path)
		}
	}
	if !slices.Contains(s.Linux.ReadonlyPaths, "/proc/sys") || !slices.Contains(s.Linux.ReadonlyPaths, "/proc/sysrq-trigger") {
		t.Errorf("readonly by default: %v", s.Linux.ReadonlyPaths)
	}
}

// Mounts are compared with these paths once a container is created, as the kernel shows them, and there is one
// mount at a path.
func TestPathMasksAreClean(t *testing.T) {
	s := mutate(t, func(in *Input) {
		in.Request.Container.Linux.SecurityContext.MaskedPaths = []string{powercap, "/proc/acpi/", "/proc/sys"}
		in.Request.Container.Linux.SecurityContext.ReadonlyPaths = []string{"/proc/sys/", "//proc/bus"}
	})
	if !slices.Equal(s.Linux.MaskedPaths, []string{powercap, "/proc/acpi", "/proc/sys"}) || !slices.Equal(s.Linux.ReadonlyPaths, []string{"/proc/bus"}) {
		t.Errorf("masked %v, readonly %v", s.Linux.MaskedPaths, s.Linux.ReadonlyPaths)
	}
}

func TestChooseProfile_CVE_2023_2431(t *testing.T) {
	profile := func(kind cri.SecurityProfile_ProfileType, ref string) *cri.SecurityProfile {
		return &cri.SecurityProfile{ProfileType: kind, LocalhostRef: ref}
	}
	const bad = confinement(-1)
	for _, c := range []struct {
		name       string
		profile    *cri.SecurityProfile
		deprecated string
		want       confinement
		ref        string
	}{
		{"absent", nil, "", unconfined, ""},
		{"default", profile(cri.SecurityProfile_RuntimeDefault, ""), "", runtimeDefault, ""},
		{"unconfined", profile(cri.SecurityProfile_Unconfined, ""), "", unconfined, ""},
		{"localhost", profile(cri.SecurityProfile_Localhost, "/a"), "", localhost, "/a"},
		{"field over string", profile(cri.SecurityProfile_RuntimeDefault, ""), "unconfined", runtimeDefault, ""},
		{"1.17 default", nil, "runtime/default", runtimeDefault, ""},
		{"1.10 default", nil, "docker/default", runtimeDefault, ""},
		{"1.17 unconfined", nil, "unconfined", unconfined, ""},
		{"1.17 localhost", nil, "localhost//var/lib/kubelet/seccomp/p.json", localhost, "/var/lib/kubelet/seccomp/p.json"},
		{"CVE-2023-2431", profile(cri.SecurityProfile_Localhost, ""), "", bad, ""},
		{"CVE-2023-2431 as a string", nil, "localhost/", bad, ""},
		{"no slash", nil, "localhost", bad, ""},
		{"unknown string", nil, "Unconfined", bad, ""},
		{"unknown type", profile(7, ""), "", bad, ""},
		{"line break", profile(cri.SecurityProfile_Localhost, "a\nb"), "", bad, ""},
		{"too long", profile(cri.SecurityProfile_Localhost, strings.Repeat("a", 5000)), "", bad, ""},
	} {
		got, err := chooseProfile(c.profile, c.deprecated, unconfined)
		if c.want == bad {
			if !errors.Is(err, fault.Invalid) {
				t.Errorf("%s: %+v, %v", c.name, got, err)
			}
		} else if err != nil || got.confinement != c.want || got.ref != c.ref {
			t.Errorf("%s: %+v, %v", c.name, got, err)
		}
	}
	if got, _ := chooseProfile(nil, "", runtimeDefault); got.confinement != runtimeDefault {
		t.Error("AppArmor is on unless said otherwise")
	}
}

func TestAppArmor(t *testing.T) {
	no := false
	for _, c := range []struct {
		name       string
		enabled    bool
		profile    *cri.SecurityProfile
		deprecated string
		want       string
		err        error
	}{
		{"unsaid", true, nil, "", "crius-default", nil},
		{"unsaid on a node without", false, nil, "", "", nil},
		{"default", true, &cri.SecurityProfile{}, "", "crius-default", nil},
		{"default on a node without", false, &cri.SecurityProfile{}, "", "", nil},
		{"unconfined", true, &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Unconfined}, "", "", nil},
		{"localhost", true, &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost, LocalhostRef: "mine"}, "", "mine", nil},
		{"localhost on a node without", false, &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost, LocalhostRef: "mine"}, "", "", fault.Unimplemented},
		{"localhost as critest sends it", true, &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost, LocalhostRef: "localhost/mine"}, "", "mine", nil},
		{"localhost with nothing behind it", true, &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost, LocalhostRef: "localhost/"}, "", "", fault.Invalid},
		{"localhost/unconfined", true, &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost, LocalhostRef: "localhost/unconfined"}, "", "", fault.Invalid},
		{"localhost called unconfined", true, &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost, LocalhostRef: "unconfined"}, "", "", fault.Invalid},
		{"localhost without a name", true, &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost}, "", "", fault.Invalid},
		{"old default", true, nil, "runtime/default", "crius-default", nil},
		{"old localhost", true, nil, "localhost/mine", "mine", nil},
		{"old unconfined", true, nil, "unconfined", "", nil},
		{"old nonsense", true, nil, "mine", "", fault.Invalid},
	} {
		in := typical()
		in.Facts.Host.AppArmor = c.enabled
		in.Defaults.AppArmorProfile = "crius-default"
		sc := in.Request.Container.Linux.SecurityContext
		sc.Apparmor, sc.ApparmorProfile = c.profile, c.deprecated
		s, err := Container(in)
		if !errors.Is(err, c.err) || err == nil && s.Process.ApparmorProfile != c.want {
			t.Errorf("%s: %v, %v", c.name, s, err)
		}
	}
	s := mutate(t, func(in *Input) {
		in.Facts.Host.AppArmor = true
		in.Defaults.AppArmorProfile = "crius-default"
		in.Facts.Features = &features.Features{Linux: &features.Linux{Apparmor: &features.Apparmor{Enabled: &no}}}
	})
	if s.Process.ApparmorProfile != "" {
		t.Error("a profile for a runtime that cannot set it")
	}
}

func TestRootAndFlags(t *testing.T) {
	s := mutate(t, func(*Input) {})
	if s.Root.Readonly || s.Process.NoNewPrivileges {
		t.Error("flags that nobody asked for")
	}
	s = mutate(t, func(in *Input) { in.Defaults.ReadOnly = true })
	if !s.Root.Readonly {
		t.Error("the node's read_only has no effect")
	}
	s = mutate(t, func(in *Input) {
		in.Request.Container.Linux.SecurityContext.ReadonlyRootfs = true
		in.Request.Container.Linux.SecurityContext.NoNewPrivs = true
	})
	if !s.Root.Readonly || !s.Process.NoNewPrivileges {
		t.Error("the request's flags have no effect")
	}
}

func TestMaskedPathsAreAbsolute(t *testing.T) {
	for _, sc := range []*cri.LinuxContainerSecurityContext{
		{MaskedPaths: []string{"/proc/kcore", "proc/keys"}},
		{ReadonlyPaths: []string{"../etc"}},
	} {
		in := Input{Request: Request{Container: &cri.ContainerConfig{Linux: &cri.LinuxContainerConfig{SecurityContext: sc}}}}
		if err := pathMasks(&in, &specs.Spec{Linux: &specs.Linux{}}); !errors.Is(err, fault.Invalid) {
			t.Errorf("%v: %v", sc, err)
		}
	}
}

// A localhost profile must have a name (CVE-2023-2431): no text makes a
// container unconfined except the documented words.
func FuzzAppArmorProfile(f *testing.F) {
	for _, text := range []string{"", "runtime/default", "docker/default", "unconfined", "localhost/", "localhost/x", "localhost/unconfined", "localhost/localhost/", "LOCALHOST/x", "localhost/\x00"} {
		f.Add(text, false, int32(0))
		f.Add(text, true, int32(cri.SecurityProfile_Localhost))
	}
	f.Add("x", true, int32(77))
	f.Fuzz(func(t *testing.T, text string, field bool, kind int32) {
		in := typical()
		in.Facts.Host.AppArmor, in.Defaults.AppArmorProfile = true, "crius-default"
		sc := in.Request.Container.Linux.SecurityContext
		sc.Apparmor, sc.ApparmorProfile = nil, text
		if field {
			sc.Apparmor = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_ProfileType(kind), LocalhostRef: text}
		}
		profile, err := in.appArmor()
		if err != nil {
			if !errors.Is(err, fault.Invalid) || profile != "" {
				t.Errorf("%q: %q, %v", text, profile, err)
			}
			return
		}
		unconfined := !field && text == "unconfined" || field && kind == int32(cri.SecurityProfile_Unconfined)
		if (profile == "") != unconfined || profile == "unconfined" || strings.ContainsAny(profile, "\x00\n") {
			t.Errorf("%q, field %v of type %d: %q", text, field, kind, profile)
		}
		if named := strings.TrimPrefix(text, "localhost/"); profile != "" && profile != "crius-default" && !strings.HasSuffix(named, profile) {
			t.Errorf("%q is the profile %q", text, profile)
		}
	})
}

func TestPrivilegedContainerNeedsAPodThatSaysSo(t *testing.T) {
	for _, c := range []struct{ stored, current, ok bool }{
		{false, false, false}, {true, false, true}, {false, true, true}, {true, true, true},
	} {
		in := typical()
		privilegedPod(&in)
		in.Request.Pod.Linux.SecurityContext.Privileged, in.Request.PrivilegedPod = c.stored, c.current
		if _, err := Container(in); (err == nil) != c.ok || err != nil && !errors.Is(err, fault.Invalid) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}
