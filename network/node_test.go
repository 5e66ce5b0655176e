package network

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/mount"
	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/test/kit/program"
	"github.com/crius-run/crius/test/kit/wait"
)

const (
	isolated = "NETWORK_TEST_ISOLATED" // set in the process that runs the tests
	victim   = "NETWORK_TEST_VICTIM"   // conf dir, plugin dir and netns of a process to be killed
)

// The tests run real plugins. So that their bridges and rules can never reach
// the machine's network, everything runs in its own network and mount
// namespaces, and every test has its own "host" namespace below.
func TestMain(m *testing.M) {
	if args := os.Getenv(victim); args != "" {
		attachForever(strings.Split(args, " "))
	}
	if os.Getenv(isolated) != "" {
		if out, err := exec.Command("ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
			fmt.Printf("%v: %s", err, out)
			os.Exit(1)
		}
		statusLimit, collectLimit = wait.Limit, wait.Limit // for busy machines; a test's own Timeout ends what hangs
		start = inNamespaceOfThread
		os.Exit(m.Run())
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), isolated+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS, Pdeathsig: unix.SIGKILL}
	if err := cmd.Run(); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

// inNamespaceOfThread starts a plugin from the caller's thread, which is in the
// namespace of a node.
func inNamespaceOfThread(start func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return start()
}

// node is a machine as far as this package can see: a host network namespace, a
// configuration directory, plugins and leases.
type node struct {
	testing.TB
	host          ns.Set
	dir           string
	confs, leases string // directories
	plugins       string // directory of a test's own plugins, searched before the real ones
	cfg           Options
	read          int // bytes already read of the plugins' calls
	*Network
}

var serial atomic.Int64

func newNode(t testing.TB, files map[string]string) *node {
	t.Helper()
	if os.Getenv(isolated) == "" {
		t.Fatal("not isolated")
	}
	dir := t.TempDir()
	n := &node{TB: t, dir: dir, confs: filepath.Join(dir, "net.d"), leases: filepath.Join(dir, "leases"), plugins: filepath.Join(dir, "bin")}
	for _, d := range []string{n.confs, n.plugins} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { // after all others
		if left, err := mount.Under(dir); err != nil || len(left) != 0 {
			t.Errorf("left mounted: %q, %v", left, err)
		}
	})
	n.host = n.namespaces("host")
	n.cfg = Options{Config: DefaultConfig()}
	n.cfg.ConfDir, n.cfg.PluginDirs = n.confs, []string{n.plugins, "/opt/cni/bin", "/usr/lib/cni"}
	n.cfg.Timeout, n.cfg.ReadyGrace = 2*time.Minute, 0
	for name, text := range files {
		n.conf(name, text)
	}
	n.restart()
	return n
}

// restart drops all state in memory.
func (n *node) restart() { n.Network = New(n.cfg) }

// conf writes a configuration file, with LEASES in it replaced.
func (n *node) conf(name, text string) {
	n.Helper()
	path := filepath.Join(n.confs, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		n.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(strings.ReplaceAll(text, "LEASES", n.leases)), 0o644); err != nil {
		n.Fatal(err)
	}
}

// plugin writes a plugin of the test, a shell script.
func (n *node) plugin(name, script string) {
	n.Helper()
	if err := program.Write(filepath.Join(n.plugins, name), []byte("#!/bin/sh\n"+script)); err != nil {
		n.Fatal(err)
	}
}

func (n *node) namespaces(name string) ns.Set {
	n.Helper()
	spec := ns.Spec{Dir: filepath.Join(n.dir, "run"), Name: name, Net: true}
	set, err := ns.Create(spec)
	if err != nil {
		n.Fatal(err)
	}
	n.Cleanup(func() { // even if removed before
		if err := ns.Remove(spec); err != nil {
			n.Error(err)
		}
	})
	return set
}

// pod makes the next pod, with a network namespace.
func (n *node) pod() Pod {
	n.Helper()
	id := fmt.Sprintf("%064x", serial.Add(1))
	return Pod{
		ID: id, Name: "web-0", Namespace: "shop", UID: "2f6c0b1e", NetNS: n.namespaces(id).Net,
		CacheDir: filepath.Join(n.dir, "pods", id, "cni"), CgroupParent: "/kubepods/pod2f6c0b1e",
	}
}

// forget removes the pod's network namespace, as a reboot does.
func (n *node) forget(p Pod) {
	n.Helper()
	if err := ns.Remove(ns.Spec{Dir: filepath.Join(n.dir, "run"), Name: p.ID}); err != nil {
		n.Fatal(err)
	}
}

// do runs f in the node's host network namespace.
func (n *node) do(f func() error) error { return ns.Do(n.host.Net, f) }

func (n *node) plan(p Pod) *Attachment {
	n.Helper()
	a, err := n.Plan(p)
	if err != nil {
		n.Fatal(err)
	}
	return recorded(n, a)
}

