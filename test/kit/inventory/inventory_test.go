package inventory

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/ids"
	"github.com/crius-run/crius/test/kit/wait"
)

// take takes a snapshot; an error fails the test.
func take(t *testing.T, s Scope) *Snapshot {
	t.Helper()
	out, err := Take(s)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// finds checks that making something adds exactly one line with these words,
// and that undoing it removes the line.
func finds(t *testing.T, s Scope, make func() (undo func()), words ...string) {
	t.Helper()
	before := take(t, s)
	undo := make()
	var added []string
	// A process exists before it has its command line.
	wait.For(t, "the inventory to grow", func() bool {
		added = Diff(before, take(t, s)).Added
		return len(added) > 0
	})
	undo()
	if len(added) != 1 {
		t.Fatalf("added %q, want one line", added)
	}
	for _, word := range words {
		if !strings.Contains(added[0], word) {
			t.Errorf("added %q, which does not name %q", added[0], word)
		}
	}
	if after := Diff(before, take(t, s)); !after.Empty() {
		t.Errorf("afterwards:\n%s", after)
	}
}

func TestFindsAFile(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "left")
	finds(t, Scope{Dir: dir, Roots: []string{dir}}, func() func() {
		if err := os.WriteFile(file, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		return func() { os.Remove(file) }
	}, "file: ", file)
}

// In places that nodes share, only what has an id of the node is its own.
func TestFindsFilesOfRuntimesByTheNodesIDs(t *testing.T) {
	dir := t.TempDir()
	s := Scope{Shared: []string{filepath.Join(dir, "*")}, Mark: ids.Mark("/a/root")}
	for _, foreign := range []string{ids.New(ids.Mark("/another/root")), ids.Unmarked(), "lock"} {
		if err := os.WriteFile(filepath.Join(dir, foreign), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"%s", "runsc-%s.sock", strings.Repeat("a", 64) + "_sandbox:%s.state"} {
		file := filepath.Join(dir, fmt.Sprintf(name, ids.New(s.Mark)))
		finds(t, s, func() func() {
			if err := os.WriteFile(file, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			return func() { os.Remove(file) }
		}, "file: ", file)
	}
}

// The previous version of a record that is about to be synced is not a
// leftover; alone it is.
func TestFindsTheLastOfARecordThatIsGone(t *testing.T) {
	dir := t.TempDir()
	record := filepath.Join(dir, "pod.json")
	last := record + ".last"
	finds(t, Scope{Dir: dir, Roots: []string{dir}}, func() func() {
		if err := errors.Join(os.WriteFile(record, nil, 0o600), os.WriteFile(last, nil, 0o600)); err != nil {
			t.Fatal(err)
		}
		return func() { os.Remove(record); os.Remove(last) }
	}, "file: ", record)
	finds(t, Scope{Dir: dir, Roots: []string{dir}}, func() func() {
		if err := os.WriteFile(last, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		return func() { os.Remove(last) }
	}, "file: ", last)
}

func TestFindsAMountAndStopsAtIt(t *testing.T) {
	dir := t.TempDir()
	point := filepath.Join(dir, "point")
	if err := os.Mkdir(point, 0o755); err != nil {
		t.Fatal(err)
	}
	finds(t, Scope{Dir: dir, Roots: []string{dir}}, func() func() {
		if err := unix.Mount("tmpfs", point, "tmpfs", 0, ""); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(point, "inside"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		return func() { unix.Unmount(point, unix.MNT_DETACH) }
	}, "mount: tmpfs ", point)
}

func TestFindsAProcessByItsCommandLine(t *testing.T) {
	dir := t.TempDir()
	finds(t, Scope{Dir: dir}, func() func() {
		cmd := exec.Command("tail", "-f", "/dev/null", filepath.Join(dir, "x"))
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		return func() { cmd.Process.Kill(); cmd.Wait() }
	}, "process: ", "tail -f")
}

func TestFindsACgroupAndTheProcessesInIt(t *testing.T) {
	scope := Scope{Cgroup: "/inventory-test"}
	hierarchies, err := filepath.Glob("/sys/fs/cgroup/*/cgroup.procs")
	if err != nil || len(hierarchies) == 0 {
		hierarchies = []string{"/sys/fs/cgroup/cgroup.procs"}
	}
	dir := filepath.Join(filepath.Dir(hierarchies[len(hierarchies)-1]), scope.Cgroup)
	finds(t, scope, func() func() {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		return func() { os.Remove(dir) }
	}, "cgroup: ", dir)

	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(dir)
	finds(t, scope, func() func() {
		cmd := exec.Command("sleep", "100")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(cmd.Process.Pid)), 0); err != nil {
			t.Fatal(err)
		}
		return func() { cmd.Process.Kill(); cmd.Wait() }
	}, "process: ", "sleep 100")
}

// A container's process is the runtime's init at first and the container's
// program a moment later: a snapshot in between finds nothing new and misses
// nothing.
func TestAProcessIsTheSameAfterExec(t *testing.T) {
	dir := t.TempDir()
	scope := Scope{Dir: dir}
	cmd := exec.Command("sh", "-c", `read line; exec tail -f /dev/null "$0"`, filepath.Join(dir, "x"))
	input, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { cmd.Process.Kill(); cmd.Wait() }()
	awaits := func(words string) (s *Snapshot) {
		t.Helper()
		wait.For(t, "a process "+words, func() bool {
			s = take(t, scope)
			return len(s.About(words)) == 1
		})
		return s
	}
	early := awaits(" sh -c ")
	if _, err := input.Write([]byte("\n")); err != nil {
		t.Fatal(err)
	}
	if d := Diff(early, awaits(" tail -f ")); !d.Empty() {
		t.Errorf("one process is told as\n%s", d)
	}
}

// gVisor's processes unmap their arguments; a program can also be executed with
// none.
func TestAProcessWithoutArgumentsIsNotInExecve(t *testing.T) {
	cmd := exec.Command("cat")
	cmd.Args = []string{""}
	if _, err := cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { cmd.Process.Kill(); cmd.Wait() }()
	proc := filepath.Join("/proc", strconv.Itoa(cmd.Process.Pid))
	wait.For(t, "the end of execve", func() bool { return !inExecve(proc) })
	if got := commandLine(proc); !strings.HasPrefix(got, "[cat] ") {
		t.Errorf("the process is called %q, want [cat] and its state", got)
	}
}

func TestFindsLeasesWithTheirOwner(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "pods"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"lock", "last_reserved_ip.0"} {
		if err := os.WriteFile(filepath.Join(dir, "pods", name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, ip := range []string{"10.0.0.2", "fd00::2"} {
		lease := filepath.Join(dir, "pods", ip)
		finds(t, Scope{Leases: dir}, func() func() {
			if err := os.WriteFile(lease, []byte("an-id\r\neth0"), 0o600); err != nil {
				t.Fatal(err)
			}
			return func() { os.Remove(lease) }
		}, "lease: ", ip, "an-id eth0")
	}
}

// newNetwork returns a function that runs functions in a new network namespace.
func newNetwork(t *testing.T) func(func() error) error {
	t.Helper()
	requests, results := make(chan func() error), make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		results <- unix.Unshare(unix.CLONE_NEWNET)
		for f := range requests {
			results <- f()
		}
	}()
	if err := <-results; err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { close(requests) })
	return func(f func() error) error { requests <- f; return <-results }
}

func TestFindsWhatIsInTheNetwork(t *testing.T) {
	in := newNetwork(t)
	scope := Scope{Within: in, Links: []string{"lo"}}
	command := func(args ...string) {
		t.Helper()
		err := in(func() error {
			out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
			if err != nil {
				t.Log(string(out))
			}
			return err
		})
		if err != nil {
			t.Fatal(args, err)
		}
	}
	finds(t, scope, func() func() {
		command("ip", "link", "add", "left0", "type", "bridge")
		return func() { command("ip", "link", "delete", "left0") }
	}, "link: left0")
	finds(t, scope, func() func() {
		command("iptables", "-A", "INPUT", "-s", "10.1.2.3", "-j", "DROP")
		return func() { command("iptables", "-F", "INPUT") }
	}, "rule: ", "10.1.2.3")
	command("nft", "add", "table", "ip", "own")
	command("nft", "add", "set", "ip", "own", "ports", "{ type inet_service; }")
	finds(t, scope, func() func() {
		command("nft", "add", "element", "ip", "own", "ports", "{ 4711 }")
		return func() { command("nft", "flush", "set", "ip", "own", "ports") }
	}, "rule: ", "ip own", "4711")
	finds(t, scope, func() func() {
		command("nft", "add", "table", "inet", "left")
		return func() { command("nft", "delete", "table", "inet", "left") }
	}, "rule: ", "inet left")
	finds(t, scope, func() func() {
		var l net.Listener
		if err := in(func() (err error) { l, err = net.Listen("unix", "@left"); return err }); err != nil {
			t.Fatal(err)
		}
		return func() { l.Close() }
	}, "abstract socket: @left")
}

func TestObjectsThatPluginsKeepAreNoLeaks(t *testing.T) {
	for line, want := range map[string]bool{
		":PREROUTING ACCEPT [0:0]":                                        true,
		":CNI-HOSTPORT-DNAT - [0:0]":                                      true,
		":CNI-DN-1234567890abcdef - [0:0]":                                false,
		":CNI-1234567890abcdef - [0:0]":                                   false,
		"-A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT": true,
		"-A CNI-HOSTPORT-SETMARK -m comment --comment \"CNI portfwd masquerade mark\" -j MARK --set-xmark 0x2000/0x2000": true,
		"-A CNI-HOSTPORT-DNAT -p tcp -m comment --comment \"dnat name: \\\"pods\\\" id: \\\"x\\\"\" -j CNI-DN-1234":      false,
		"-A CNI-DN-1234 -s 10.0.0.0/8 -p tcp -j CNI-HOSTPORT-SETMARK":                                                    false,
		"-A POSTROUTING -s 10.0.0.2/32 -m comment --comment \"name: x\" -j CNI-1234567890":                               false,
		"-A INPUT -j DROP": false,
	} {
		if got := permanentRule(line); got != want {
			t.Errorf("permanentRule(%q) is %v", line, got)
		}
	}
}

func TestAboutAndBrief(t *testing.T) {
	s := &Snapshot{lines: map[string]bool{}}
	for _, what := range []string{"a-1", "a-2", "a-3", "a-4", "a-5", "b-1"} {
		s.add("file", what)
	}
	if got := s.About("a-2", "b-"); len(got) != 2 {
		t.Errorf("About gives %q", got)
	}
	brief := Brief("", s.Lines())
	if strings.Count(brief, "\n") != 5 || !strings.Contains(brief, "file: and 2 more") {
		t.Errorf("Brief gives %q", brief)
	}
}

func TestServerCountsDescriptors(t *testing.T) {
	before, err := Server(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	after, err := Server(syscall.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if got := after.FDs["pipe"] - before.FDs["pipe"]; got != 2 {
		t.Errorf("a pipe adds %d descriptors of kind pipe: %v", got, after.FDs)
	}
	if after.Threads == 0 || after.RSSKiB == 0 {
		t.Errorf("load is %+v", after)
	}
}
