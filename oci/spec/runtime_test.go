package spec

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/opencontainers/runtime-spec/specs-go/features"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/ns"
)

// report is what the probe says of the container from within.
type report struct {
	Status     map[string]string
	Cwd        string
	Env, Args  []string
	Hostname   string
	OOM        string
	Namespaces map[string]string
	Mounts     []string
	Limits     string
	Dev        []string
	PIDs       int
	Errors     map[string]string
}

// runtimes are the real ones, with what is known of their abilities.
type ociRuntime struct {
	name, path   string
	features     *features.Features
	mountOptions []string
}

func runtimes(t *testing.T) []ociRuntime {
	t.Helper()
	runc := ociRuntime{name: "runc", path: lookPath(t, "runc"), features: &features.Features{}}
	out, err := exec.Command(runc.path, "features").Output()
	if err != nil {
		t.Fatalf("runc features: %v", err)
	}
	if err := json.Unmarshal(out, runc.features); err != nil {
		t.Fatal(err)
	}
	crun := ociRuntime{name: "crun", path: lookPath(t, "crun"), mountOptions: []string{"rro"}}
	mountHugeTLB(t)
	return []ociRuntime{runc, crun}
}

func lookPath(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		t.Fatalf("these tests need %s: %v", name, err)
	}
	return path
}

// mountHugeTLB gives the one controller that a hybrid node leaves in the v2
// hierarchy to v1; crun 1.8 refuses to start otherwise. It stays mounted.
func mountHugeTLB(t *testing.T) {
	t.Helper()
	const dir = "/sys/fs/cgroup/hugetlb"
	if _, err := os.Stat("/sys/fs/cgroup/unified"); err != nil {
		return
	}
	if _, err := os.Stat(dir + "/cgroup.procs"); err == nil {
		return
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("cgroup", dir, "cgroup", 0, "hugetlb"); err != nil && !errors.Is(err, unix.EBUSY) {
		t.Fatal(err)
	}
}

// probe is the static test program, built once, in probeDir.
var probeDir atomic.Pointer[string]

var probe = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "crius-spec-probe-")
	if err != nil {
		return "", err
	}
	probeDir.Store(&dir)
	path := filepath.Join(dir, "probe")
	cmd := exec.Command("go", "build", "-o", path, "./testdata/probe")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w\n%s", err, out)
	}
	return path, os.Chmod(dir, 0o755)
})

