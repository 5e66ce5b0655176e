package spec

import (
	"errors"
	"path"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
)

func device(path string, minor int64, access string) Device {
	return Device{LinuxDevice: specs.LinuxDevice{Path: path, Type: "c", Major: 10, Minor: minor}, Access: access}
}

func nodes(s *specs.Spec) map[string]int64 {
	out := map[string]int64{}
	for _, d := range s.Linux.Devices {
		out[d.Path] = d.Minor
	}
	return out
}

// TestDeviceOwnership: an owner that the request leaves open stays as on the
// node.
func TestDeviceOwnership(t *testing.T) {
	id := func(n uint32) *uint32 { return &n }
	device := Device{LinuxDevice: specs.LinuxDevice{Path: "/dev/fuse", Type: "c", UID: id(7), GID: id(8)}, Access: "rw"}
	for _, c := range []struct {
		on          bool
		user, group *cri.Int64Value
		uid, gid    uint32
	}{
		{false, &cri.Int64Value{Value: 1000}, &cri.Int64Value{Value: 2000}, 7, 8},
		{true, nil, nil, 7, 8},
		{true, &cri.Int64Value{Value: 1000}, nil, 1000, 8},
		{true, &cri.Int64Value{Value: 1000}, &cri.Int64Value{Value: 2000}, 1000, 2000},
	} {
		s := mutate(t, func(in *Input) {
			in.Defaults.DeviceOwnership = c.on
			in.Facts.Devices = []Device{device}
			sc := in.Request.Container.Linux.SecurityContext
			sc.RunAsUser, sc.RunAsGroup = c.user, c.group
		})
		if d := s.Linux.Devices[0]; *d.UID != c.uid || *d.GID != c.gid {
			t.Errorf("%+v: %d:%d", c, *d.UID, *d.GID)
		}
	}
	if *device.UID != 7 {
		t.Error("the node's fact was changed")
	}
}

func TestDeviceRules(t *testing.T) {
	s := mutate(t, func(*Input) {})
	rules := s.Linux.Resources.Devices
	if rules[0].Allow || rules[0].Access != "rwm" || rules[0].Type != "" {
		t.Errorf("the first rule does not deny all: %+v", rules[0])
	}
	var open []int64
	for _, r := range rules[1:] {
		if r.Access != "m" {
			if r.Major == nil {
				t.Errorf("all devices are open: %+v", r)
			}
			open = append(open, *r.Major)
		}
	}
	if len(open) != 8 || len(s.Linux.Devices) != 0 {
		t.Errorf("open majors %v, nodes %v", open, s.Linux.Devices)
	}
}

func TestDevicesAskedFor(t *testing.T) {
	s := mutate(t, func(in *Input) {
		in.Defaults.Devices = []Device{device("/dev/a", 1, "rw"), device("/dev/b", 2, "r")}
		in.Facts.Devices = []Device{device("/dev/b", 3, "rwm"), device("/dev/null", 4, "r"), device("/opt/c", 5, "w")}
	})
	got := nodes(s)
	if len(got) != 3 || got["/dev/a"] != 1 || got["/dev/b"] != 3 || got["/opt/c"] != 5 {
		t.Errorf("nodes %v", got)
	}
	allowed := map[int64]string{}
	for _, r := range s.Linux.Resources.Devices {
		if r.Major != nil && *r.Major == 10 {
			allowed[*r.Minor] = r.Access
		}
	}
	if len(allowed) != 4 || allowed[1] != "rw" || allowed[3] != "rwm" || allowed[4] != "r" || allowed[5] != "w" {
		t.Errorf("rules %v", allowed)
	}
}

