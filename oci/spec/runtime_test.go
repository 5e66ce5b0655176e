package spec

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// TestRuntimes has the real runtimes create the containers of the golden specs,
// and compares what the kernel gave them with their specs.
func TestRuntimes(t *testing.T) {
	elsewhere := []string{
		"infra-vm",       // has nothing to join here
		"terminal",       // needs a console socket: covered by the monitor's tests
		"user-namespace", // TestUserNamespace
	}
	for _, rt := range runtimes(t) {
		for _, a := range goldenSpecs() {
			if slices.Contains(elsewhere, a.name) || a.name == "cgroup-v2" && !onV2(t) {
				continue
			}
			t.Run(rt.name+"/"+a.name, func(t *testing.T) {
				t.Parallel()
				n := newNode(t)
				in := n.realize(t, a.input(), rt)
				s, err := a.spec(in)
				if err != nil {
					t.Fatal(err)
				}
				if a.infra {
					s.Process.Args = []string{"/probe", "report"}
				}
				var r report
				rt.run(t, n, s, &r, func(pid int) {
					checkCgroup(t, s, n.host.CgroupV2)
					checkNamespaces(t, s, r)
				})
				checkProcess(t, s, r)
				checkMounts(t, s, r)
				checkAttempts(t, a.name, r)
			})
		}
	}
}

func checkProcess(t *testing.T, s *specs.Spec, r report) {
	t.Helper()
	p := s.Process
	status := map[string]string{
		"Uid":        strings.TrimSuffix(strings.Repeat(fmt.Sprint(p.User.UID)+"\t", 4), "\t"),
		"Gid":        strings.TrimSuffix(strings.Repeat(fmt.Sprint(p.User.GID)+"\t", 4), "\t"),
		"Groups":     strings.Trim(fmt.Sprint(p.User.AdditionalGids), "[]"),
		"NoNewPrivs": map[bool]string{false: "0", true: "1"}[p.NoNewPrivileges],
		"Seccomp":    map[bool]string{false: "0", true: "2"}[s.Linux.Seccomp != nil],
		"CapBnd":     capHex(t, p.Capabilities.Bounding),
		"CapInh":     capHex(t, p.Capabilities.Inheritable), // CVE-2022-24769, CVE-2022-27652
		"CapAmb":     capHex(t, p.Capabilities.Ambient),     // CVE-2018-1000400
		"CapPrm":     capHex(t, p.Capabilities.Permitted),
		"CapEff":     capHex(t, p.Capabilities.Effective),
	}
	if p.User.UID != 0 { // the kernel takes them when the program is executed
		status["CapPrm"], status["CapEff"] = status["CapAmb"], status["CapAmb"]
	}
	for field, want := range status {
		if got := r.Status[field]; got != want {
			t.Errorf("%s is %q, want %q", field, got, want)
		}
	}
	if r.Cwd != p.Cwd {
		t.Errorf("working directory %q, want %q", r.Cwd, p.Cwd)
	}
	if want := slices.Sorted(slices.Values(p.Env)); !slices.Equal(slices.Sorted(slices.Values(r.Env)), want) {
		t.Errorf("environment %q, want %q", r.Env, want)
	}
	if !slices.Equal(r.Args, p.Args) {
		t.Errorf("arguments %q, want %q", r.Args, p.Args)
	}
	if r.OOM != fmt.Sprint(*p.OOMScoreAdj) {
		t.Errorf("oom_score_adj %s, want %d", r.OOM, *p.OOMScoreAdj)
	}
	for _, l := range p.Rlimits {
		want := fmt.Sprintf("%d %d", l.Soft, l.Hard)
		if l.Type == "RLIMIT_NOFILE" {
			want = fmt.Sprint(" ", l.Hard, " files") // programs in Go raise their soft limit
		}
		if !strings.Contains(strings.Join(strings.Fields(r.Limits), " "), want) {
			t.Errorf("no limit %s in %s", want, r.Limits)
		}
	}
}

func capHex(t *testing.T, names []string) string {
	t.Helper()
	set, err := ParseCapabilities(names)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%016x", uint64(set))
}

func checkNamespaces(t *testing.T, s *specs.Spec, r report) {
	t.Helper()
	short := map[specs.LinuxNamespaceType]string{
		"pid": "pid", "network": "net", "ipc": "ipc", "uts": "uts", "mount": "mnt", "cgroup": "cgroup", "user": "user",
	}
	paths := namespacePaths(s)
	for kind, name := range short {
		got := r.Namespaces[name]
		host, err := os.Readlink("/proc/self/ns/" + name)
		if err != nil {
			t.Fatal(err)
		}
		path, listed := paths[kind]
		switch {
		case !listed && got != host:
			t.Errorf("%s namespace is not the node's", kind)
		case listed && got == host:
			t.Errorf("%s namespace is the node's", kind)
		case path != "":
			if want := inode(t, path); !strings.Contains(got, want) {
				t.Errorf("%s namespace is %s, want %s of %s", kind, got, want, path)
			}
		}
	}
	if _, own := paths[specs.UTSNamespace]; own && r.Hostname != "web" {
		t.Errorf("hostname %q", r.Hostname)
	}
	if path, own := paths[specs.PIDNamespace]; own && path == "" && r.PIDs != 1 {
		t.Errorf("%d processes in a PID namespace of its own", r.PIDs)
	}
}

