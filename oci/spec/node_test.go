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
	"github.com/crius-run/crius/test/kit/claim"
	"github.com/crius-run/crius/test/kit/program"
)

// report is what the probe sees from inside the container.
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

// ociRuntime is a real runtime, with what is known of its abilities.
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

// mountHugeTLB mounts, on v1, the one controller that a hybrid node leaves in
// the v2 hierarchy; otherwise crun 1.8 refuses to start. It stays mounted.
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

// probeDir is the directory of the static test program, built once.
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

// cgroupTop is the cgroup that all tests of this process share.
var cgroupTop string

func TestMain(m *testing.M) {
	owned, err := claim.New()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	cgroupTop = "/" + owned.ID
	code := m.Run()
	if err := errors.Join(removeCgroupTop(), owned.Release()); err != nil {
		fmt.Fprintln(os.Stderr, "left over:", err)
		code = 1
	}
	if dir := probeDir.Load(); dir != nil {
		os.RemoveAll(*dir)
	}
	os.Exit(code)
}

// node is the environment of one container: the facts of the typical input made
// real.
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
	// Mapped users cannot enter t.TempDir's parent.
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
	if err := program.Write(to, data); err != nil {
		t.Fatal(err)
	}
}

// realize replaces the imaginary facts with real ones. The sources of requested
// mounts are made below the node's directory.
func (n node) realize(t *testing.T, in Input, rt ociRuntime) Input {
	t.Helper()
	in.Request.Container = proto.Clone(in.Request.Container).(*cri.ContainerConfig)
	in.Facts.Rootfs = n.rootfs
	in.Facts.Host = n.host
	in.Facts.Features, in.Facts.MountOptions = rt.features, rt.mountOptions
	in.Facts.CgroupsPath = fmt.Sprintf("%s/%s/c", cgroupTop, filepath.Base(filepath.Dir(n.dir)))
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
	if controllers := contents("/sys/fs/cgroup/cgroup.controllers"); n.host.CgroupV2 && !strings.Contains(controllers, "cpuset") {
		r := in.Request.Container.GetLinux().GetResources()
		if r != nil {
			r.CpusetCpus, r.CpusetMems = "", ""
		}
	}
	if in.privileged() {
		devices, err := HostDevices()
		if err != nil {
			t.Fatal(err)
		}
		in.Facts.HostDevices = devices
	}
	return in
}

// volume makes a volume's source: a file if the target is a file.
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

// realizeNamespaces makes the namespaces of the imaginary facts.
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

// newPIDNamespace starts a process alone in a new PID namespace, like an infra
// container or a target.
func newPIDNamespace(t *testing.T) string {
	t.Helper()
	cmd := exec.Command("cat") // ends with this process; a death signal would come at the end of the thread
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID}
	if _, err := cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	return fmt.Sprintf("/proc/%d/ns/pid", cmd.Process.Pid)
}

// run creates and starts a container, decodes its program's output into answer,
// calls while as it runs, and removes all traces of it.
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
	if err := stdout.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
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

// removeCgroup removes the container's cgroup, if the runtime left it, and the
// test's own above it.
func removeCgroup(t *testing.T, cgroup string) {
	t.Helper()
	for _, dir := range append(hierarchies(t, cgroup), hierarchies(t, filepath.Dir(cgroup))...) {
		if err := os.Remove(dir); err != nil && !errors.Is(err, unix.ENOENT) {
			t.Errorf("left over: %v", err)
		}
	}
}

// removeCgroupTop removes cgroupTop, which must have no cgroups left.
func removeCgroupTop() error {
	dirs, err := filepath.Glob("/sys/fs/cgroup/*" + cgroupTop)
	for _, dir := range append(dirs, "/sys/fs/cgroup"+cgroupTop) {
		if e := os.Remove(dir); !errors.Is(e, unix.ENOENT) {
			err = errors.Join(err, e)
		}
	}
	return err
}

// hierarchies returns the paths of a cgroup on a v1, hybrid or v2 node.
func hierarchies(t *testing.T, cgroup string) []string {
	t.Helper()
	const mount = "/sys/fs/cgroup"
	if onV2(t) {
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

func onV2(t *testing.T) bool {
	t.Helper()
	host, err := ResolveHost()
	if err != nil {
		t.Fatal(err)
	}
	return host.CgroupV2
}