func TestPrivilegedDevices(t *testing.T) {
	with := func(in *Input) {
		privilegedPod(in)
		in.Facts.HostDevices = []Device{device("/dev/a", 1, "rwm"), device("/dev/tty", 2, "rwm")}
		in.Facts.Devices = []Device{device("/dev/a", 9, "r")}
	}
	s := mutate(t, with)
	if got := nodes(s); len(got) != 1 || got["/dev/a"] != 9 {
		t.Errorf("nodes %v: the request's wins, the runtime's own are its own", got)
	}
	if rules := s.Linux.Resources.Devices; len(rules) != 1 || !rules[0].Allow || rules[0].Access != "rwm" {
		t.Errorf("rules %+v", rules)
	}
	s = mutate(t, func(in *Input) {
		with(in)
		in.Defaults.PrivilegedWithoutHostDevices = true
		in.Facts.Devices = nil
	})
	if len(s.Linux.Devices) != 0 || s.Linux.Resources.Devices[0].Allow {
		t.Errorf("withheld devices: %v %+v", s.Linux.Devices, s.Linux.Resources.Devices)
	}
	s = mutate(t, func(in *Input) { // what is asked for is there (containerd/cri#1455)
		with(in)
		in.Defaults.PrivilegedWithoutHostDevices = true
	})
	last := s.Linux.Resources.Devices[len(s.Linux.Resources.Devices)-1]
	if got := nodes(s); len(got) != 1 || got["/dev/a"] != 9 || !last.Allow || *last.Minor != 9 || last.Access != "r" {
		t.Errorf("withheld devices but one: %v %+v", got, last)
	}
	s = mutate(t, func(in *Input) {
		with(in)
		in.Defaults.PrivilegedWithoutHostDevices, in.Defaults.AllDevicesAllowed = true, true
		in.Facts.Devices = nil
	})
	if rules := s.Linux.Resources.Devices; len(s.Linux.Devices) != 0 || len(rules) != 1 || !rules[0].Allow {
		t.Errorf("withheld devices that may be used: %v %+v", s.Linux.Devices, rules)
	}
	s = mutate(t, func(in *Input) { in.Defaults.AllDevicesAllowed = true })
	if s.Linux.Resources.Devices[0].Allow {
		t.Errorf("all devices are allowed in a container that is not privileged: %+v", s.Linux.Resources.Devices)
	}
}

// TestDeviceUnderVolume: no device node is made in a volume, whose directory
// belongs to the node.
func TestDeviceUnderVolume(t *testing.T) {
	s := mutate(t, func(in *Input) {
		withMounts(&cri.Mount{ContainerPath: "/vol", HostPath: "/v"}, &cri.Mount{ContainerPath: "/dev/x", HostPath: "/x"})(in)
		in.Facts.Devices = []Device{device("/vol/d", 1, "r"), device("/dev/x", 2, "r"), device("/volume", 3, "r")}
	})
	if got := nodes(s); len(got) != 1 || got["/volume"] != 3 {
		t.Errorf("nodes %v", got)
	}
}

func TestParseDevice(t *testing.T) {
	for text, want := range map[string]*cri.Device{
		"/dev/fuse":             {HostPath: "/dev/fuse"},
		"/dev/fuse:rw":          {HostPath: "/dev/fuse", Permissions: "rw"},
		"/dev/a:/dev/b":         {HostPath: "/dev/a", ContainerPath: "/dev/b"},
		"/dev/a:/dev/b:m":       {HostPath: "/dev/a", ContainerPath: "/dev/b", Permissions: "m"},
		"/dev/dri/card0:/dev/x": {HostPath: "/dev/dri/card0", ContainerPath: "/dev/x"},
	} {
		got, err := ParseDevice(text)
		if err != nil || got.HostPath != want.HostPath || got.ContainerPath != want.ContainerPath || got.Permissions != want.Permissions {
			t.Errorf("%s: %v, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "fuse", "/", "/dev/a:x", "/dev/a:/dev/b:rx", "/dev/a:b:r", "/dev/a:/b:r:w", "/dev/a\x00", "/dev/a:/:r"} {
		if got, err := ParseDevice(text); !errors.Is(err, fault.Invalid) {
			t.Errorf("%q: %v, %v", text, got, err)
		}
	}
}

// A device of the configuration or of a request has clean absolute paths and an
// access of r, w and m, and means the same in its longest form.
func FuzzDevice(f *testing.F) {
	for _, text := range []string{"/dev/fuse", "/dev/a:/dev/b:rw", "/dev/a:rwm", "/dev/a:/dev/b", "/dev/../x::", "a:b:c:d", "/", "/dev/a\x00:/x", "/dev/a:/b:rr"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		d, err := ParseDevice(text)
		if err != nil {
			if !errors.Is(err, fault.Invalid) {
				t.Errorf("%q: %v", text, err)
			}
			return
		}
		host, container, access, err := validateDevice(d)
		if err != nil {
			t.Fatalf("%q: %v", text, err)
		}
		for _, p := range []string{host, container} {
			if !path.IsAbs(p) || path.Clean(p) != p || p == "/" || strings.Contains(p, "\x00") {
				t.Errorf("%q has the path %q", text, p)
			}
		}
		if access == "" || strings.Trim(access, "rwm") != "" {
			t.Errorf("%q has the access %q", text, access)
		}
		again, err := ParseDevice(host + ":" + container + ":" + access)
		if err != nil || again.HostPath != host || again.ContainerPath != container || again.Permissions != access {
			t.Errorf("%q is %v, %v", text, again, err)
		}
	})
}
