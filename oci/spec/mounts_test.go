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

func withMounts(mounts ...*cri.Mount) func(*Input) {
	return func(in *Input) { in.Request.Container.Mounts = mounts }
}

func destinations(s *specs.Spec) []string {
	var list []string
	for _, m := range s.Mounts {
		list = append(list, m.Destination)
	}
	return list
}

func TestMountOrder(t *testing.T) {
	s := mutate(t, withMounts(
		&cri.Mount{ContainerPath: "/a/b/c", HostPath: "/1"},
		&cri.Mount{ContainerPath: "/z", HostPath: "/2"},
		&cri.Mount{ContainerPath: "/a/", HostPath: "/3"},
		&cri.Mount{ContainerPath: "/a/b", HostPath: "/4"},
		&cri.Mount{ContainerPath: "/b", HostPath: "/5"},
	))
	want := []string{
		"/proc", "/dev", "/sys", "/z", "/a", "/b", "/dev/pts", "/dev/mqueue", "/dev/shm",
		"/etc/resolv.conf", "/etc/hostname", "/a/b", "/sys/fs/cgroup", "/a/b/c",
	}
	if got := destinations(s); !slices.Equal(got, want) {
		t.Errorf("got %v", got)
	}
}

func TestMountsOverOurs(t *testing.T) {
	s := mutate(t, withMounts(
		&cri.Mount{ContainerPath: "/etc/resolv.conf", HostPath: "/mine"},
		&cri.Mount{ContainerPath: "/dev/shm", HostPath: "/shm"},
		&cri.Mount{ContainerPath: "/sys", HostPath: "/sys", Readonly: true},
		&cri.Mount{ContainerPath: "/data", HostPath: "/first"},
		&cri.Mount{ContainerPath: "/data/../data/", HostPath: "/second"},
	))
	for destination, source := range map[string]string{
		"/etc/resolv.conf": "/mine", "/dev/shm": "/shm", "/sys": "/sys", "/data": "/second",
		"/dev/mqueue": "mqueue", "/sys/fs/cgroup": "cgroup",
	} {
		if m := mountAt(t, s, destination); m.Source != source {
			t.Errorf("%s from %s, want %s", destination, m.Source, source)
		}
	}
	all := destinations(s)
	slices.Sort(all)
	if len(slices.Compact(slices.Clone(all))) != len(all) {
		t.Errorf("twice: %v", all)
	}
}

// The node's mounts come before requested mounts inside them. They give way to
// a requested mount in the same place, or above if a place may not be made in
// it.
func TestNodeMounts(t *testing.T) {
	given := func(mounts ...*cri.Mount) *specs.Spec {
		return mutate(t, func(in *Input) {
			withMounts(mounts...)(in)
			in.Facts.NodeMounts = []*cri.Mount{{ContainerPath: "/run/secrets", HostPath: "/copies/0"}}
		})
	}
	s := given(&cri.Mount{ContainerPath: "/run/secrets/token", HostPath: "/token"}, &cri.Mount{ContainerPath: "/run", HostPath: "/volume"})
	m := mountAt(t, s, "/run/secrets")
	if m.Source != "/copies/0" || !slices.Equal(m.Options, []string{"bind", "rprivate", "nosuid", "nodev", "rw"}) {
		t.Errorf("%+v", m)
	}
	at := func(place string) int { return slices.Index(destinations(s), place) }
	if at("/run") > at("/run/secrets") || at("/run/secrets") > at("/run/secrets/token") {
		t.Errorf("order %v", destinations(s))
	}
	if m := mountAt(t, given(&cri.Mount{ContainerPath: "/run/secrets", HostPath: "/mine"}), "/run/secrets"); m.Source != "/mine" {
		t.Errorf("%+v", m)
	}
	for place, left := range map[string]bool{"/run": true, "/run/": true, "/r": false, "/run/sec": false} {
		s := given(&cri.Mount{ContainerPath: place, HostPath: "/volume", Readonly: true})
		if out := !slices.Contains(destinations(s), "/run/secrets"); out != left {
			t.Errorf("read-only mount at %s: left out: %v", place, out)
		}
	}
	if s := given(&cri.Mount{ContainerPath: "/run", HostPath: "/run", Propagation: cri.MountPropagation_PROPAGATION_BIDIRECTIONAL}); slices.Contains(destinations(s), "/run/secrets") {
		t.Error("the node gets the copies by a mount that is shared with it")
	}
}

