package spec

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
)

// image makes a root file system with these files; a value that begins with
// "->" is a link.
func image(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, content := range files {
		path := filepath.Join(root, name)
		if target, ok := strings.CutPrefix(content, "->"); ok {
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.Symlink(target, path); err != nil {
				t.Fatal(err)
			}
			continue
		}
		writeFile(t, path, content)
	}
	return root
}

func TestResolveUser(t *testing.T) {
	root := image(t, map[string]string{"etc/passwd": passwdFile, "etc/group": groupFile})
	got, err := ResolveUser(root, &cri.LinuxContainerSecurityContext{RunAsUsername: "app"}, "")
	if err != nil || got.UID != 1000 || !slices.Equal(got.Groups, []uint32{10, 29, 1000}) {
		t.Errorf("%+v, %v", got, err)
	}
	for name, files := range map[string]map[string]string{
		"empty image":       {},
		"no /etc/passwd":    {"etc/group": groupFile},
		"/etc is a file":    {"etc": "x"},
		"link that dangles": {"etc/passwd": "->/nowhere"},
	} {
		root := image(t, files)
		if got, err := ResolveUser(root, nil, "1000"); err != nil || got.UID != 1000 || got.Username != "" {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
		if _, err := ResolveUser(root, nil, "app"); !errors.Is(err, fault.Invalid) {
			t.Errorf("%s, by name: %v", name, err)
		}
	}
	if _, err := ResolveUser(filepath.Join(root, "absent"), nil, ""); !errors.Is(err, fault.Precondition) || errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no root file system: %v", err)
	}
}

// An image's links, however made, lead to files of the image or nowhere, never
// to the node's.
func TestRootfsFileStaysInside_CVE_2024_5154_CVE_2024_9676(t *testing.T) {
	outside := t.TempDir()
	writeFile(t, filepath.Join(outside, "etc/passwd"), "secret:x:5:5::/:\n")
	for name, files := range map[string]map[string]string{
		"absolute link":         {"etc/passwd": "->" + outside + "/etc/passwd"},
		"link upwards":          {"etc/passwd": "->" + strings.Repeat("../", 30) + outside + "/etc/passwd"},
		"link as directory":     {"etc": "->" + outside + "/etc"},
		"magic link to root":    {"etc": "->/proc/self/root" + outside + "/etc"},
		"magic link to cwd":     {"etc/passwd": "->/proc/self/cwd/spec.go"},
		"magic link to own fds": {"etc/passwd": "->/proc/self/fd/0"},
	} {
		root := image(t, files)
		data, err := ReadRootfsFile(root, "/etc/passwd", 1<<20)
		if !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %q, %v", name, data, err)
		}
	}
	root := image(t, map[string]string{"etc": "->/usr/../real", "real/passwd": "->/real/../real/p", "real/p": "inside"})
	if err := os.Mkdir(filepath.Join(root, "usr"), 0o755); err != nil {
		t.Fatal(err)
	}
	if data, err := ReadRootfsFile(root, "/etc/passwd", 1<<20); err != nil || string(data) != "inside" {
		t.Errorf("absolute links inside the image: %q, %v", data, err)
	}
	root = image(t, map[string]string{"etc/passwd": "->passwd"})
	if _, err := ReadRootfsFile(root, "/etc/passwd", 1<<20); !errors.Is(err, fault.Invalid) {
		t.Errorf("loop: %v", err)
	}
}