func (n *node) tryAttach(p Pod, a *Attachment) (done *Attachment, err error) {
	err = n.do(func() (err error) {
		done, err = n.Attach(context.Background(), p, a)
		return err
	})
	return done, err
}

// hung calls f with a short time-out, and with longer ones until the plugin
// that hangs in it has got that far: it then makes the file hangs. hung calls
// undo before it calls f again.
func (n *node) hung(f func() error, undo func()) error {
	n.Helper()
	patient := n.cfg.Timeout
	within := func(limit time.Duration) { n.cfg.Timeout = limit; n.restart() }
	defer within(patient)
	for limit := time.Second; limit < patient; limit *= 4 {
		within(limit)
		err := f()
		if os.Remove(filepath.Join(n.dir, "hangs")) == nil {
			return err
		}
		within(patient)
		undo()
	}
	n.Fatal("the plugin never hung")
	return nil
}

func (n *node) attach(p Pod) *Attachment {
	n.Helper()
	a, err := n.tryAttach(p, n.plan(p))
	if err != nil {
		n.Fatal(err)
	}
	return recorded(n, a)
}

func (n *node) tryDetach(p Pod, a *Attachment) error {
	return n.do(func() error { return n.Detach(context.Background(), p, a) })
}

func (n *node) detach(p Pod, a *Attachment) {
	n.Helper()
	if err := n.tryDetach(p, a); err != nil {
		n.Fatal(err)
	}
}

// recorded returns a as read after a restart.
func recorded(t testing.TB, a *Attachment) *Attachment {
	t.Helper()
	text, err := json.MarshalIndent(a, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	back := &Attachment{}
	if err := json.Unmarshal(text, back); err != nil {
		t.Fatal(err)
	}
	again, err := json.MarshalIndent(back, "", "  ")
	if err != nil || !bytes.Equal(text, again) {
		t.Fatalf("the record changes: %v\n%s\n%s", err, text, again)
	}
	return back
}

// leased returns the addresses that host-local holds.
func (n *node) leased() []string {
	n.Helper()
	var all []string
	files, _ := filepath.Glob(n.leases + "/*/*")
	for _, f := range files {
		if name := filepath.Base(f); name != "lock" && !strings.HasPrefix(name, "last_reserved_ip") {
			all = append(all, name)
		}
	}
	return all
}

// footprint returns everything that plugins have made in the host namespace:
// interfaces, routes, queueing disciplines and firewall rules, without
// counters.
func (n *node) footprint() string {
	n.Helper()
	var out []byte
	err := n.do(func() (err error) {
		out, err = exec.Command("sh", "-c", `
			ip -o link | sed 's/@.*//; s/: <.*//; s/^[0-9]*: //'; (ip route; ip -6 route | grep -v fe80) | sed 's/ linkdown//'; tc qdisc | sed 's/ refcnt.*//'
			iptables-save; ip6tables-save; nft list ruleset`).Output()
		return err
	})
	if err != nil {
		n.Fatal(err)
	}
	var lines []string
	for line := range strings.Lines(string(out)) {
		if line = strings.TrimSpace(line); line == "" || line[0] == '#' {
			continue
		}
		if i := strings.Index(line, " ["); line[0] == ':' && i > 0 {
			line = line[:i]
		}
		lines = append(lines, stripCounters(line))
	}
	return strings.Join(lines, "\n")
}

func stripCounters(line string) string {
	fields := strings.Fields(line)
	for i := range fields {
		if i > 0 && (fields[i-1] == "packets" || fields[i-1] == "bytes") {
			fields[i] = "-"
		}
	}
	return strings.Join(fields, " ")
}

// hostLocal returns an address management configuration with the given ranges.
func hostLocal(ranges string) string {
	return `"ipam": {"type": "host-local", "dataDir": "LEASES", "ranges": [` + ranges + `],
		"routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]}`
}

const (
	range4 = `[{"subnet": "10.7.0.0/16"}]`
	range6 = `[{"subnet": "fd00:7::/64"}]`
)

// bridgeConf has all the plugins that a pod commonly goes through. With an IPv6
// range each ADD waits a second or more for the kernel's duplicate address
// detection.
func bridgeConf(ranges string) string {
	return `{"cniVersion": "1.0.0", "name": "pods", "plugins": [
	{"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": true, "hairpinMode": true, ` + hostLocal(ranges) + `},
	{"type": "portmap", "capabilities": {"portMappings": true}},
	{"type": "bandwidth", "capabilities": {"bandwidth": true}}]}`
}

func ptpConf(ranges string) string {
	return `{"cniVersion": "0.4.0", "name": "pods", "plugins": [
	{"type": "ptp", ` + hostLocal(ranges) + `},
	{"type": "portmap", "capabilities": {"portMappings": true}}]}`
}