// What every container has is not mounted into a volume that is shared with the node.
func TestOwnMountsStayOffTheNode_runc_2404(t *testing.T) {
	all := destinations(mutate(t, func(*Input) {}))
	for place, out := range map[string][]string{"/etc": {"/etc/resolv.conf", "/etc/hostname"}, "/sys/": {"/sys/fs/cgroup"}, "/et": nil} {
		left := destinations(mutate(t, withMounts(&cri.Mount{ContainerPath: place, HostPath: "/v", Propagation: cri.MountPropagation_PROPAGATION_BIDIRECTIONAL})))
		missing := slices.DeleteFunc(slices.Clone(all), func(d string) bool { return slices.Contains(left, d) })
		if !slices.Equal(missing, out) {
			t.Errorf("below a volume at %s: %q are left out", place, missing)
		}
	}
	slave := withMounts(&cri.Mount{ContainerPath: "/etc", HostPath: "/v", Propagation: cri.MountPropagation_PROPAGATION_HOST_TO_CONTAINER})
	if got := destinations(mutate(t, slave)); len(got) != len(all)+1 {
		t.Errorf("below a volume that is not shared with it: %q", got)
	}
}

// A pod sees its logs read-only in place of one of its own emptyDir volumes,
// and of no other mount.
func TestLogsInVolume_CVE_2025_0750(t *testing.T) {
	const volumes = "/var/lib/kubelet/pods/the-uid/volumes/"
	logs := "/var/log/pods/ns_name_the-uid"
	for source, want := range map[string]string{
		volumes + "kubernetes.io~empty-dir/logs":                               logs,
		volumes + "kubernetes.io~empty-dir/logs/":                              logs,
		volumes + "kubernetes.io~empty-dir/other":                              volumes + "kubernetes.io~empty-dir/other",
		volumes + "kubernetes.io~empty-dir/logs/logs":                          volumes + "kubernetes.io~empty-dir/logs/logs",
		volumes + "kubernetes.io~secret/logs":                                  volumes + "kubernetes.io~secret/logs",
		"/var/lib/kubelet/pods/other/volumes/kubernetes.io~empty-dir/logs":     "/var/lib/kubelet/pods/other/volumes/kubernetes.io~empty-dir/logs",
		"/var/lib/kubelet/pods/an-the-uid/volumes/kubernetes.io~empty-dir/log": "/var/lib/kubelet/pods/an-the-uid/volumes/kubernetes.io~empty-dir/log",
	} {
		s := mutate(t, func(in *Input) {
			withMounts(&cri.Mount{ContainerPath: "/logs", HostPath: source, Propagation: cri.MountPropagation_PROPAGATION_BIDIRECTIONAL})(in)
			in.Request.Container.Linux.SecurityContext.Privileged = true // required for bidirectional mounts
			in.Request.Pod.Linux.SecurityContext.Privileged = true
			in.Request.Pod.Metadata.Uid, in.Request.Pod.LogDirectory, in.Asked.LogVolume = "the-uid", logs, "logs"
		})
		m := mountAt(t, s, "/logs")
		if m.Source != want {
			t.Errorf("%s: %s is mounted", source, m.Source)
		}
		if want == logs && (!slices.Contains(m.Options, "ro") || !slices.Contains(m.Options, "rprivate")) {
			t.Errorf("%s: options %v", source, m.Options)
		}
	}
	for _, unset := range []func(*Input){func(in *Input) { in.Asked.LogVolume = "" }, func(in *Input) { in.Request.Pod.LogDirectory = "" }} {
		s := mutate(t, func(in *Input) {
			withMounts(&cri.Mount{ContainerPath: "/logs", HostPath: volumes + "kubernetes.io~empty-dir/logs"})(in)
			in.Request.Pod.Metadata.Uid, in.Request.Pod.LogDirectory, in.Asked.LogVolume = "the-uid", logs, "logs"
			unset(in)
		})
		if m := mountAt(t, s, "/logs"); m.Source == logs {
			t.Errorf("logs are mounted: %+v", m)
		}
	}
}