func inode(t *testing.T, path string) string {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprint(info.Sys().(*syscall.Stat_t).Ino)
}

// checkMounts looks for every mount of the spec, with its flags.
func checkMounts(t *testing.T, s *specs.Spec, r report) {
	t.Helper()
	for _, m := range s.Mounts {
		var options, tags string
		for _, line := range r.Mounts {
			if f := strings.Fields(line); f[4] == m.Destination {
				options, tags = f[5], strings.Join(f[6:slices.Index(f, "-")], " ")
			}
		}
		if options == "" {
			t.Errorf("nothing is mounted at %s", m.Destination)
			continue
		}
		have := strings.Split(options, ",")
		for _, flag := range []string{"nosuid", "noexec", "nodev"} {
			if slices.Contains(m.Options, flag) != slices.Contains(have, flag) {
				t.Errorf("%s: %s, asked for %v", m.Destination, options, m.Options)
			}
		}
		if m.Type == "cgroup" {
			continue // on v1 a tmpfs of the runtime, see checkAttempts
		}
		readonly := slices.Contains(m.Options, "ro") || slices.Contains(m.Options, "rro")
		if readonly != slices.Contains(have, "ro") {
			t.Errorf("%s: %s, asked for %v", m.Destination, options, m.Options)
		}
		// crun makes every mount shared if the root must be.
		wide := s.Linux.RootfsPropagation == "rshared"
		if shared := slices.Contains(m.Options, "rshared"); shared != strings.Contains(tags, "shared:") && (shared || !wide) {
			t.Errorf("%s: propagation %q, asked for %v", m.Destination, tags, m.Options)
		}
	}
}

// checkCgroup reads the limits back, from v1 or v2 files.
func checkCgroup(t *testing.T, s *specs.Spec, v2 bool) {
	t.Helper()
	read := func(controller, file string) string {
		if v2 {
			controller = ""
		}
		return contents(filepath.Join("/sys/fs/cgroup", controller, s.Linux.CgroupsPath, file))
	}
	r := s.Linux.Resources
	want := map[[2]string]string{{"pids", "pids.max"}: "max"}
	if r.Pids != nil {
		want[[2]string{"pids", "pids.max"}] = fmt.Sprint(*r.Pids.Limit)
	}
	if m := r.Memory; m != nil && v2 {
		want[[2]string{"memory", "memory.max"}] = fmt.Sprint(*m.Limit)
		if m.Swap != nil {
			want[[2]string{"memory", "memory.swap.max"}] = fmt.Sprint(*m.Swap - *m.Limit)
		}
	} else if m != nil {
		want[[2]string{"memory", "memory.limit_in_bytes"}] = fmt.Sprint(*m.Limit)
		want[[2]string{"memory", "memory.memsw.limit_in_bytes"}] = fmt.Sprint(*m.Swap)
	}
	if c := r.CPU; c != nil && c.Quota != nil && v2 {
		want[[2]string{"cpu", "cpu.max"}] = fmt.Sprint(*c.Quota, *c.Period)
	} else if c != nil && c.Quota != nil {
		want[[2]string{"cpu", "cpu.cfs_quota_us"}] = fmt.Sprint(*c.Quota)
		want[[2]string{"cpu", "cpu.cfs_period_us"}] = fmt.Sprint(*c.Period)
		want[[2]string{"cpu", "cpu.shares"}] = fmt.Sprint(*c.Shares)
	}
	for file, value := range r.Unified {
		want[[2]string{"", file}] = value
	}
	for file, value := range want {
		if got := read(file[0], file[1]); got != value {
			t.Errorf("%s is %s, want %s", file[1], got, value)
		}
	}
	if v2 {
		return // a BPF program in the kernel, see checkAttempts
	}
	everything := strings.Contains(read("devices", "devices.list"), "a *:* rwm")
	if everything != (len(r.Devices) == 1 && r.Devices[0].Allow) {
		t.Errorf("devices.list:\n%s", read("devices", "devices.list"))
	}
}

