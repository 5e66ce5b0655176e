package cgroup

import (
	"path"
	"strings"
	"testing"

	"github.com/crius-run/crius/internal/mount"
)

func at(root, point, fs, options string) mount.Info {
	return mount.Info{Root: root, Point: point, Type: fs, Options: options}
}

func TestLocate(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, own string
		mounts    []mount.Info
		mode      Mode
		want      string // names@point:own
	}{
		{
			name:   "v2",
			own:    "0::/system.slice/crius.service\n",
			mounts: []mount.Info{at("/", "/sys/fs/cgroup", "cgroup2", "rw")},
			mode:   V2,
			want:   "@/sys/fs/cgroup:/system.slice/crius.service",
		},
		{
			name: "v1",
			own:  "3:cpu,cpuacct:/a\n2:memory:/b\n1:name=systemd:/c\n0::/\n",
			mounts: []mount.Info{
				at("/", "/sys/fs/cgroup/systemd", "cgroup", "rw,xattr,name=systemd"),
				at("/", "/sys/fs/cgroup/cpu,cpuacct", "cgroup", "rw,cpu,cpuacct"),
				at("/", "/sys/fs/cgroup/memory", "cgroup", "rw,memory"),
			},
			mode: V1,
			want: "cpu,cpuacct@/sys/fs/cgroup/cpu,cpuacct:/a memory@/sys/fs/cgroup/memory:/b name=systemd@/sys/fs/cgroup/systemd:/c",
		},
		{
			name: "hybrid",
			own:  "2:memory:/b\n1:name=systemd:/c\n0::/d\n",
			mounts: []mount.Info{
				at("/", "/sys/fs/cgroup/unified", "cgroup2", "rw"),
				at("/", "/sys/fs/cgroup/systemd", "cgroup", "rw,name=systemd"),
				at("/", "/sys/fs/cgroup/memory", "cgroup", "rw,memory"),
			},
			mode: Hybrid,
			want: "memory@/sys/fs/cgroup/memory:/b name=systemd@/sys/fs/cgroup/systemd:/c @/sys/fs/cgroup/unified:/d",
		},
		{
			name: "v2 beside a VPN's net_cls",
			own:  "1:net_cls:/\n0::/init.scope\n",
			mounts: []mount.Info{
				at("/", "/sys/fs/cgroup", "cgroup2", "rw"),
				at("/", "/opt/vpn/net-cls", "cgroup", "rw,net_cls"),
			},
			mode: V2,
			want: "@/sys/fs/cgroup:/init.scope",
		},
		{
			name: "in a container that sees a part, beside another's",
			own:  "2:memory:/docker/c1/init\n0::/docker/c1\n",
			mounts: []mount.Info{
				at("/docker/c10", "/other", "cgroup", "rw,memory"),
				at("/docker/c1", "/sys/fs/cgroup/memory", "cgroup", "rw,memory"),
				at("/docker/c1", "/sys/fs/cgroup/memory2", "cgroup", "rw,memory"),
				at("/docker/c1", "/sys/fs/cgroup/unified", "cgroup2", "rw"),
			},
			mode: Hybrid,
			want: "memory@/sys/fs/cgroup/memory:/init @/sys/fs/cgroup/unified:/",
		},
		{
			name:   "nothing mounted",
			own:    "2:memory:/\n0::/\n",
			mounts: []mount.Info{at("/", "/", "ext4", "rw")},
		},
		{
			name: "garbage",
			own:  "\n:::\nx\n1:2\n7:pids:relative\n8:pids:/ok:with:colons\n",
			mounts: []mount.Info{
				at("/", "/p", "cgroup", "rw,pids"),
			},
			mode: V1,
			want: "pids@/p:/ok:with:colons",
		},
	} {
		all, mode, err := locate(memberships(c.own), func(f func(mount.Info) bool) error {
			for _, m := range c.mounts {
				if !f(m) {
					return nil
				}
			}
			return nil
		})
		var got []string
		for _, h := range all {
			got = append(got, h.names+"@"+h.point+":"+h.own)
		}
		if err != nil || mode != c.mode || strings.Join(got, " ") != c.want {
			t.Errorf("%s: mode %d, %v\n got %s\nwant %s", c.name, mode, err, strings.Join(got, " "), c.want)
		}
	}
}

// The mount table of a busy node is long, and every container starts a monitor:
// it must not read all of it.
func TestLocateStopsEarly(t *testing.T) {
	t.Parallel()
	read := 0
	_, mode, err := locate(memberships("2:memory:/\n0::/\n"), func(f func(mount.Info) bool) error {
		table := []mount.Info{at("/", "/", "ext4", "rw"), at("/", "/m", "cgroup", "rw,memory"), at("/", "/u", "cgroup2", "rw")}
		for range 1000 {
			table = append(table, at("/", "/x", "overlay", "rw"))
		}
		for _, m := range table {
			read++
			if !f(m) {
				break
			}
		}
		return nil
	})
	if err != nil || mode != Hybrid || read != 3 {
		t.Errorf("read %d lines, mode %d, %v", read, mode, err)
	}
}

func TestDetectHere(t *testing.T) {
	t.Parallel()
	if Detect() == None {
		t.Error("no cgroups found")
	}
	for _, h := range hierarchies(t) {
		if _, err := read(-100, h.dir(h.own)+"/cgroup.procs"); err != nil {
			t.Errorf("%q: own cgroup %s: %v", h.names, h.own, err)
		}
	}
}

func TestWithin(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		cgroup, top string
		want        bool
	}{
		{"/a", "/a", true}, {"/a/b", "/a", true}, {"/ab", "/a", false}, {"/a", "/a/b", false},
		{"/", "/a", false}, {"/a", "/", true}, {"/", "/", true},
	} {
		if got := within(c.cgroup, c.top); got != c.want {
			t.Errorf("within(%q, %q) = %v", c.cgroup, c.top, got)
		}
	}
}

// The cgroup of a process may have any name: seen from a mount it is an
// absolute path in that mount, or nothing.
func FuzzMemberships(f *testing.F) {
	f.Add("3:cpu,cpuacct:/a\n2:memory:/b:c\n1:name=systemd:/c\n0::/\n", "/")
	f.Add("0::/kubepods/pod1 (deleted)\n", "/kubepods")
	f.Add("0::/kubepods2\n", "/kubepods")
	f.Add("::::\n0:\nx", "")
	f.Add("0::/../../a", "/..")
	f.Fuzz(func(t *testing.T, text, root string) {
		all := memberships(text)
		if len(all) > strings.Count(text, "\n")+1 {
			t.Errorf("%q has %d memberships", text, len(all))
		}
		for _, m := range all {
			if !path.IsAbs(m.own) || strings.Contains(m.own+m.names, "\n") || strings.Contains(m.names, ":") {
				t.Errorf("%q: %+v", text, m)
			}
			below, ok := relative(m.own, root)
			if ok && path.IsAbs(root) && (!path.IsAbs(below) || root != "/" && strings.TrimSuffix(root+below, "/") != strings.TrimSuffix(m.own, "/")) {
				t.Errorf("%q is %q below %q", m.own, below, root)
			}
		}
		hierarchies, mode, err := locate(all, func(f func(mount.Info) bool) error {
			f(at("/", "/sys/fs/cgroup", "cgroup2", "rw"))
			f(at(root, "/sys/fs/cgroup/memory", "cgroup", "rw,memory"))
			return nil
		})
		if err != nil || (mode == None) != (len(hierarchies) == 0) {
			t.Errorf("%q: %+v, mode %v, %v", text, hierarchies, mode, err)
		}
	})
}
