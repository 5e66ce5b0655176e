package ns

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/mount"
	"github.com/crius-run/crius/internal/thread"
)

const crashDir = "NS_TEST_CRASH_DIR"

func TestMain(m *testing.M) {
	if dir := os.Getenv(crashDir); dir != "" {
		createForever(crashSpec(dir))
	}
	os.Exit(m.Run())
}

// spec asks for everything, in a directory below which nothing may be left.
func spec(t testing.TB) Spec {
	t.Helper()
	dir := t.TempDir()
	t.Cleanup(func() {
		for _, left := range remains(t, dir) {
			t.Errorf("left behind: %s", left)
			unix.Unmount(left, unix.MNT_DETACH)
		}
	})
	return Spec{Dir: dir, Name: "crius-" + strings.Repeat("5a", 32), Net: true, IPC: true, UTS: true, Hostname: "pod-1"}
}

// remains are the mounts and files below dir.
func remains(t testing.TB, dir string) []string {
	t.Helper()
	left, err := mount.Under(dir)
	if err != nil {
		t.Fatal(err)
	}
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			left = append(left, path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return left
}

func create(t testing.TB, s Spec) Set {
	t.Helper()
	set, err := Create(s)
	if err != nil {
		t.Fatal(err)
	}
	return set
}

func remove(t testing.TB, s Spec) {
	t.Helper()
	if err := Remove(s); err != nil {
		t.Fatal(err)
	}
}

// inside runs f on a thread in all namespaces of set but the user namespace.
func inside(t testing.TB, set Set, f func() error) {
	t.Helper()
	err := thread.Run(func() error {
		for path, flag := range map[string]int{set.Net: unix.CLONE_NEWNET, set.IPC: unix.CLONE_NEWIPC, set.UTS: unix.CLONE_NEWUTS} {
			if path == "" {
				continue
			}
			if err := setns(path, flag); err != nil {
				return err
			}
		}
		return f()
	})
	if err != nil {
		t.Error(err)
	}
}

func sysctl(path string) string {
	value, err := os.ReadFile("/proc/sys/" + path)
	if err != nil {
		return err.Error()
	}
	return strings.Join(strings.Fields(string(value)), " ")
}

func TestCreateRemove(t *testing.T) {
	t.Parallel()
	s := spec(t)
	set := create(t, s)
	want := Set{
		Net: filepath.Join(s.Dir, "netns", s.Name),
		IPC: filepath.Join(s.Dir, "ipcns", s.Name),
		UTS: filepath.Join(s.Dir, "utsns", s.Name),
	}
	if set != want {
		t.Fatalf("set %+v, want %+v", set, want)
	}
	for proc, path := range map[string]string{"net": set.Net, "ipc": set.IPC, "uts": set.UTS} {
		made, err1 := Inode(path)
		host, err2 := Inode("/proc/self/ns/" + proc)
		if err1 != nil || err2 != nil || made == 0 || made == host {
			t.Errorf("%s: inode %d, %v; the host's %d, %v", proc, made, err1, host, err2)
		}
	}
	for dir, perm := range map[string]os.FileMode{"netns": 0o755, "ipcns": 0o700, "utsns": 0o700} {
		if info, err := os.Stat(filepath.Join(s.Dir, dir)); err != nil || info.Mode().Perm() != perm {
			t.Errorf("%s: %v, %v; want %o", dir, info.Mode(), err, perm)
		}
	}

	if _, err := Create(s); !errors.Is(err, fault.Exists) {
		t.Errorf("second Create: %v, want fault.Exists", err)
	}
	if _, err := Inode(set.Net); err != nil {
		t.Errorf("the failed second Create took the first one's pin: %v", err)
	}

	inside(t, set, func() error {
		name, err := os.Hostname()
		if err != nil || name != "pod-1" {
			t.Errorf("host name %q, %v", name, err)
		}
		return nil
	})
	for range 2 {
		remove(t, s)
	}
	for _, path := range []string{set.Net, set.IPC, set.UTS} {
		if _, err := Inode(path); !errors.Is(err, fault.NotFound) {
			t.Errorf("Inode(%s) after Remove: %v", path, err)
		}
	}
}

func TestOnlyWhatIsAsked(t *testing.T) {
	t.Parallel()
	for _, one := range []Spec{{Net: true}, {IPC: true}, {UTS: true}, {Net: true, UTS: true}} {
		s := spec(t)
		s.Net, s.IPC, s.UTS, s.Hostname = one.Net, one.IPC, one.UTS, ""
		set := create(t, s)
		if (set.Net != "") != s.Net || (set.IPC != "") != s.IPC || (set.UTS != "") != s.UTS || set.User != "" {
			t.Errorf("asked %+v, got %+v", one, set)
		}
		remove(t, Spec{Dir: s.Dir, Name: s.Name}) // the flags may be unknown
	}
}

// The addresses of lo are the kernel's: 127.0.0.1 and, with IPv6, ::1.
func TestLoopbackIsUp(t *testing.T) {
	t.Parallel()
	s := spec(t)
	set := create(t, s)
	defer remove(t, s)
	err := Do(set.Net, func() error {
		interfaces, err := net.Interfaces()
		if err != nil || len(interfaces) != 1 || interfaces[0].Flags&net.FlagUp == 0 {
			t.Errorf("interfaces %+v, %v", interfaces, err)
		}
		for _, address := range []string{"127.0.0.1:0", "[::1]:0"} {
			listener, err := net.Listen("tcp", address)
			if err != nil {
				return err
			}
			conn, err := net.DialTimeout("tcp", listener.Addr().String(), 5*time.Second)
			if err != nil {
				return err
			}
			conn.Close()
			listener.Close()
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

func TestSysctls(t *testing.T) {
	t.Parallel()
	s := spec(t)
	s.Sysctls = map[string]string{
		"net.ipv4.ip_unprivileged_port_start": "0",
		"net.ipv4.ping_group_range":           "0\t2147483647", // cri-o#8174: a pod-wide default
		"net/ipv4/conf/all/forwarding":        "1",
		"net.ipv4.conf.lo.rp_filter":          "2",
		"kernel.shm_rmid_forced":              "1",
		"kernel.sem":                          "250 32000 100 128",
		"kernel.msgmax":                       "65536",
		"fs.mqueue.msg_max":                   "20",
		"kernel.domainname":                   "cluster.local",
	}
	probe := []string{"net/ipv4/ip_unprivileged_port_start", "net/ipv4/ping_group_range", "net/ipv4/conf/all/forwarding",
		"net/ipv4/conf/lo/rp_filter", "kernel/shm_rmid_forced", "kernel/sem", "kernel/msgmax", "fs/mqueue/msg_max", "kernel/domainname"}
	want := []string{"0", "0 2147483647", "1", "2", "1", "250 32000 100 128", "65536", "20", "cluster.local"}
	before := make([]string, len(probe))
	for i, path := range probe {
		before[i] = sysctl(path)
	}
	set := create(t, s)
	defer remove(t, s)
	inside(t, set, func() error {
		for i, path := range probe {
			if got := sysctl(path); got != want[i] {
				t.Errorf("%s = %q in the pod, want %q", path, got, want[i])
			}
		}
		return nil
	})
	for i, path := range probe {
		if got := sysctl(path); got != before[i] {
			t.Errorf("%s on the host went from %q to %q", path, before[i], got)
		}
	}
}

func TestInterfaceSysctls(t *testing.T) {
	t.Parallel()
	s := spec(t)
	s.Sysctls = map[string]string{"net.ipv4.conf.eth0.rp_filter": "2", "net.ipv4.conf.eth0/5.log_martians": "1"}
	set := create(t, s) // although there is no eth0 yet
	defer remove(t, s)
	if err := SetInterfaceSysctls(s); !errors.Is(err, fault.Invalid) {
		t.Errorf("without the interface: %v, want fault.Invalid", err)
	}
	err := Do(set.Net, func() error {
		for _, args := range []string{"link add eth0 type veth peer name peer0", "link add eth0.5 type veth peer name peer5"} {
			if out, err := exec.Command("ip", strings.Fields(args)...).CombinedOutput(); err != nil {
				return fmt.Errorf("ip %s: %w: %s", args, err, out)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := SetInterfaceSysctls(s); err != nil {
		t.Fatal(err)
	}
	inside(t, set, func() error {
		if a, b := sysctl("net/ipv4/conf/eth0/rp_filter"), sysctl("net/ipv4/conf/eth0.5/log_martians"); a != "2" || b != "1" {
			t.Errorf("rp_filter %q, log_martians %q", a, b)
		}
		return nil
	})
}

// CVE-2022-0532: sysctls of a pod in the host's namespaces, and such as are
// never namespaced, must not reach the host. CVE-2022-0811: a value is one
// value. Nothing is made when a sysctl is refused, by us or by the kernel.
func TestSysctlsRefused(t *testing.T) {
	t.Parallel()
	all := Spec{Net: true, IPC: true, UTS: true}
	for _, c := range []struct {
		name, value string
		in          Spec
	}{
		{"net.ipv4.ip_forward", "1", Spec{IPC: true, UTS: true}},
		{"kernel.shmmax", "1", Spec{Net: true, UTS: true}},
		{"kernel.domainname", "x", Spec{Net: true, IPC: true}},
		{"kernel.core_pattern", "|/bin/sh", all},
		{"kernel.core_pattern", "|/proc/%P/root/x", all},
		{"kernel.shm", "1", all},
		{"kernel.shm_rmid_forced", "1\nkernel.core_pattern=x", all},
		{"kernel.shm_rmid_forced", "1+kernel.core_pattern=|/x", all},
		{"kernel.shm_rmid_forced", "1\x00", all},
		{"kernel.shm_rmid_forced", "", all},
		{"kernel.shm_rmid_forced", strings.Repeat("1", maxValue+1), all},
		{"vm.overcommit_memory", "1", all},
		{"fs.file-max", "1", all},
		{"user.max_net_namespaces", "1", all},
		{"net.does.not.exist", "1", all},
		{"net.core.bpf_jit_enable", "0", all}, // below net, and still the node's
		{"net.ipv4.ip_forward", "many", all},
		{"net", "1", all},
		{"", "1", all},
		{"net/../kernel/core_pattern", "|x", all},
		{"net.//.kernel.core_pattern", "|x", all},
		{"net..ipv4", "1", all},
		{"/net/ipv4/ip_forward", "1", all},
		{"../proc/sys/net", "1", all},
		{"net.ipv4.conf.all.forwarding\n", "1", all},
		{"net.ipv4.conf.\xff.forwarding", "1", all},
		{"kernel.domainname", strings.Repeat("d", 65), all},
		{"kernel.hostname", "a b", all},
	} {
		s := spec(t)
		s.Net, s.IPC, s.UTS, s.Hostname = c.in.Net, c.in.IPC, c.in.UTS, ""
		s.Sysctls = map[string]string{c.name: c.value}
		if _, err := Create(s); !errors.Is(err, fault.Invalid) {
			t.Errorf("%.60q = %.60q: %v, want fault.Invalid", c.name, c.value, err)
		}
		if left := remains(t, s.Dir); len(left) != 0 {
			t.Errorf("%.60q = %.60q left %q", c.name, c.value, left)
		}
	}
}

func TestSpecRefused(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	ids := []IDMap{{0, 100000, 65536}}
	for _, s := range []Spec{
		{Dir: "relative", Name: "x", Net: true},
		{Dir: dir, Name: "", Net: true},
		{Dir: dir, Name: "..", Net: true},
		{Dir: dir, Name: "a/../../b", Net: true},
		{Dir: dir, Name: "a\x00b", Net: true},
		{Dir: dir, Name: strings.Repeat("n", 256), Net: true},
		{Dir: dir, Name: "x"},
		{Dir: dir, Name: "x", Net: true, Hostname: "the-host-itself"},
		{Dir: dir, Name: "x", UTS: true, Hostname: strings.Repeat("h", 65)},
		{Dir: dir, Name: "x", UTS: true, Hostname: "a\nb"},
		{Dir: dir, Name: "x", Net: true, UIDs: ids},
		{Dir: dir, Name: "x", Net: true, GIDs: ids},
	} {
		if _, err := Create(s); !errors.Is(err, fault.Invalid) {
			t.Errorf("Create(%+v) = %v, want fault.Invalid", s, err)
		}
	}
	for _, s := range []Spec{{Dir: dir, Name: "../x"}, {Dir: "x", Name: "x"}, {Dir: dir}} {
		if err := Remove(s); !errors.Is(err, fault.Invalid) {
			t.Errorf("Remove(%+v) = %v, want fault.Invalid", s, err)
		}
	}
	if left := remains(t, dir); len(left) != 0 {
		t.Errorf("left %q", left)
	}
}

// What a half-done or damaged Create can leave: a file without a mount, mounts
// stacked twice, one pin of three.
func TestRemoveHalves(t *testing.T) {
	t.Parallel()
	s := spec(t)
	for _, k := range kinds() {
		if err := place(filepath.Join(s.Dir, k.dir), s.Name, k.perm); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		if err := unix.Mount("/proc/self/ns/net", s.path(network()), "", unix.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := Inode(filepath.Join(s.Dir, "ipcns", s.Name)); !errors.Is(err, fault.NotFound) {
		t.Errorf("Inode of a bare file: %v, want fault.NotFound", err)
	}
	remove(t, s)
}

func TestDo(t *testing.T) {
	t.Parallel()
	s := spec(t)
	set := create(t, s)
	defer remove(t, s)
	ino, err := Inode(set.Net)
	if err != nil {
		t.Fatal(err)
	}
	host, _ := Inode("/proc/self/ns/net")

	failure := errors.New("told")
	err = Do(set.Net, func() error {
		if now, err := Inode("/proc/thread-self/ns/net"); err != nil || now != ino {
			t.Errorf("inside: %d, %v; want %d", now, err, ino)
		}
		out, err := exec.Command("stat", "-Lc", "%i", "/proc/self/ns/net").Output()
		if got := strings.TrimSpace(string(out)); err != nil || got != strconv.FormatUint(ino, 10) {
			t.Errorf("a process started inside is in %s, %v", got, err)
		}
		return failure
	})
	if err != failure {
		t.Errorf("Do returned %v", err)
	}
	if err := Do(filepath.Join(s.Dir, "none"), func() error { return nil }); !errors.Is(err, fault.NotFound) {
		t.Errorf("Do without a namespace: %v", err)
	}
	if err := Do(set.IPC, func() error { return nil }); err == nil {
		t.Error("Do entered an IPC namespace")
	}
	if now, err := Inode("/proc/self/ns/net"); err != nil || now != host {
		t.Errorf("the process went from namespace %d to %d, %v", host, now, err)
	}
}

func TestUserNamespace(t *testing.T) {
	t.Parallel()
	s := spec(t)
	s.UIDs = []IDMap{{0, 700000, 65536}}
	s.GIDs = []IDMap{{0, 800000, 65536}}
	s.Sysctls = map[string]string{"net.ipv4.ip_unprivileged_port_start": "0", "kernel.shmmax": "1000000", "fs.mqueue.msg_max": "20", "kernel.domainname": "d"}
	set := create(t, s)
	defer remove(t, s)
	if set.User != filepath.Join(s.Dir, "userns", s.Name) {
		t.Fatalf("set %+v", set)
	}
	inside(t, set, func() error {
		got := []string{sysctl("net/ipv4/ip_unprivileged_port_start"), sysctl("kernel/shmmax"), sysctl("fs/mqueue/msg_max"), sysctl("kernel/domainname")}
		if strings.Join(got, " ") != "0 1000000 20 d" {
			t.Errorf("sysctls %q", got)
		}
		return nil
	})
	// Root of the user namespace has power over the other namespaces, and
	// setgroups is allowed: both are what a container's runtime needs.
	script := "cat /proc/self/uid_map /proc/self/gid_map /proc/self/setgroups; hostname changed && hostname; ip -o link show lo; ip link add x type veth && ip -o link | wc -l"
	out, err := exec.Command("nsenter", "-S", "0", "-G", "0", "--user="+set.User, "--net="+set.Net, "--ipc="+set.IPC, "--uts="+set.UTS,
		"sh", "-ec", script).CombinedOutput()
	text := strings.Join(strings.Fields(string(out)), " ")
	for _, want := range []string{"0 700000 65536 0 800000 65536 allow changed 1: lo: <LOOPBACK,UP,LOWER_UP>", " 3"} {
		if !strings.Contains(text, want) {
			t.Errorf("%v: %s\nlacks %q", err, text, want)
		}
	}
}

func TestUserNamespaceRefused(t *testing.T) {
	t.Parallel()
	s := spec(t)
	s.UIDs = []IDMap{{0, 700000, 10}, {5, 700000, 10}} // overlap
	s.GIDs = s.UIDs
	if _, err := Create(s); err == nil {
		t.Error("overlapping mappings were taken")
	}
}

func TestParallel(t *testing.T) {
	t.Parallel()
	base := spec(t)
	var wait sync.WaitGroup
	for i := range 32 {
		wait.Go(func() {
			s := base
			s.Name, s.Hostname = fmt.Sprintf("pod-%d", i), fmt.Sprintf("host-%d", i)
			s.Sysctls = map[string]string{"kernel.shmmni": strconv.Itoa(1000 + i)}
			if i%4 == 0 {
				s.UIDs, s.GIDs = []IDMap{{0, 100000, 65536}}, []IDMap{{0, 100000, 65536}}
			}
			set := create(t, s)
			inside(t, set, func() error {
				if name, _ := os.Hostname(); name != s.Hostname || sysctl("kernel/shmmni") != s.Sysctls["kernel.shmmni"] {
					t.Errorf("host name %s, shmmni %s in %s", name, sysctl("kernel/shmmni"), s.Name)
				}
				return nil
			})
			remove(t, s)
		})
	}
	wait.Wait()
}

// Threads and files must be given back. Not parallel: it counts those of the
// whole process.
func TestNoLeak(t *testing.T) {
	count := func(dir string) int {
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	s := spec(t)
	s.UIDs, s.GIDs = []IDMap{{0, 100000, 65536}}, []IDMap{{0, 100000, 65536}}
	cycle := func() {
		set := create(t, s)
		Do(set.Net, func() error { return nil })
		remove(t, s)
	}
	cycle()
	files, threads := count("/proc/self/fd"), count("/proc/self/task")
	for range 100 {
		cycle()
	}
	if now := count("/proc/self/fd"); now > files {
		t.Errorf("%d open files, then %d", files, now)
	}
	const slack = 8 // the Go runtime's own
	deadline := time.Now().Add(10 * time.Second)
	for count("/proc/self/task") > threads+slack && time.Now().Before(deadline) {
		time.Sleep(10 * time.Millisecond) // a thread's end is not announced
	}
	if now := count("/proc/self/task"); now > threads+slack {
		t.Errorf("%d threads, then %d", threads, now)
	}
}

func crashSpec(dir string) Spec {
	ids := []IDMap{{0, 100000, 65536}}
	return Spec{Dir: dir, Name: "crashed", Net: true, IPC: true, UTS: true, Hostname: "h",
		UIDs: ids, GIDs: ids, Sysctls: map[string]string{"kernel.shmmni": "5"}}
}

// createForever is the victim of TestCrash.
func createForever(s Spec) {
	fmt.Println("ready")
	for mapped := true; ; mapped = !mapped {
		now := s
		if !mapped {
			now.UIDs, now.GIDs = nil, nil
		}
		if _, err := Create(now); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		if err := Remove(now); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	}
}

// A process killed at any instant of Create or Remove leaves nothing that
// Remove with the recorded Spec would not find: no file, no mount, no process.
func TestCrash(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	halves := 0
	for range 60 {
		victim := exec.Command("/proc/self/exe")
		victim.Env = append(os.Environ(), crashDir+"="+dir)
		victim.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		out, err := victim.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := victim.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(out)
		if !lines.Scan() || lines.Text() != "ready" {
			t.Fatalf("victim said %q", lines.Text())
		}
		time.Sleep(rand.N(15 * time.Millisecond))
		victim.Process.Kill()
		for lines.Scan() {
			t.Errorf("victim said %q", lines.Text())
		}
		victim.Wait()
		if len(remains(t, dir)) > 0 {
			halves++
		}
		remove(t, crashSpec(dir))
		if left := remains(t, dir); len(left) > 0 {
			t.Fatalf("left %q", left)
		}
		waitForSession(t, victim.Process.Pid)
	}
	if halves == 0 {
		t.Error("no kill ever hit a half-made set: the test proves nothing")
	}
}

// waitForSession waits until no process of a session is left; the kernel kills
// the orphans on its own, but not before the parent is gone.
func waitForSession(t *testing.T, id int) {
	deadline := time.Now().Add(5 * time.Second)
	for {
		var alive []string
		stats, _ := filepath.Glob("/proc/[0-9]*/stat")
		for _, stat := range stats {
			text, _ := os.ReadFile(stat)
			fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
			if len(fields) > 3 && fields[3] == strconv.Itoa(id) && fields[0] != "Z" {
				alive = append(alive, stat)
			}
		}
		if len(alive) == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("processes of the killed one live on: %q", alive)
		}
		time.Sleep(time.Millisecond)
	}
}

func FuzzSysctlName(f *testing.F) {
	for _, seed := range []string{"net.ipv4.ip_forward", "net/ipv4/conf/eth0.1/x", "net.ipv4.conf.eth0/1.x", "a../b", "./x", "net.//.x", "..", ""} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, name string) {
		path, err := sysctlPath(name)
		if err != nil {
			return
		}
		if got := filepath.Join("/proc/sys", path); got != "/proc/sys/"+path || !filepath.IsLocal(path) {
			t.Errorf("%q leads to %q", name, path)
		}
	})
}

func BenchmarkCreateRemove(b *testing.B) {
	ids := []IDMap{{0, 100000, 65536}}
	for _, c := range []struct {
		name string
		spec Spec
	}{
		{"net", Spec{Net: true}},
		{"ipc+uts", Spec{IPC: true, UTS: true}},
		{"net+ipc+uts", Spec{Net: true, IPC: true, UTS: true}},
		{"user+net+ipc+uts", Spec{Net: true, IPC: true, UTS: true, UIDs: ids, GIDs: ids}},
	} {
		b.Run(c.name, func(b *testing.B) {
			s := c.spec
			s.Dir, s.Name = b.TempDir(), "bench"
			var making time.Duration
			for b.Loop() {
				start := time.Now()
				create(b, s)
				making += time.Since(start)
				remove(b, s)
			}
			b.ReportMetric(float64(making.Microseconds())/float64(b.N), "create-µs/op")
		})
	}
}

func BenchmarkDo(b *testing.B) {
	s := spec(b)
	set := create(b, s)
	for b.Loop() {
		if err := Do(set.Net, func() error { return nil }); err != nil {
			b.Fatal(err)
		}
	}
	remove(b, s)
}