// TestRootfsFileWithProcMounted: even where a magic link would work.
func TestRootfsFileWithProcMounted(t *testing.T) {
	root := image(t, map[string]string{"etc/passwd": "->/proc/self/root/etc/passwd", "proc/x": ""})
	proc := filepath.Join(root, "proc")
	if err := unix.Mount("/proc", proc, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(proc, unix.MNT_DETACH)
	if data, err := ReadRootfsFile(root, "/etc/passwd", 1<<20); !errors.Is(err, fault.Invalid) {
		t.Errorf("%q, %v", data, err)
	}
}

// An image's passwd is read only if it is a regular file of ordinary size. None
// of these may hang.
func TestHugePasswd_CVE_2025_4437_CVE_2026_47262(t *testing.T) {
	for name, make := range map[string]func(path string) error{
		"huge sparse file": func(p string) error {
			f, err := os.Create(p)
			if err != nil {
				return err
			}
			defer f.Close()
			return f.Truncate(10 << 30)
		},
		"a byte too long": func(p string) error { return os.WriteFile(p, make([]byte, maxAccountFile+1), 0o600) },
		"FIFO":            func(p string) error { return unix.Mkfifo(p, 0o666) },
		"zero device":     func(p string) error { return unix.Mknod(p, unix.S_IFCHR|0o666, int(unix.Mkdev(1, 5))) },
		"directory":       func(p string) error { return os.Mkdir(p, 0o755) },
		"socket":          func(p string) error { return unix.Mknod(p, unix.S_IFSOCK|0o666, 0) },
	} {
		for _, file := range []string{"etc/passwd", "etc/group"} {
			root := image(t, map[string]string{"etc/x": ""})
			if err := make(filepath.Join(root, file)); err != nil {
				t.Fatal(err)
			}
			if got, err := ResolveUser(root, nil, "1000"); !errors.Is(err, fault.Invalid) {
				t.Errorf("%s for %s: %+v, %v", name, file, got, err)
			}
		}
	}
	root := image(t, map[string]string{"etc/passwd": strings.Repeat("a:x:1:1::/:\n", maxAccountFile/12)})
	if _, err := ResolveUser(root, nil, "a"); err != nil {
		t.Errorf("just below the limit: %v", err)
	}
}

func TestResolveDevices(t *testing.T) {
	dir := t.TempDir()
	for name, dev := range map[string]uint64{"null": unix.Mkdev(1, 3), "sub/zero": unix.Mkdev(1, 5), "sub/deep/full": unix.Mkdev(1, 7)} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mknod(path, unix.S_IFCHR|0o640, int(dev)); err != nil {
			t.Fatal(err)
		}
	}
	writeFile(t, filepath.Join(dir, "sub/file"), "no device")
	for name, target := range map[string]string{"link": "null", "dirlink": "sub", "sub/inner": "zero"} {
		if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	show := func(list []Device) string {
		var out []string
		for _, d := range list {
			out = append(out, fmt.Sprintf("%s %s %d:%d %s %o", d.Path, d.Type, d.Major, d.Minor, d.Access, *d.FileMode))
		}
		return strings.Join(out, "; ")
	}
	for _, c := range []struct {
		asked *cri.Device
		want  string
	}{
		{&cri.Device{HostPath: dir + "/null", ContainerPath: "/dev/n", Permissions: "rw"}, "/dev/n c 1:3 rw 640"},
		{&cri.Device{HostPath: dir + "/null"}, dir + "/null c 1:3 rwm 640"},
		{&cri.Device{HostPath: dir + "/link", ContainerPath: "/dev/l", Permissions: "r"}, "/dev/l c 1:3 r 640"},
		{&cri.Device{HostPath: dir + "/sub", ContainerPath: "/dev/s", Permissions: "m"}, "/dev/s/deep/full c 1:7 m 640; /dev/s/zero c 1:5 m 640"},
		{&cri.Device{HostPath: dir + "/dirlink/", ContainerPath: "/dev/s/", Permissions: "mrw"}, "/dev/s/deep/full c 1:7 mrw 640; /dev/s/zero c 1:5 mrw 640"},
	} {
		got, err := ResolveDevices([]*cri.Device{c.asked})
		if err != nil || show(got) != c.want {
			t.Errorf("%v: %s, %v", c.asked, show(got), err)
		}
	}
	for name, asked := range map[string]*cri.Device{
		"absent":      {HostPath: dir + "/absent"},
		"a file":      {HostPath: dir + "/sub/file"},
		"relative":    {HostPath: "dev/null"},
		"permissions": {HostPath: dir + "/null", Permissions: "rx"},
		"nothing":     {},
	} {
		if got, err := ResolveDevices([]*cri.Device{asked}); !errors.Is(err, fault.Invalid) {
			t.Errorf("%s: %s, %v", name, show(got), err)
		}
	}
	if got, err := ResolveDevices(nil); err != nil || len(got) != 0 {
		t.Errorf("none: %v, %v", got, err)
	}
}

func TestHostDevices(t *testing.T) {
	dev := t.TempDir()
	for _, name := range []string{"null", "pts/0", "shm/x", ".hidden/y", "console", "ptmx", "dri/card0", "vfio/pts/z", "mapper/\xe9"} {
		path := filepath.Join(dev, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mknod(path, unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))); err != nil {
			t.Fatal(err)
		}
	}
	got, err := hostDevices(dev)
	if err != nil {
		t.Fatal(err)
	}
	var paths []string
	for _, d := range got {
		paths = append(paths, d.Path)
		if d.Access != "rwm" {
			t.Errorf("%s: %s", d.Path, d.Access)
		}
	}
	if want := []string{"/dev/dri/card0", "/dev/null", "/dev/vfio/pts/z"}; !slices.Equal(paths, want) {
		t.Errorf("got %v", paths)
	}
	real, err := HostDevices()
	if err != nil || !slices.ContainsFunc(real, func(d Device) bool { return d.Path == "/dev/null" && d.Major == 1 && d.Minor == 3 }) {
		t.Errorf("this machine's: %d devices, %v", len(real), err)
	}
}