// TestDevMount: the node's /dev is mounted whole, and no device node is made in
// it.
func TestDevMount(t *testing.T) {
	s := mutate(t, func(in *Input) {
		withMounts(&cri.Mount{ContainerPath: "/dev", HostPath: "/dev"}, &cri.Mount{ContainerPath: "/dev/shm", HostPath: "/shm"})(in)
		in.Facts.Devices = []Device{{LinuxDevice: specs.LinuxDevice{Path: "/dev/fuse", Type: "c", Major: 10, Minor: 229}, Access: "rw"}}
	})
	for _, m := range s.Mounts {
		if strings.HasPrefix(m.Destination, "/dev/") && m.Source != "/shm" {
			t.Errorf("%s is still mounted over the node's", m.Destination)
		}
	}
	if mountAt(t, s, "/dev").Source != "/dev" || mountAt(t, s, "/dev/shm").Source != "/shm" {
		t.Error("the request's mounts are not there")
	}
	if len(s.Linux.Devices) != 0 {
		t.Errorf("device nodes would be made in the node's /dev: %v", s.Linux.Devices)
	}
	if rules := s.Linux.Resources.Devices; rules[len(rules)-1].Access != "rw" {
		t.Error("the device may not be used")
	}
}

func TestMountOptions(t *testing.T) {
	for _, c := range []struct {
		name  string
		mount *cri.Mount
		want  string
		root  string
	}{
		{"plain", &cri.Mount{}, "rbind rprivate rw", ""},
		{"readonly", &cri.Mount{Readonly: true}, "rbind rprivate ro", ""},
		{"slave", &cri.Mount{Propagation: cri.MountPropagation_PROPAGATION_HOST_TO_CONTAINER}, "rbind rslave rw", "rslave"},
		{"shared", &cri.Mount{Propagation: cri.MountPropagation_PROPAGATION_BIDIRECTIONAL, Readonly: true}, "rbind rshared ro", "rshared"},
		{"recursive", &cri.Mount{Readonly: true, RecursiveReadOnly: true}, "rbind rprivate rro", ""},
		{"options", &cri.Mount{MountOptions: []string{"noexec", "nodev", "noexec"}}, "rbind rprivate rw noexec nodev", ""},
	} {
		c.mount.ContainerPath, c.mount.HostPath = "/data", "/volume"
		s := mutate(t, func(in *Input) {
			withMounts(c.mount)(in)
			in.Facts.MountOptions = []string{"rro"}
		})
		m := mountAt(t, s, "/data")
		if got := strings.Join(m.Options, " "); got != c.want || m.Type != "bind" || m.Source != "/volume" {
			t.Errorf("%s: %+v, want %s", c.name, m, c.want)
		}
		if s.Linux.RootfsPropagation != c.root {
			t.Errorf("%s: root propagation %q, want %q", c.name, s.Linux.RootfsPropagation, c.root)
		}
	}
	s := mutate(t, withMounts(
		&cri.Mount{ContainerPath: "/a", HostPath: "/a", Propagation: cri.MountPropagation_PROPAGATION_BIDIRECTIONAL},
		&cri.Mount{ContainerPath: "/b", HostPath: "/b", Propagation: cri.MountPropagation_PROPAGATION_HOST_TO_CONTAINER},
	))
	if s.Linux.RootfsPropagation != "rshared" {
		t.Errorf("shared and slave: %q", s.Linux.RootfsPropagation)
	}
}

