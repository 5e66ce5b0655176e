package monitor

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
)

func TestOOMFiles(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		table string
		want  []string
	}{
		"v1":                      {"12:memory:/pod/c\n3:cpu,cpuacct:/pod/c\n1:name=systemd:/pod/c\n", []string{"/sys/fs/cgroup/memory/pod/c/memory.oom_control"}},
		"v1, several controllers": {"4:cpu,memory:/c\n", []string{"/sys/fs/cgroup/memory/c/memory.oom_control"}},
		"hybrid": {"4:memory:/pod/c\n0::/scope\n", []string{
			"/sys/fs/cgroup/memory/pod/c/memory.oom_control", "/sys/fs/cgroup/scope/memory.events", "/sys/fs/cgroup/unified/scope/memory.events"}},
		"v2":                   {"0::/kubepods.slice/c.scope\n", []string{"/sys/fs/cgroup/kubepods.slice/c.scope/memory.events", "/sys/fs/cgroup/unified/kubepods.slice/c.scope/memory.events"}},
		"colons":               {"0::/a:b:c\n", []string{"/sys/fs/cgroup/a:b:c/memory.events", "/sys/fs/cgroup/unified/a:b:c/memory.events"}},
		"no memory controller": {"3:cpu:/c\n5:notmemory:/c\n6:memory2,memor:/c\n", nil},
		"nonsense":             {"\n::\nx\n:\n\x00", nil},
		"nothing":              {"", nil},
	} {
		var got []string
		for _, f := range oomFiles([]byte(test.table)) {
			if f.group != "" {
				got = append(got, f.root+f.group+f.name)
			}
		}
		if !slices.Equal(got, test.want) {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
}

func TestKeyed(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]uint64{
		"low 0\nhigh 0\nmax 9\noom 2\noom_kill 3\noom_group_kill 7\n": 3,
		"oom_kill_disable 0\nunder_oom 0\noom_kill 12\n":              12,
		"oom_kill 18446744073709551615":                               1<<64 - 1,
	} {
		if got, ok := keyed([]byte(text), "oom_kill"); !ok || got != want {
			t.Errorf("%q: %d, %v", text, got, ok)
		}
	}
	for _, text := range []string{"", "oom_kill", "oom_kill x\n", "oom_kill_disable 0\nunder_oom 0\n", "xoom_kill 1\n", "oom_kill  1\n"} {
		if got, ok := keyed([]byte(text), "oom_kill"); ok {
			t.Errorf("%q: %d", text, got)
		}
	}
}

func TestUnknownCounter(t *testing.T) {
	t.Parallel()
	o := oomCounter{own: counter{fd: -1}, pod: counter{fd: -1}}
	o.watch(nil)
	o.watch([]byte("0::/no/such/cgroup\n4:memory:/no/such/cgroup\n"))
	if o.own.fd >= 0 || o.pod.fd >= 0 || o.kills(killed.Code) != 0 {
		t.Errorf("%+v", o)
	}
}