func TestResolveSeccomp(t *testing.T) {
	dir := t.TempDir()
	good := filepath.Join(dir, "p.json")
	writeFile(t, good, `{"defaultAction": "SCMP_ACT_LOG"}`)
	writeFile(t, filepath.Join(dir, "bad.json"), `{`)
	local := func(path string) *cri.SecurityProfile {
		return &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost, LocalhostRef: path}
	}
	for name, sc := range map[string]*cri.LinuxContainerSecurityContext{
		"field":  {Seccomp: local(good)},
		"string": {SeccompProfilePath: "localhost/" + good},
	} {
		if p, err := ResolveSeccomp(sc); err != nil || p.DefaultAction != "SCMP_ACT_LOG" {
			t.Errorf("%s: %+v, %v", name, p, err)
		}
	}
	for name, sc := range map[string]*cri.LinuxContainerSecurityContext{
		"nothing": nil, "default": {Seccomp: &cri.SecurityProfile{}}, "privileged": {Seccomp: local(good), Privileged: true},
	} {
		if p, err := ResolveSeccomp(sc); err != nil || p != nil {
			t.Errorf("%s: %+v, %v", name, p, err)
		}
	}
	if err := unix.Mkfifo(filepath.Join(dir, "fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, path := range map[string]string{
		"absent": dir + "/absent.json", "broken": dir + "/bad.json", "directory": dir, "FIFO": dir + "/fifo",
		"relative": "p.json", "detour": dir + "/x/../p.json", "CVE-2023-2431": "",
	} {
		if p, err := ResolveSeccomp(&cri.LinuxContainerSecurityContext{Seccomp: local(path)}); !errors.Is(err, fault.Invalid) {
			t.Errorf("%s: %+v, %v", name, p, err)
		}
	}
}

func hostFiles(change map[string]string) fstest.MapFS {
	files := fstest.MapFS{}
	for name, content := range map[string]string{
		"proc/self/status":           "Name:\tx\nCapEff:\t000001ffffffffff\nCapBnd:\t000001ffffffffff\n",
		"proc/self/oom_score_adj":    "-999\n",
		"proc/sys/kernel/osrelease":  "6.1.0-13-amd64\n",
		"sys/fs/cgroup/cpu/x":        "",
		"sys/kernel/security/unused": "",
	} {
		files[name] = &fstest.MapFile{Data: []byte(content)}
	}
	for name, content := range change {
		files[name] = &fstest.MapFile{Data: []byte(content)}
	}
	return files
}