func probePath(t *testing.T) string {
	t.Helper()
	path, err := probe()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func TestMain(m *testing.M) {
	code := m.Run()
	if err := removeCgroupTop(); err != nil {
		fmt.Fprintln(os.Stderr, "left over:", err)
		code = 1
	}
	if dir := probeDir.Load(); dir != nil {
		os.RemoveAll(*dir)
	}
	os.Exit(code)
}

// node is a place for one container: the facts of the typical input made real.
type node struct {
	dir, rootfs string
	host        Host
}

func newNode(t *testing.T) node {
	t.Helper()
	host, err := ResolveHost()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	n := node{dir: dir, rootfs: filepath.Join(dir, "rootfs"), host: host}
	for _, sub := range []string{"rootfs/srv", "rootfs/tmp", "rootfs/etc", "rootfs/data", "shm"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for name, content := range map[string]string{
		"rootfs/etc/passwd": "root:x:0:0:root:/root:/bin/sh\n",
		"rootfs/etc/group":  "root:x:0:\n",
		"resolv.conf":       "nameserver 192.0.2.1\n",
		"hostname":          "web\n",
	} {
		writeFile(t, filepath.Join(dir, name), content)
	}
	for _, open := range []string{dir, n.rootfs, filepath.Join(n.rootfs, "tmp"), filepath.Join(dir, "shm")} {
		if err := os.Chmod(open, 0o777); err != nil {
			t.Fatal(err)
		}
	}
	// t.TempDir's parent is closed to mapped users.
	if err := os.Chmod(filepath.Dir(dir), 0o755); err != nil {
		t.Fatal(err)
	}
	copyProgram(t, probePath(t), filepath.Join(n.rootfs, "probe"))
	return n
}

func writeFile(t *testing.T, name, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

func copyProgram(t *testing.T, from, to string) {
	t.Helper()
	data, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(to, data, 0o755); err != nil {
		t.Fatal(err)
	}
}

// realize replaces the imaginary facts by real ones. What the request mounts is
// made below the node's directory.
func (n node) realize(t *testing.T, in Input, rt ociRuntime) Input {
	t.Helper()
	in.Request.Container = proto.Clone(in.Request.Container).(*cri.ContainerConfig)
	in.Facts.Rootfs = n.rootfs
	in.Facts.Host = n.host
	in.Facts.Features, in.Facts.MountOptions = rt.features, rt.mountOptions
	in.Facts.CgroupsPath = fmt.Sprintf("/crius-test-spec-%d/%s/c", os.Getpid(), filepath.Base(filepath.Dir(n.dir)))
	in.Facts.Files = Files{
		ResolvConf: filepath.Join(n.dir, "resolv.conf"),
		Hostname:   filepath.Join(n.dir, "hostname"),
		Shm:        filepath.Join(n.dir, "shm"),
	}
	for i, m := range in.Request.Container.Mounts {
		if m.HostPath != "" {
			m.HostPath = n.volume(t, m.HostPath, m.ContainerPath)
		}
		if i < len(in.Facts.MountSources) && in.Facts.MountSources[i] != "" {
			in.Facts.MountSources[i] = n.volume(t, in.Facts.MountSources[i], m.ContainerPath)
		}
	}
	n.realizeNamespaces(t, &in)
	if in.privileged() {
		devices, err := HostDevices()
		if err != nil {
			t.Fatal(err)
		}
		in.Facts.HostDevices = devices
	}
	return in
}

// volume makes a volume's source: a file where a file is to be mounted over.
func (n node) volume(t *testing.T, host, container string) string {
	t.Helper()
	path := filepath.Join(n.dir, "host", host)
	if container == "/etc/hosts" || container == "/dev/termination-log" {
		writeFile(t, path, "file\n")
		return path
	}
	if err := os.MkdirAll(filepath.Join(path, "sub"), 0o777); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{path, filepath.Join(path, "sub")} {
		if err := os.Chmod(dir, 0o777); err != nil {
			t.Fatal(err)
		}
	}
	copyProgram(t, probePath(t), filepath.Join(path, "probe"))
	return path
}

// realizeNamespaces makes those that the imaginary facts have.
func (n node) realizeNamespaces(t *testing.T, in *Input) {
	t.Helper()
	have := &in.Facts.Namespaces
	want := ns.Spec{
		Dir: n.dir, Name: "crius-test", Hostname: "web",
		Net: have.Net != "", IPC: have.IPC != "", UTS: have.UTS != "",
	}
	if have.User != "" {
		users := in.podSecurity().GetNamespaceOptions().GetUsernsOptions()
		want.UIDs, want.GIDs = nsMaps(users.GetUids()), nsMaps(users.GetGids())
	}
	if want.Net || want.IPC || want.UTS {
		set, err := ns.Create(want)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := ns.Remove(want); err != nil {
				t.Error(err)
			}
		})
		have.Net, have.IPC, have.UTS, have.User = set.Net, set.IPC, set.UTS, set.User
	}
	if have.PID != "" {
		have.PID = newPIDNamespace(t)
	}
}

func nsMaps(mappings []*cri.IDMapping) []ns.IDMap {
	var out []ns.IDMap
	for _, m := range mappings {
		out = append(out, ns.IDMap{Container: m.ContainerId, Host: m.HostId, Size: m.Length})
	}
	return out
}

// newPIDNamespace starts a process that is alone in one, as an infra container
// or a target would be.
func newPIDNamespace(t *testing.T) string {
	t.Helper()
	cmd := exec.Command(probePath(t), "pause")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID, Pdeathsig: unix.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	return fmt.Sprintf("/proc/%d/ns/pid", cmd.Process.Pid)
}

// run creates and starts a container, decodes what its program says into
// answer, calls while it runs, and removes it without a trace.
func (rt ociRuntime) run(t *testing.T, n node, s *specs.Spec, answer any, while func(pid int)) {
	t.Helper()
	bundle := filepath.Join(n.dir, "bundle")
	if err := os.MkdirAll(bundle, 0o755); err != nil {
		t.Fatal(err)
	}
	writeFile(t, filepath.Join(bundle, "config.json"), string(marshal(t, s)))
	state := filepath.Join(n.dir, "state")
	pidFile := filepath.Join(n.dir, "pid")
	const id = "crius-test"
	command := func(args ...string) *exec.Cmd {
		cmd := exec.Command(rt.path, append([]string{"--root", state}, args...)...)
		cmd.WaitDelay = 5 * time.Second
		return cmd
	}
	stdout, writer, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer stdout.Close()
	stderr, err := os.Create(filepath.Join(n.dir, "stderr"))
	if err != nil {
		t.Fatal(err)
	}
	defer stderr.Close()

	create := command("create", "--bundle", bundle, "--pid-file", pidFile, id)
	create.Stdout, create.Stderr = writer, stderr
	err = create.Run()
	writer.Close()
	t.Cleanup(func() { removeCgroup(t, s.Linux.CgroupsPath) })
	if err != nil {
		t.Fatalf("%s create: %v\n%s", rt.name, err, contents(stderr.Name()))
	}
	defer func() {
		if out, err := command("delete", "--force", id).CombinedOutput(); err != nil {
			t.Errorf("%s delete: %v\n%s", rt.name, err, out)
		}
	}()
	if out, err := command("start", id).CombinedOutput(); err != nil {
		t.Fatalf("%s start: %v\n%s", rt.name, err, out)
	}
	if err := stdout.SetReadDeadline(time.Now().Add(30 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if text, ok := answer.(*string); ok {
		all, err := io.ReadAll(stdout)
		if err != nil {
			t.Fatalf("%s: %v\n%s", rt.name, err, contents(stderr.Name()))
		}
		*text = string(all) + contents(stderr.Name())
	} else if err := json.NewDecoder(stdout).Decode(answer); err != nil {
		t.Fatalf("%s: no answer from the container: %v\n%s", rt.name, err, contents(stderr.Name()))
	}
	pid, err := strconv.Atoi(contents(pidFile))
	if err != nil {
		t.Fatal(err)
	}
	if while != nil {
		while(pid)
	}
}

func contents(name string) string {
	data, err := os.ReadFile(name)
	if err != nil {
		return err.Error()
	}
	return string(bytes.TrimSpace(data))
}

// removeCgroup removes the container's cgroup, where the runtime left it, and
// the test's own above it.
func removeCgroup(t *testing.T, cgroup string) {
	t.Helper()
	for _, dir := range append(hierarchies(t, cgroup), hierarchies(t, filepath.Dir(cgroup))...) {
		if err := os.Remove(dir); err != nil && !errors.Is(err, unix.ENOENT) {
			t.Errorf("left over: %v", err)
		}
	}
}

// removeCgroupTop removes the cgroup that all tests of this process share.
func removeCgroupTop() error {
	dirs, err := filepath.Glob(fmt.Sprintf("/sys/fs/cgroup/*/crius-test-spec-%d", os.Getpid()))
	for _, dir := range append(dirs, fmt.Sprintf("/sys/fs/cgroup/crius-test-spec-%d", os.Getpid())) {
		if e := os.Remove(dir); !errors.Is(e, unix.ENOENT) {
			err = errors.Join(err, e)
		}
	}
	return err
}

// hierarchies are the places of a cgroup on a v1, hybrid or v2 node.
func hierarchies(t *testing.T, cgroup string) []string {
	t.Helper()
	const mount = "/sys/fs/cgroup"
	if _, err := os.Stat(mount + "/cgroup.controllers"); err == nil {
		return []string{mount + cgroup}
	}
	entries, err := os.ReadDir(mount)
	if err != nil {
		t.Fatal(err)
	}
	var list []string
	for _, e := range entries {
		list = append(list, filepath.Join(mount, e.Name(), cgroup))
	}
	return list
}

// TestRuntimes lets the real runtimes make the animals of the zoo and compares
// what the kernel gave them with what their specs say.
func TestRuntimes(t *testing.T) {
	elsewhere := []string{
		"cgroup-v2",      // this test's nodes are v1, hybrid or v2 as they are
		"infra-vm",       // has nothing to join here
		"terminal",       // wants a console socket: the monitor's tests
		"user-namespace", // TestUserNamespace
	}
	for _, rt := range runtimes(t) {
		for _, a := range zoo() {
			if slices.Contains(elsewhere, a.name) {
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
					checkCgroup(t, s)
					checkNamespaces(t, s, r)
				})
				checkProcess(t, s, r)
				checkMounts(t, s, r)
				checkAttempts(t, a.name, rt, r)
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
	if p.User.UID != 0 { // the kernel takes them when the program runs
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
		if want := fmt.Sprintf("%d %d", l.Soft, l.Hard); !strings.Contains(strings.Join(strings.Fields(r.Limits), " "), want) {
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
			continue // on v1 a tmpfs of the runtime's, see checkAttempts
		}
		readonly := slices.Contains(m.Options, "ro") || slices.Contains(m.Options, "rro")
		if readonly != slices.Contains(have, "ro") {
			t.Errorf("%s: %s, asked for %v", m.Destination, options, m.Options)
		}
		// crun makes everything shared if the root is to be.
		wide := s.Linux.RootfsPropagation == "rshared"
		if shared := slices.Contains(m.Options, "rshared"); shared != strings.Contains(tags, "shared:") && (shared || !wide) {
			t.Errorf("%s: propagation %q, asked for %v", m.Destination, tags, m.Options)
		}
	}
}

// checkCgroup reads the limits back, as v1 or v2 has them.
func checkCgroup(t *testing.T, s *specs.Spec) {
	t.Helper()
	read := func(controller, file string) string {
		if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err == nil {
			controller = ""
		}
		return contents(filepath.Join("/sys/fs/cgroup", controller, s.Linux.CgroupsPath, file))
	}
	expect := func(controller, file, want string) {
		if got := read(controller, file); got != want {
			t.Errorf("%s is %s, want %s", file, got, want)
		}
	}
	r := s.Linux.Resources
	if m := r.Memory; m != nil {
		expect("memory", "memory.limit_in_bytes", fmt.Sprint(*m.Limit))
		expect("memory", "memory.memsw.limit_in_bytes", fmt.Sprint(*m.Swap))
	}
	if c := r.CPU; c != nil && c.Quota != nil {
		expect("cpu", "cpu.cfs_quota_us", fmt.Sprint(*c.Quota))
		expect("cpu", "cpu.cfs_period_us", fmt.Sprint(*c.Period))
	}
	if c := r.CPU; c != nil && c.Shares != nil {
		expect("cpu", "cpu.shares", fmt.Sprint(*c.Shares))
	}
	pids := "max"
	if r.Pids != nil {
		pids = fmt.Sprint(*r.Pids.Limit)
	}
	expect("pids", "pids.max", pids)
	everything := strings.Contains(read("devices", "devices.list"), "a *:* rwm")
	if everything != (len(r.Devices) == 1 && r.Devices[0].Allow) {
		t.Errorf("devices.list:\n%s", read("devices", "devices.list"))
	}
}

// checkAttempts compares what the program could do with what such a container
// may do.
func checkAttempts(t *testing.T, animal string, rt ociRuntime, r report) {
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
		"open /dev/loop-control": "no such file",
		"make a cgroup":          readOnly,
		"write /etc/resolv.conf": "ok",
	}
	if _, err := os.Stat("/proc/kcore"); err != nil {
		want["read kcore"] = ""
	}
	switch animal {
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
		for _, attempt := range []string{"read timer_list", "list /sys/firmware", "open /dev/loop-control", "open own node of kmsg"} {
			want[attempt] = "ok"
		}
		want["read kcore"] = "" // the test machine may lack what it takes
		want["make a cgroup"] = ""
	case "unmasked":
		want["write domainname"] = ""
		want["read timer_list"], want["list /sys/firmware"], want["read kcore"] = "ok", "ok", ""
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

// TestUserNamespace: the pod's user namespace is joined, with the others in it,
// and root in the container is nobody on the node.
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
			var r report
			rt.run(t, n, s, &r, func(pid int) {
				checkNamespaces(t, s, r)
				if status := contents(fmt.Sprintf("/proc/%d/status", pid)); !strings.Contains(status, "Uid:\t100000\t100000\t") {
					t.Errorf("the node sees:\n%s", status)
				}
			})
			checkProcess(t, s, r)
			if rt.name != "crun" { // 1.8 forgets the flags of some mounts in a user namespace
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

// TestCVE_2022_2995: a process in a group cannot shed it to read what the group
// is denied, for the primary group is among the supplementary ones.
func TestCVE_2022_2995(t *testing.T) {
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

// TestSeccompCalls lets the kernel say which calls the default profile lets
// through. Without it all of them get to the kernel, which answers differently:
// that shows that the test can tell.
func TestSeccompCalls(t *testing.T) {
	unconfined := map[string]string{
		"mount": "EFAULT", "unshare user": "EINVAL", "setns": "EBADF", "keyctl": "EOPNOTSUPP",
		"add_key": "EFAULT", "request_key": "EFAULT", "ptrace": "ESRCH", "process_vm_readv": "ok",
		"io_uring_setup": "EFAULT", "clone user": "EINVAL", "clone3": "EINVAL", "personality odd": "ok",
		"perf_event_open": "EFAULT", "chroot": "EFAULT", "quotactl": "EFAULT", "userfaultfd": "EINVAL",
		"socket alg": "EAFNOSUPPORT", "socket vsock": "ok",
	}
	confined := map[string]string{
		"mount": "EPERM", "unshare user": "EPERM", "setns": "EPERM", "keyctl": "EPERM",
		"add_key": "EPERM", "request_key": "EPERM", "io_uring_setup": "EPERM", "perf_event_open": "EPERM",
		"chroot": "EPERM", "quotactl": "EPERM", "userfaultfd": "EPERM",
		"clone user": "ENOSYS", "clone3": "ENOSYS", "personality odd": "ENOSYS", "listns": "ENOSYS",
		"socket alg": "ENOSYS", "socket alg high bits": "ENOSYS", "socket vsock": "ENOSYS",
		"ptrace": "ESRCH", "process_vm_readv": "ok", "personality which": "ok", "memfd_create": "EFAULT",
		"socket inet": "ok", "socket unix": "ok", "socket netlink": "ok", "socket qipcrtr": "EAFNOSUPPORT",
		"getpid": "ok",
	}
	withAdmin := map[string]string{
		"mount": "EFAULT", "unshare user": "EINVAL", "setns": "EBADF", "clone user": "EINVAL", "clone3": "EINVAL",
		"quotactl": "EFAULT", "perf_event_open": "EFAULT", "chroot": "EPERM", "keyctl": "EPERM",
		"socket alg": "ENOSYS", "io_uring_setup": "EPERM",
	}
	all := []struct {
		name    string
		profile *cri.SecurityProfile
		add     []string
		want    map[string]string
	}{
		{"unconfined", &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Unconfined}, nil, unconfined},
		{"default", &cri.SecurityProfile{}, nil, confined},
		{"admin", &cri.SecurityProfile{}, []string{"SYS_ADMIN"}, withAdmin},
		{"all capabilities", &cri.SecurityProfile{}, []string{"ALL"}, map[string]string{
			"mount": "EFAULT", "chroot": "EFAULT", "keyctl": "EPERM", "socket alg": "ENOSYS", "socket inet": "ok",
		}},
	}
	for _, rt := range runtimes(t) {
		for _, c := range all {
			t.Run(rt.name+"/"+c.name, func(t *testing.T) {
				t.Parallel()
				n := newNode(t)
				in := n.realize(t, typical(), rt)
				in.Request.Container.Args = []string{"calls"}
				sc := in.Request.Container.Linux.SecurityContext
				sc.Seccomp = c.profile
				sc.Capabilities = &cri.Capability{AddCapabilities: c.add}
				s, err := Container(in)
				if err != nil {
					t.Fatal(err)
				}
				got := map[string]string{}
				rt.run(t, n, s, &got, nil)
				for call, want := range c.want {
					if got[call] != want {
						t.Errorf("%s: %s, want %s", call, got[call], want)
					}
				}
			})
		}
	}
}

// TestSeccompOrdinaryPrograms: a shell, its tools and an interpreter do their
// everyday work under the default profile, as a user without capabilities.
func TestSeccompOrdinaryPrograms(t *testing.T) {
	const script = `set -e
cd /tmp
mkdir -p a/b; echo hello > a/b/c; ln -s b a/l; chmod 600 a/b/c; touch -d 2001-01-01 a/b/c
seq 1 2000 | sort -rn | head -n 3 | tr '\n' ' '
find a -type l | xargs readlink
tar cf - a | gzip -c | gunzip -c | tar tf - | wc -l
(sleep 0.05; exit 3) & wait $! || echo "exit $?"
mkfifo f; (echo through > f &); cat f
trap 'echo trapped' USR1; kill -USR1 $$
nice -n 5 id -u
timeout 0.05 sleep 5 || echo "timed out $?"
stat -c %a a/b/c; df -P / > /dev/null; ps_pid=$$; test -d /proc/$ps_pid
perl -e 'use Socket; socketpair(my $a, my $b, AF_UNIX, SOCK_STREAM, 0) or die; if (!fork) { syswrite $b, "pair"; exit } sysread $a, my $x, 4; wait; print "$x\n"'
perl -e 'use IO::Socket::INET; my $l = IO::Socket::INET->new(Listen => 1, LocalAddr => "127.0.0.1") or die $@; if (!fork) { my $c = IO::Socket::INET->new(PeerAddr => "127.0.0.1", PeerPort => $l->sockport) or die; print $c "tcp\n"; exit } my $c = $l->accept; print scalar <$c>; wait'
echo done
`
	const want = `2000 1999 1998 b
4
exit 3
through
trapped
1000
timed out 124
600
pair
tcp
done
`
	programs := []string{
		"sh", "mkdir", "ln", "chmod", "touch", "seq", "sort", "head", "tr", "find", "xargs", "readlink", "tar", "gzip",
		"gunzip", "wc", "sleep", "mkfifo", "cat", "nice", "id", "timeout", "stat", "df", "perl",
	}
	for _, rt := range runtimes(t) {
		t.Run(rt.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			for _, name := range programs {
				installProgram(t, n.rootfs, name)
			}
			installTree(t, n.rootfs, "perl-base")
			in := n.realize(t, typical(), rt)
			restricted(&in)
			in.Request.Container.Linux.SecurityContext.ReadonlyRootfs = false
			in.Request.Image.Env = nil
			in.Request.Container.Command = []string{"sh", "-c", script}
			s, err := Container(in)
			if err != nil {
				t.Fatal(err)
			}
			if s.Linux.Seccomp == nil {
				t.Fatal("no profile")
			}
			var got string
			rt.run(t, n, s, &got, nil)
			if got != want {
				t.Errorf("got:\n%s", got)
			}
		})
	}
}

// installProgram copies a program of the machine and the libraries it names.
func installProgram(t *testing.T, rootfs, name string) {
	t.Helper()
	path := lookPath(t, name)
	copyProgram(t, path, filepath.Join(rootfs, "bin", name))
	out, err := exec.Command("ldd", path).Output()
	if err != nil {
		return // a script
	}
	for field := range strings.FieldsSeq(string(out)) {
		if strings.HasPrefix(field, "/") {
			copyProgram(t, field, filepath.Join(rootfs, field))
		}
	}
}

// installTree copies the regular files of a Debian package's libraries.
func installTree(t *testing.T, rootfs, pkg string) {
	t.Helper()
	out, err := exec.Command("dpkg", "-L", pkg).Output()
	if err != nil {
		t.Fatal(err)
	}
	for name := range strings.FieldsSeq(string(out)) {
		if info, err := os.Lstat(name); err == nil && info.Mode().IsRegular() && strings.Contains(name, "/lib/") {
			copyProgram(t, name, filepath.Join(rootfs, name))
		}
	}
}
