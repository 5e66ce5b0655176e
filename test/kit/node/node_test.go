package node

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

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

// race returns a report of the race detector about two functions of containerd/nri.
func race(accesses ...string) string {
	return fmt.Sprintf(`==================
WARNING: DATA RACE
Write at 0x00c00062c0b8 by goroutine 874:
  github.com/containerd/nri/%s
      /go/pkg/mod/nri/plugin.go:450 +0x251

Previous read at 0x00c00062c0b8 by goroutine 871:
  github.com/containerd/nri/%s
      /go/pkg/mod/nri/plugin.go:408 +0x4e

Goroutine 871 (running) created at:
  github.com/containerd/ttrpc.NewClient()
      /go/pkg/mod/ttrpc/client.go:130 +0x251
==================
`, accesses[0], accesses[1])
}

func TestFaultsAreFound(t *testing.T) {
	n := &Node{Dir: t.TempDir()}
	for text, want := range map[string]int{
		"time=x level=INFO msg=fine\n":                                                       0,
		"refused: sysctl kernel.panic is not namespaced\n":                                   0,
		"==================\nWARNING: DATA RACE\nRead at\n":                                  1,
		race("pkg/adaptation.(*plugin).RegisterPlugin()", "pkg/adaptation.(*plugin).name()"): 0,
		race("pkg/adaptation.(*plugin).name()", "pkg/adaptation.(*plugin).RegisterPlugin()"): 0,
		race("pkg/adaptation.(*plugin).name()", "pkg/adaptation.(*plugin).close()"):          1,
		race("pkg/stub.(*plugin).name()", "pkg/adaptation.(*plugin).RegisterPlugin()"):       1,
		"panic: runtime error: index out of range\n":                                         1,
		"msg=recovered stack=\"goroutine 7 [running]:\\n...":                                 1,
		"goroutine 7 gp=0x1060a3174d20 m=0 mp=0x25b0ea0 [running]:\n":                        0,
		"fatal error: concurrent map writes\n":                                               1,
	} {
		if err := os.WriteFile(n.LogFile(), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := n.Faults(); len(got) != want {
			t.Errorf("%q: faults %q", text, got)
		}
	}
}