// checkAttempts compares what the program could do with what such a container
// may do.
func checkAttempts(t *testing.T, goldenSpec string, r report) {
	t.Helper()
	const readOnly, denied, notPermitted = "read-only file system", "permission denied", "operation not permitted"
	want := map[string]string{
		"open /dev/null":         "ok",
		"write /new":             "ok",
		"write domainname":       readOnly,
		"read kcore":             "empty",
		"read timer_list":        "empty",
		"list /sys/firmware":     "empty",
		"open own node of kmsg":  notPermitted, // no CAP_MKNOD by default
		"open /dev/kmsg":         "no such file",
		"make a cgroup":          readOnly,
		"write /etc/resolv.conf": "ok",
	}
	if _, err := os.Stat("/proc/kcore"); err != nil {
		want["read kcore"] = ""
	}
	firmware := "ok"
	if entries, err := os.ReadDir("/sys/firmware"); err == nil && len(entries) == 0 {
		firmware = "empty"
	}
	switch goldenSpec {
	case "kubelet-user":
		want["write /new"], want["write /data/new"] = "ok", "ok"
		want["write /etc/resolv.conf"] = denied
		want["make a cgroup"] = ""
	case "ambient":
		want["write /etc/resolv.conf"] = denied
		want["make a cgroup"] = ""
	case "restricted":
		want["write /new"], want["write /tmp/new"], want["write /etc/resolv.conf"] = readOnly, readOnly, ""
		want["open own node of kmsg"], want["make a cgroup"] = "", ""
	case "infra":
		want["write /new"], want["write /etc/resolv.conf"] = readOnly, readOnly
		want["open own node of kmsg"] = ""
	case "node-defaults":
		want["write /new"], want["write /etc/resolv.conf"] = readOnly, readOnly
		want["open own node of kmsg"] = ""
	case "privileged":
		want["write domainname"] = ""
		for _, attempt := range []string{"read timer_list", "open /dev/kmsg", "open own node of kmsg"} {
			want[attempt] = "ok"
		}
		want["list /sys/firmware"] = firmware
		want["read kcore"] = "" // the test machine may lack the prerequisites
		want["make a cgroup"] = ""
	case "unmasked":
		want["write domainname"] = ""
		want["read timer_list"], want["list /sys/firmware"], want["read kcore"] = "ok", firmware, ""
	case "volumes":
		want["write /data/new"] = "ok"
		want["write /frozen/sub/new"] = readOnly
		want["run from noexec"] = denied
	}
	for attempt, text := range want {
		if got := r.Errors[attempt]; !strings.Contains(got, text) {
			t.Errorf("%s: %s, want %s", attempt, got, text)
		}
	}
}

// TestUserNamespace: the container joins the pod's user namespace and the
// others in it, and its root is not root on the node.
func TestUserNamespace(t *testing.T) {
	for _, rt := range runtimes(t) {
		t.Run(rt.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			in := typical()
			userNamespacePod(&in)
			in.Request.Container.Mounts = nil // neither runtime has id-mapped mounts
			in = n.realize(t, in, rt)
			chown(t, n.dir, 100000)
			s, err := Container(in)
			if err != nil {
				t.Fatal(err)
			}
			if rt.name == "runc" { // before 1.2 runc needs the mappings too; crius gives such a runc no user namespaces
				users := in.podSecurity().GetNamespaceOptions().GetUsernsOptions()
				s.Linux.UIDMappings, s.Linux.GIDMappings = idMappings(users.GetUids()), idMappings(users.GetGids())
			}
			var r report
			rt.run(t, n, s, &r, func(pid int) {
				checkNamespaces(t, s, r)
				if status := contents(fmt.Sprintf("/proc/%d/status", pid)); !strings.Contains(status, "Uid:\t100000\t100000\t") {
					t.Errorf("the node sees:\n%s", status)
				}
			})
			checkProcess(t, s, r)
			if rt.name != "crun" { // crun 1.8 forgets the flags of some mounts in a user namespace
				checkMounts(t, s, r)
			}
			if r.Errors["write /new"] != "ok" || !strings.Contains(r.Errors["write sysrq"], "no such file") {
				t.Errorf("attempts: %v", r.Errors)
			}
		})
	}
}

// chown gives a tree to a mapped root.
func chown(t *testing.T, dir string, id int) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || strings.Contains(path, "/netns/") || strings.Contains(path, "/ipcns/") || strings.Contains(path, "/utsns/") || strings.Contains(path, "/userns/") {
			return err
		}
		return os.Lchown(path, id, id)
	})
	if err != nil {
		t.Fatal(err)
	}
}

// A process cannot drop a group to read what is denied to that group: the
// primary group is among the supplementary ones.
func TestPrimaryGroupIsSupplementary_CVE_2022_2995_CVE_2023_25173(t *testing.T) {
	for _, rt := range runtimes(t) {
		t.Run(rt.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			denied := filepath.Join(n.rootfs, "group-2000")
			writeFile(t, denied, "secret secret secret")
			if err := errors.Join(os.Chown(denied, 0, 2000), os.Chmod(denied, 0o604)); err != nil {
				t.Fatal(err)
			}
			in := n.realize(t, typical(), rt)
			sc := in.Request.Container.Linux.SecurityContext
			sc.RunAsUser = &cri.Int64Value{Value: 1000}
			sc.RunAsGroup = &cri.Int64Value{Value: 2000}
			user, err := ResolveUser(n.rootfs, sc, "")
			if err != nil {
				t.Fatal(err)
			}
			in.Facts.User = user
			s, err := Container(in)
			if err != nil {
				t.Fatal(err)
			}
			var r report
			rt.run(t, n, s, &r, nil)
			if r.Status["Groups"] != "2000" {
				t.Errorf("groups %q", r.Status["Groups"])
			}
			if !strings.Contains(r.Errors["read group file"], "permission denied") {
				t.Errorf("a file that denies group 2000: %s", r.Errors["read group file"])
			}
		})
	}
}