func TestMountsRefused(t *testing.T) {
	image := &cri.ImageSpec{Image: "i"}
	for name, c := range map[string]struct {
		mount *cri.Mount
		err   error
	}{
		"relative":              {&cri.Mount{ContainerPath: "data", HostPath: "/v"}, fault.Invalid},
		"no path":               {&cri.Mount{HostPath: "/v"}, fault.Invalid},
		"root":                  {&cri.Mount{ContainerPath: "/", HostPath: "/v"}, fault.Invalid},
		"root by detour":        {&cri.Mount{ContainerPath: "/a/..", HostPath: "/v"}, fault.Invalid},
		"NUL":                   {&cri.Mount{ContainerPath: "/a\x00", HostPath: "/v"}, fault.Invalid},
		"no source":             {&cri.Mount{ContainerPath: "/a"}, fault.Invalid},
		"relative source":       {&cri.Mount{ContainerPath: "/a", HostPath: "v"}, fault.Invalid},
		"NUL in the source":     {&cri.Mount{ContainerPath: "/a", HostPath: "/\x00"}, fault.Invalid},
		"unknown propagation":   {&cri.Mount{ContainerPath: "/a", HostPath: "/v", Propagation: 7}, fault.Invalid},
		"option":                {&cri.Mount{ContainerPath: "/a", HostPath: "/v", MountOptions: []string{"suid"}}, fault.Invalid},
		"option with data":      {&cri.Mount{ContainerPath: "/a", HostPath: "/v", MountOptions: []string{"noexec,dev"}}, fault.Invalid},
		"option for ownership":  {&cri.Mount{ContainerPath: "/a", HostPath: "/v", MountOptions: []string{"idmap"}}, fault.Invalid},
		"recursive rw":          {&cri.Mount{ContainerPath: "/a", HostPath: "/v", RecursiveReadOnly: true}, fault.Invalid},
		"recursive slave":       {&cri.Mount{ContainerPath: "/a", HostPath: "/v", RecursiveReadOnly: true, Readonly: true, Propagation: cri.MountPropagation_PROPAGATION_HOST_TO_CONTAINER}, fault.Invalid},
		"recursive, unknown":    {&cri.Mount{ContainerPath: "/a", HostPath: "/v", RecursiveReadOnly: true, Readonly: true}, fault.Unimplemented},
		"id maps, unknown":      {&cri.Mount{ContainerPath: "/a", HostPath: "/v", UidMappings: []*cri.IDMapping{{Length: 1}}, GidMappings: []*cri.IDMapping{{Length: 1}}}, fault.Unimplemented},
		"half an id map":        {&cri.Mount{ContainerPath: "/a", HostPath: "/v", UidMappings: []*cri.IDMapping{{Length: 1}}}, fault.Invalid},
		"image and path":        {&cri.Mount{ContainerPath: "/a", HostPath: "/v", Image: image, Readonly: true}, fault.Invalid},
		"writable image":        {&cri.Mount{ContainerPath: "/a", Image: image}, fault.Invalid},
		"image not mounted yet": {&cri.Mount{ContainerPath: "/a", Image: image, Readonly: true}, fault.Precondition},
	} {
		in := typical()
		in.Request.Container.Mounts = []*cri.Mount{c.mount}
		if _, err := Container(in); !errors.Is(err, c.err) || !strings.Contains(err.Error(), "mount at") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestMountAbilities: reported features take precedence over what is known
// about the runtime's name.
func TestMountAbilities(t *testing.T) {
	for _, c := range []struct {
		name     string
		features *features.Features
		known    []string
		ok       bool
	}{
		{"nothing known", nil, nil, false},
		{"known by name", nil, []string{"rro"}, true},
		{"features without a list", &features.Features{}, []string{"rro"}, true},
		{"features with it", &features.Features{MountOptions: []string{"rro"}}, nil, true},
		{"features without it", &features.Features{MountOptions: []string{"ro"}}, []string{"rro"}, false},
	} {
		in := typical()
		in.Request.Container.Mounts = []*cri.Mount{{ContainerPath: "/a", HostPath: "/v", Readonly: true, RecursiveReadOnly: true}}
		in.Facts.Features, in.Facts.MountOptions = c.features, c.known
		if _, err := Container(in); (err == nil) != c.ok {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

// TestIDMappedMounts: only a runtime that supports them gets them.
func TestIDMappedMounts(t *testing.T) {
	ids := []*cri.IDMapping{{HostId: 5, ContainerId: 0, Length: 7}}
	in := typical()
	in.Request.Container.Mounts = []*cri.Mount{{ContainerPath: "/a", HostPath: "/v", UidMappings: ids, GidMappings: ids}}
	if _, err := Container(in); !errors.Is(err, fault.Unimplemented) {
		t.Errorf("a runtime that cannot: %v", err)
	}
	in.Facts.IDMap = true
	s, err := Container(in)
	if err != nil {
		t.Fatal(err)
	}
	want := []specs.LinuxIDMapping{{ContainerID: 0, HostID: 5, Size: 7}}
	if m := mountAt(t, s, "/a"); !slices.Equal(m.UIDMappings, want) || !slices.Equal(m.GIDMappings, want) {
		t.Errorf("%+v", m)
	}
}

func TestMountSources(t *testing.T) {
	s := mutate(t, func(in *Input) {
		withMounts(
			&cri.Mount{ContainerPath: "/link", HostPath: "/volumes/link"},
			&cri.Mount{ContainerPath: "/image", Image: &cri.ImageSpec{Image: "i"}, Readonly: true},
			&cri.Mount{ContainerPath: "/plain", HostPath: "/volumes//plain/"},
		)(in)
		in.Facts.MountSources = []string{"/volumes/real", "/run/images/i"}
	})
	for destination, source := range map[string]string{"/link": "/volumes/real", "/image": "/run/images/i", "/plain": "/volumes/plain"} {
		if m := mountAt(t, s, destination); m.Source != source {
			t.Errorf("%s from %s, want %s", destination, m.Source, source)
		}
	}
}

func TestPodFiles(t *testing.T) {
	s := mutate(t, func(in *Input) { in.Request.Container.Linux.SecurityContext.ReadonlyRootfs = true })
	if m := mountAt(t, s, "/etc/resolv.conf"); !slices.Contains(m.Options, "ro") {
		t.Errorf("writable in a read-only root: %+v", m)
	}
	s = mutate(t, func(in *Input) { in.Facts.Files = Files{} })
	if m := mountAt(t, s, "/dev/shm"); m.Type != "tmpfs" {
		t.Errorf("%+v", m)
	}
	if slices.ContainsFunc(destinations(s), func(d string) bool { return strings.HasPrefix(d, "/etc/") }) {
		t.Errorf("files that were not made are mounted: %v", destinations(s))
	}
}

// Nothing is mounted in /proc except files of statistics, and /proc itself.
func TestMountsInProc_CVE_2019_16884_CVE_2025_52881(t *testing.T) {
	for _, c := range []struct {
		target, source string
		ok             bool
	}{
		{"/proc", "/proc", true},
		{"/proc/", "/proc/", true},
		{"/proc/cpuinfo", "/var/lib/lxcfs/proc/cpuinfo", true},
		{"/procfs", "/x", true},
		{"/x/proc", "/x", true},
		{"/proc", "/x", false},
		{"/proc", "/proc/1", false},
		{"/x/../proc", "/x", false},
		{"/proc/self/attr", "/x", false},
		{"/proc/./thread-self/attr/exec", "/x", false},
		{"/proc/sys/kernel/core_pattern", "/proc/sys/kernel/core_pattern", false},
		{"/proc/cpuinfo/x", "/x", false},
	} {
		in := typical()
		withMounts(&cri.Mount{ContainerPath: c.target, HostPath: c.source})(&in)
		if _, err := Container(in); (err == nil) != c.ok || err != nil && !errors.Is(err, fault.Invalid) {
			t.Errorf("%s from %s: %v", c.target, c.source, err)
		}
	}
}