func TestHostFacts(t *testing.T) {
	for _, c := range []struct {
		name  string
		files map[string]string
		check func(Host) bool
	}{
		{"bare", nil, func(h Host) bool {
			return h.Bounding == allCapabilities && h.OOMScoreAdjMin == -1000 && h.Kernel == "6.1.0-13-amd64" &&
				!h.CgroupV2 && !h.Seccomp && !h.AppArmor && !h.SELinux && !h.HugeTLB && !h.SwapAccounting && !h.PidsController
		}},
		{"no CAP_SYS_RESOURCE", map[string]string{"proc/self/status": "CapEff:\t000001fffeffffff\nCapBnd:\t000001fffeffffff\n"}, func(h Host) bool {
			return !h.Bounding.has("CAP_SYS_RESOURCE") && h.OOMScoreAdjMin == -999
		}},
		{"bounding without effect", map[string]string{"proc/self/status": "CapEff:\t0000000000000001\nCapBnd:\tffffffffffffffff\n"}, func(h Host) bool {
			return h.Bounding == 1
		}},
		{"v1", map[string]string{
			"sys/fs/cgroup/pids/cgroup.procs": "", "sys/fs/cgroup/hugetlb/cgroup.procs": "", "sys/fs/cgroup/memory/memory.memsw.limit_in_bytes": "",
		}, func(h Host) bool { return !h.CgroupV2 && h.PidsController && h.HugeTLB && h.SwapAccounting }},
		{"huge pages", map[string]string{"sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "0", "sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages": "0"},
			func(h Host) bool { return slices.Equal(h.HugePageSizes, []string{"1GB", "2MB"}) }},
		{"hybrid", map[string]string{"sys/fs/cgroup/unified/cgroup.controllers": "hugetlb"}, func(h Host) bool { return !h.CgroupV2 && !h.HugeTLB }},
		{"v2", map[string]string{
			"sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory pids\n", "proc/self/cgroup": "0::/system.slice/crius.service\n",
			"sys/fs/cgroup/system.slice/crius.service/memory.swap.max": "max",
		}, func(h Host) bool { return h.CgroupV2 && h.PidsController && !h.HugeTLB && h.SwapAccounting }},
		{"v2 without swap", map[string]string{
			"sys/fs/cgroup/cgroup.controllers": "memory hugetlb\n", "proc/self/cgroup": "0::/system.slice/crius.service\n", "proc/swaps": "",
		}, func(h Host) bool { return h.CgroupV2 && h.HugeTLB && !h.PidsController && !h.SwapAccounting }},
		{"v2, in the root cgroup", map[string]string{
			"sys/fs/cgroup/cgroup.controllers": "memory\n", "proc/self/cgroup": "0::/\n", "proc/swaps": "",
		}, func(h Host) bool { return h.SwapAccounting }},
		{"security modules", map[string]string{
			"proc/sys/kernel/seccomp/actions_avail": "errno", "sys/module/apparmor/parameters/enabled": "Y\n", "sys/fs/selinux/enforce": "0", "proc/self/attr/current": "system_u:system_r:init_t:s0\x00",
		}, func(h Host) bool { return h.Seccomp && h.AppArmor && h.SELinux }},
		{"SELinux without a policy", map[string]string{
			"sys/fs/selinux/enforce": "0", "proc/self/attr/current": "kernel\x00",
		}, func(h Host) bool { return !h.SELinux }},
		{"AppArmor says nothing", map[string]string{"sys/module/apparmor/parameters/enabled": ""}, func(h Host) bool { return !h.AppArmor }},
		{"AppArmor switched off", map[string]string{"sys/module/apparmor/parameters/enabled": "N\n"}, func(h Host) bool { return !h.AppArmor }},
	} {
		host, err := hostFrom(hostFiles(c.files))
		if err != nil || !c.check(host) {
			t.Errorf("%s: %+v, %v", c.name, host, err)
		}
	}
	for name, files := range map[string]map[string]string{
		"no capabilities":  {"proc/self/status": "Name:\tx\n"},
		"bad capabilities": {"proc/self/status": "CapBnd:\txyz\n"},
		"bad score":        {"proc/self/status": "CapEff:\t0\nCapBnd:\t0\n", "proc/self/oom_score_adj": "x"},
	} {
		if host, err := hostFrom(hostFiles(files)); err == nil {
			t.Errorf("%s: %+v", name, host)
		}
	}
}

func TestThisHost(t *testing.T) {
	host, err := ResolveHost()
	if err != nil {
		t.Fatal(err)
	}
	if host.Arch == "" || !host.kernelAtLeast("4.8") || host.Bounding == 0 || !host.Seccomp || !host.PidsController {
		t.Errorf("%+v", host)
	}
}

func TestAddAccount(t *testing.T) {
	for _, c := range []struct{ file, line, want string }{
		{"root:x:0:0::/:/sh\n", "7:x:7:0::/:/nologin\n", "root:x:0:0::/:/sh\n7:x:7:0::/:/nologin\n"},
		{"root:x:0:0::/:/sh", "7:x:7:0::/:/nologin\n", "root:x:0:0::/:/sh\n7:x:7:0::/:/nologin\n"},
		{"root:x:0:0::/:/sh\n", "", "root:x:0:0::/:/sh\n"},
		{"", "7:x:7:0::/:/nologin\n", ""},
	} {
		rootfs, outside := t.TempDir(), filepath.Join(t.TempDir(), "passwd")
		file := filepath.Join(rootfs, "etc/passwd")
		writeFile(t, outside, "the node's")
		if err := os.MkdirAll(filepath.Join(rootfs, "etc"), 0o755); err != nil {
			t.Fatal(err)
		}
		if c.file != "" { // behind a link that would lead out
			writeFile(t, filepath.Join(rootfs, "passwd"), c.file)
			if err := os.Symlink("../../../../passwd", file); err != nil {
				t.Fatal(err)
			}
		}
		if err := AddAccount(rootfs, "/etc/passwd", c.line); err != nil {
			t.Errorf("%q + %q: %v", c.file, c.line, err)
		}
		got, _ := os.ReadFile(filepath.Join(rootfs, "passwd"))
		if string(got) != c.want {
			t.Errorf("%q + %q: %q", c.file, c.line, got)
		}
	}
	rootfs := t.TempDir()
	if err := errors.Join(os.Mkdir(filepath.Join(rootfs, "etc"), 0o755), os.Mkdir(filepath.Join(rootfs, "etc/passwd"), 0o755)); err != nil {
		t.Fatal(err)
	}
	if err := AddAccount(rootfs, "/etc/passwd", "x\n"); !errors.Is(err, fault.Invalid) {
		t.Errorf("a directory: %v", err)
	}
}

// Only directories are allowed in place of the kernel's file systems.
func TestCheckRootfs_CVE_2023_27561_CVE_2026_41579(t *testing.T) {
	for name, c := range map[string]struct {
		files map[string]string
		ok    bool
	}{
		"nothing there":       {map[string]string{"etc/passwd": ""}, true},
		"directories":         {map[string]string{"proc/x": "", "sys/x": "", "dev/null": ""}, true},
		"links below":         {map[string]string{"dev/fd": "->/proc/self/fd"}, true},
		"link to a directory": {map[string]string{"dev": "->/other", "other/x": ""}, false},
		"link that dangles":   {map[string]string{"proc": "->/none"}, false},
		"link that climbs":    {map[string]string{"sys": "->../../sys"}, false},
		"file":                {map[string]string{"dev": ""}, false},
	} {
		if err := CheckRootfs(image(t, c.files), nil); (err == nil) != c.ok || err != nil && !errors.Is(err, fault.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// An image's links are followed inside it to the place where a mount would be
// made.
func TestMountsThatLinksLeadIntoProc_CVE_2019_16884(t *testing.T) {
	root := image(t, map[string]string{
		"alias": "->/proc/self", "kernel": "->proc/sys/kernel", "up": "->../../../proc", "via": "->alias",
		"info": "->/proc/cpuinfo", "data": "->/other", "other/x": "", "loop": "->loop", "proc/x": "",
	})
	for target, ok := range map[string]bool{
		"/alias/attr": false, "/alias": false, "/kernel": false, "/up/self": false, "/via/attr/exec": false, "/loop/x": false,
		"/info": true, "/data/y": true, "/none/of/these": true, "/other/../data": true,
	} {
		err := CheckRootfs(root, []*cri.Mount{{ContainerPath: target, HostPath: "/x"}})
		if (err == nil) != ok || err != nil && !errors.Is(err, fault.Invalid) {
			t.Errorf("%s: %v", target, err)
		}
	}
}

// The runtimes' part is in test/integration.
func TestFollowLinks(t *testing.T) {
	root := image(t, map[string]string{
		"var/lock": "->/gone/lock", "var/tmp": "->../tmp", "tmp/file": "", "vol/link": "->/gone/vol", "dev/shm": "->/run/shm",
		"etc": "->usr/lost/etc", "var/proc": "->/proc/sys/gone", "var/fd": "->/proc/self/fd/7", "var/cpuinfo": "->/proc/cpuinfo",
		"var/vol": "->../vol", "root": "->/",
	})
	for place, want := range map[string]string{
		"/var/lock": "/gone/lock", "/var/lock/": "/gone/lock", "/var/lock/a/b": "/gone/lock/a/b", "/etc/hosts": "/usr/lost/etc/hosts",
		"/var/tmp": "/var/tmp", "/var/tmp/new": "/var/tmp/new", "/new": "/new", "/dev/shm": "/dev/shm", "/vol/link": "/vol/link",
		"/vol/link/a": "/vol/link/a", "/var/proc": "/var/proc", "/var/proc/a": "/var/proc/a", "/var/cpuinfo": "/proc/cpuinfo",
		"/var/vol/link": "/var/vol/link", "/root": "/root",
	} {
		s := &specs.Spec{
			Root: &specs.Root{Path: root}, Process: &specs.Process{Cwd: place},
			Mounts: []specs.Mount{{Destination: place}, {Destination: "/dev"}, {Destination: "/vol"}},
			Linux:  &specs.Linux{Devices: []specs.LinuxDevice{{Path: place}}},
		}
		if err := FollowLinks(s); err != nil {
			t.Errorf("%s: %v", place, err)
			continue
		}
		if !slices.ContainsFunc(s.Mounts, func(m specs.Mount) bool { return m.Destination == want }) || s.Linux.Devices[0].Path != want {
			t.Errorf("%s: mounts %+v, device at %s, want %s", place, s.Mounts, s.Linux.Devices[0].Path, want)
		}
	}
}

// A working directory goes where links lead, except into the directory of a process (CVE-2024-21626).
func TestFollowLinksOfTheWorkingDirectory_CVE_2024_21626(t *testing.T) {
	root := image(t, map[string]string{"cwd": "->/gone/cwd", "vol/cwd": "->/gone/cwd", "fd": "->/proc/self/fd/7"})
	for cwd, want := range map[string]string{"/cwd/below": "/gone/cwd/below", "/vol/cwd": "/vol/cwd", "/vol/other": "/vol/other", "/fd": ""} {
		s := &specs.Spec{
			Root: &specs.Root{Path: root}, Process: &specs.Process{Cwd: cwd}, Linux: &specs.Linux{},
			Mounts: []specs.Mount{{Destination: "/vol"}},
		}
		err := FollowLinks(s)
		if want == "" && !errors.Is(err, fault.Invalid) || want != "" && (err != nil || s.Process.Cwd != want) {
			t.Errorf("%s: %s, %v, want %q", cwd, s.Process.Cwd, err, want)
		}
	}
}