// A cgroup may count kills of an earlier container, or be replaced by a new one.
func TestCountSinceCreate(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "memory.events")
	write := func(n int) {
		if err := os.WriteFile(file, fmt.Appendf(nil, "oom_kill %d\n", n), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(5)
	o := oomCounter{pod: counter{fd: -1}}
	if !o.own.open(oomKills, file) {
		t.Fatal("not opened")
	}
	defer syscall.Close(o.own.fd)
	for count, want := range map[int]uint64{5: 0, 7: 2, 3: 0} {
		if write(count); o.kills(0) != want {
			t.Errorf("%d kills, want %d", o.kills(0), want)
		}
	}
	var other counter
	if other.open("no_such_key", file) || other.fd != -1 {
		t.Errorf("%+v", other)
	}
}

// What is noticed before the end has a time; the end itself is none.
func TestTimeOfOOMKills(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "memory.events")
	write := func(n int) {
		if err := os.WriteFile(file, fmt.Appendf(nil, "oom_kill %d\n", n), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(1)
	m := &monitor{oom: oomCounter{own: counter{fd: -1}, pod: counter{fd: -1}}}
	m.countKills(0) // nothing is counted
	if !m.oom.own.open(oomKills, file) {
		t.Fatal("not opened")
	}
	defer syscall.Close(m.oom.own.fd)
	m.countKills(0)
	if m.oom.seen != 0 || m.oom.at != 0 {
		t.Errorf("before any: %+v", m.oom)
	}
	write(3)
	m.countKills(0)
	at := m.oom.at
	if sec, _ := now(); m.oom.seen != 2 || at == 0 || at > sec {
		t.Errorf("after two: %+v", m.oom)
	}
	write(4)
	if m.oom.kills(0) != 3 || m.oom.seen != 2 || m.oom.at != at {
		t.Errorf("at the end: %+v", m.oom)
	}
}

// A systemd scope goes away with its last process: what its counter said last is
// known all the same, and a dead counter does not keep the loop busy. Here a
// cgroup's events file stands for memory.events, which changes and dies alike.
func TestCounterOutlivesCgroup(t *testing.T) {
	t.Parallel()
	dir := fmt.Sprintf("%s/crius-test-oom-%d", cgroup2(t), os.Getpid())
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	defer syscall.Rmdir(dir)
	o := oomCounter{pod: counter{fd: -1}}
	if !o.own.open("populated", dir, "/cgroup.events") || o.own.first != 0 {
		t.Fatalf("%+v", o)
	}
	defer syscall.Close(o.own.fd)
	m := &monitor{}
	var err error
	if m.poll.fd, err = syscall.EpollCreate1(syscall.EPOLL_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(m.poll.fd)
	if err := m.poll.add(o.own.fd, syscall.EPOLLPRI|edgeTriggered, starved, 0); err != nil {
		t.Fatal(err)
	}
	wait := func(ms int) bool {
		var batch [4]syscall.EpollEvent
		for {
			n, err := syscall.EpollWait(m.poll.fd, batch[:], ms)
			if err == nil {
				return n > 0 && event(batch[0].Fd) == starved
			}
			if !errors.Is(err, syscall.EINTR) {
				t.Fatal(err)
			}
		}
	}
	wait(0) // the first look
	sleep := exec.Command("sleep", "1000")
	if err := sleep.Start(); err != nil {
		t.Fatal(err)
	}
	defer sleep.Wait()
	defer sleep.Process.Kill()
	if err := os.WriteFile(dir+"/cgroup.procs", fmt.Append(nil, sleep.Process.Pid), 0); err != nil {
		t.Fatal(err)
	}
	if !wait(10_000) || !o.read() || o.own.last != 1 {
		t.Fatalf("the change was not seen: %+v", o)
	}
	sleep.Process.Kill()
	sleep.Wait()
	if !wait(10_000) {
		t.Fatal("the second change was not seen")
	}
	if err := syscall.Rmdir(dir); err != nil {
		t.Fatal(err)
	}
	if o.read() || o.kills(killed.Code) != 1 {
		t.Errorf("a counter that is no more: %+v", o)
	}
	wait(0)
	if wait(100) {
		t.Error("a dead counter keeps the loop busy")
	}
}

func cgroup2(t *testing.T) string {
	t.Helper()
	const magic = 0x63677270
	for _, dir := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		var st syscall.Statfs_t
		if syscall.Statfs(dir, &st) == nil && st.Type == magic {
			return dir
		}
	}
	t.Fatal("no cgroup2 file system is mounted")
	return ""
}

// A scope may go before the monitor has read that something in it was killed. The pod's
// count tells it then, of a program that was killed, and of what was counted since the
// last look at both.
func TestKillsInCgroupThatHasGone(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		before, after int // kills that the pod counts before the last look at both, and in all
		code          int
		own           uint64 // kills that the container's own counter had told
		want          uint64
	}{
		"killed, unread":                         {before: 3, after: 4, code: killed.Code, want: 1},
		"two, of which one was read":             {before: 1, after: 2, code: killed.Code, own: 1, want: 2},
		"read before, and ended otherwise":       {before: 1, after: 1, code: killed.Code, own: 1, want: 1},
		"killed by somebody, another one before": {before: 3, after: 3, code: killed.Code, want: 0},
		"ended, another one was killed":          {before: 0, after: 1, code: 1, want: 0},
	} {
		dir := t.TempDir()
		count := func(file string, n int) {
			if err := os.WriteFile(filepath.Join(dir, file), fmt.Appendf(nil, "oom_kill %d\n", n), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		count("pod", 0)
		count("own", 0)
		var o oomCounter
		if !o.own.open(oomKills, dir, "/own") || !o.pod.open(oomKills, dir, "/pod") {
			t.Fatal("not opened")
		}
		count("pod", test.before)
		count("own", int(test.own))
		if !o.read() {
			t.Fatal("not read")
		}
		count("pod", test.after)
		syscall.Close(o.own.fd)
		if o.own.fd, _ = syscall.Open(dir, syscall.O_RDONLY|syscall.O_CLOEXEC, 0); o.own.fd < 0 {
			t.Fatal("no descriptor that cannot be read") // as the one of a cgroup that has gone
		}
		if got := o.kills(test.code); got != test.want {
			t.Errorf("%s: %d kills, want %d", name, got, test.want)
		}
		syscall.Close(o.own.fd)
		syscall.Close(o.pod.fd)
	}
}

func TestCgroupAbove(t *testing.T) {
	t.Parallel()
	for group, want := range map[string]string{
		"/kubepods.slice/pod.slice/crius-1.scope":           "/kubepods.slice/pod.slice/",
		"/kubepods.slice/pod.slice/crius-1.scope/container": "/kubepods.slice/pod.slice/",
		"/node.scope/pods/pod/container":                    "/node.scope/pods/pod/",
		"/pods/pod/1":                                       "/pods/pod/",
		"/1":                                                "/",
		"":                                                  "",
	} {
		if got := above(group); got != want {
			t.Errorf("%q: %q, want %q", group, got, want)
		}
	}
}
