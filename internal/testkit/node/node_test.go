package node

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/testkit/inventory"
)

// bare is a node without programs and configuration.
func bare(t *testing.T, id string) *Node {
	t.Helper()
	n := &Node{ID: id, Dir: filepath.Join("/tmp", id)}
	if err := n.makeDir(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { scrub(n.ID, n.Dir) })
	return n
}

// A monitor's socket, the longest path of a node, must fit into a sockaddr_un.
func TestSocketPathsFit(t *testing.T) {
	n := &Node{ID: "cr234567", Dir: "/tmp/cr234567"}
	longest := filepath.Join(n.RunRoot(), "containers", strings.Repeat("a", 64), "monitor.sock")
	if len(longest) > 107 {
		t.Errorf("%s has %d bytes, at most 107 fit", longest, len(longest))
	}
}

func TestNetworkIsTheNodesOwn(t *testing.T) {
	network, err := newNetwork()
	if err != nil {
		t.Fatal(err)
	}
	n := &Node{net: network}
	defer network.close()
	l, err := n.Listen("127.0.0.1:5000")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if c, err := n.Dial(t.Context(), "tcp", "127.0.0.1:5000"); err != nil {
		t.Errorf("from inside: %v", err)
	} else {
		c.Close()
	}
	if c, err := net.Dial("tcp", "127.0.0.1:5000"); err == nil {
		c.Close()
		t.Error("the node's listener is reachable from outside")
	}
	out, err := n.Run(t.Context(), "ip", "-o", "link")
	if err != nil || strings.Count(out, "\n") != 1 || !strings.Contains(out, "LOOPBACK,UP") {
		t.Errorf("interfaces inside: %v: %s", err, out)
	}
}

func TestScrubTakesEverythingAway(t *testing.T) {
	n := bare(t, "crscrub1")
	point := n.Path("point")
	if err := os.Mkdir(point, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", point, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("sh", "-c", `trap "" TERM; while :; do sleep 1; done`, n.Path("x"))
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go cmd.Wait()
	if hierarchies, _ := filepath.Glob("/sys/fs/cgroup/*/cgroup.procs"); len(hierarchies) > 0 {
		dir := filepath.Join(filepath.Dir(hierarchies[0]), n.ID, "pods", "x")
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(cmd.Process.Pid)), 0); err != nil {
			t.Fatal(err)
		}
	}
	if err := scrub(n.ID, n.Dir); err != nil {
		t.Fatal(err)
	}
	left, err := inventory.Take(inventory.Scope{Dir: n.Dir, Roots: []string{n.Dir}, Cgroup: "/" + n.ID})
	if err != nil {
		t.Fatal(err)
	}
	if lines := left.Lines(); len(lines) > 0 {
		t.Errorf("left: %q", lines)
	}
}

func TestSweepSparesTheLiving(t *testing.T) {
	living, dead := bare(t, "crsweep1"), bare(t, "crsweep2")
	gone := exec.Command("true")
	if err := gone.Run(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dead.Path(ownerFile), []byte(strconv.Itoa(gone.Process.Pid)), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Sweep(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(living.Dir); err != nil {
		t.Errorf("the node of a living process: %v", err)
	}
	if _, err := os.Stat(dead.Dir); !os.IsNotExist(err) {
		t.Errorf("the node of a dead process is still there: %v", err)
	}
}

func TestFaultsAreFound(t *testing.T) {
	n := &Node{Dir: t.TempDir()}
	for text, want := range map[string]int{
		"time=x level=INFO msg=fine\n":                       0,
		"refused: sysctl kernel.panic is not namespaced\n":   0,
		"==================\nWARNING: DATA RACE\nRead at\n":  1,
		"panic: runtime error: index out of range\n":         1,
		"msg=recovered stack=\"goroutine 7 [running]:\\n...": 1,
		"fatal error: concurrent map writes\n":               1,
	} {
		if err := os.WriteFile(n.LogFile(), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := n.Faults(); len(got) != want {
			t.Errorf("%q: faults %q", text, got)
		}
	}
}
