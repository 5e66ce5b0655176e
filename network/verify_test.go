package network

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/test/kit/wait"
)

// wrong returns what Verify reports about a pod, and whether any of it cannot
// be fixed.
func (n *node) wrong(p Pod, a *Attachment) (text string, dead bool) {
	n.Helper()
	for _, d := range n.Verify([]Attached{{Pod: p, Attachment: a}})[p.ID] {
		text += d.Text + "\n"
		dead = dead || d.Dead
	}
	return text, dead
}

// Verify finds every difference between the record of an attached pod and the
// node.
func TestVerify(t *testing.T) {
	t.Parallel()
	n := newNode(t, map[string]string{"10-pods.conflist": bridgeConf(range4 + "," + range6)})
	for name, c := range map[string]struct {
		damage func(p Pod, a *Attachment)
		want   string
		dead   bool
	}{
		"nothing":   {func(Pod, *Attachment) {}, "", false},
		"interface": {func(p Pod, _ *Attachment) { n.run(p.NetNS, "ip link delete eth0") }, "interface eth0 is gone", true},
		"address":   {func(p Pod, a *Attachment) { n.run(p.NetNS, "ip -4 addr flush dev eth0") }, "eth0 has lost the address 10.7.", false},
		"namespace": {func(p Pod, _ *Attachment) { n.forget(p) }, "network namespace", true},
		"lease":     {func(_ Pod, a *Attachment) { os.Remove(filepath.Join(n.leases, "pods", a.IPs[1])) }, "is no longer reserved", true},
		"another's": {func(_ Pod, a *Attachment) {
			os.WriteFile(filepath.Join(n.leases, "pods", a.IPs[0]), []byte("other\r\neth0"), 0o600)
		}, `is reserved for another container, "other"`, true},
	} {
		p := n.pod()
		a := n.attach(p)
		c.damage(p, a)
		text, dead := n.wrong(p, a)
		if strings.Contains(text, c.want) != true || c.want == "" && text != "" || dead != c.dead {
			t.Errorf("%s: dead %t, %q, want %q", name, dead, text, c.want)
		}
		n.detach(p, a)
		os.Remove(filepath.Join(n.leases, "pods", a.IPs[0])) // another pod's
	}
	p := n.pod()
	a := n.attach(p)
	n.run(p.NetNS, "ip addr flush dev eth0")
	if found := n.Verify([]Attached{{Pod: p, Attachment: a, OwnStack: true}})[p.ID]; len(found) > 0 {
		t.Errorf("a runtime with a stack of its own: %v", found)
	}
	n.detach(p, a)
}

// The plugins release a lease with an unknown container, and no other.
func TestReclaimLease(t *testing.T) {
	t.Parallel()
	n := newNode(t, map[string]string{"10-pods.conflist": bridgeConf(range4)})
	p := n.pod()
	a := n.attach(p)
	stray := n.pod()
	file := filepath.Join(n.leases, "pods", "10.7.200.200")
	if err := os.WriteFile(file, []byte(stray.ID+"\r\neth0"), 0o600); err != nil {
		t.Fatal(err)
	}
	n.conf("10-pods.conflist", strings.ReplaceAll(bridgeConf(range4), "host-local", "foreign-ipam")) // the record takes precedence
	leases, opaque, err := n.Leases(nil, []*Attachment{a, a})
	if err != nil || len(leases) != 2 || !slices.Equal(opaque, []string{"foreign-ipam"}) {
		t.Fatalf("%+v, %q, %v", leases, opaque, err)
	}
	addresses := []string{"10.7.200.200", a.IPs[0]}
	var idle []string
	if !wait.Until(t.Context(), func() bool { // other pods of the machine may be coming up
		idle, err = Idle(addresses, []string{p.NetNS}, nil)
		return err == nil && slices.Equal(idle, addresses[:1])
	}) {
		t.Errorf("idle: %q, %v", idle, err)
	}
	for _, l := range leases {
		if l.Owner != stray.ID {
			continue
		}
		stray.NetNS = ""
		if err := n.do(func() error { return n.Reclaim(context.Background(), stray, []Lease{l}, nil) }); err != nil {
			t.Error(err)
		}
	}
	if left := n.leased(); !slices.Equal(left, a.IPs) {
		t.Errorf("leases %q, want %q", left, a.IPs)
	}
	if text, _ := n.wrong(p, a); text != "" {
		t.Error(text)
	}
	n.detach(p, a)
}

// What cannot be checked does not count as gone: no pod is reported as dead for
// it, and no address as idle.
func TestVerifyThatCannotCheckReportsNoDamage(t *testing.T) {
	t.Parallel()
	n := newNode(t, map[string]string{"10-pods.conflist": bridgeConf(range4)})
	p := n.pod()
	a := n.attach(p)
	elsewhere := p
	elsewhere.NetNS = filepath.Join(n.dir, "loop")
	if err := os.Symlink("loop", elsewhere.NetNS); err != nil {
		t.Fatal(err)
	}
	if text, dead := n.wrong(elsewhere, a); dead || !strings.Contains(text, "cannot be checked") {
		t.Errorf("a namespace that cannot be opened: dead %t, %q", dead, text)
	}
	unnamed := *a
	unnamed.Interface = "" // the lookup fails for another reason than that there is none
	if text, dead := n.wrong(p, &unnamed); dead || !strings.Contains(text, "cannot be checked") {
		t.Errorf("an interface that cannot be looked up: dead %t, %q", dead, text)
	}
	if idle, err := Idle([]string{"10.7.200.200"}, []string{elsewhere.NetNS}, nil); err == nil {
		t.Errorf("idle although a namespace cannot be opened: %q", idle)
	}
	n.detach(p, a)
}

// A runtime with its own stack takes the addresses off the interface: while
// there is such a pod no address is known to be idle.
func TestAddressesOffTheInterfaceAreNotIdle(t *testing.T) {
	t.Parallel()
	n := newNode(t, map[string]string{"10-pods.conflist": bridgeConf(range4)})
	p := n.pod()
	a := n.attach(p)
	n.run(p.NetNS, "ip addr flush dev eth0")
	pins := []string{p.NetNS, filepath.Join(n.dir, "gone")}
	if idle, err := Idle(a.IPs, pins, nil); !errors.Is(err, ErrHidden) || len(idle) > 0 {
		t.Errorf("idle: %q, %v", idle, err)
	}
	// For one of our pods they are on record.
	if idle, err := Idle([]string{"10.7.200.200"}, pins, pins); err != nil && strings.Contains(err.Error(), p.NetNS) {
		t.Errorf("idle: %q, %v", idle, err)
	}
	n.detach(p, a)
}

// A process of a pod may make a network namespace: one whose link had no
// address kept all leases of orphans for as long as it lived.
func TestNetworksOfContainersHideNothing(t *testing.T) {
	t.Parallel()
	cmd := exec.Command("sh", "-c", "ip link add bare type bridge && ip link set bare up && ip address add 10.7.200.201/32 dev lo && echo made && exec sleep 600")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	if _, err := io.ReadFull(out, make([]byte, len("made"))); err != nil {
		t.Fatal(err)
	}
	addresses := []string{"10.7.200.201", "10.7.200.202"}
	if idle, err := Idle(addresses, nil, nil); err != nil || !slices.Equal(idle, addresses) {
		t.Errorf("idle: %q, %v", idle, err)
	}
}

// A pod may have any number of addresses and links. Not all are read, and the
// pod's own is found, even if it comes last.
func TestManyAddressesAreNotAllRead(t *testing.T) {
	t.Parallel()
	n := newNode(t, map[string]string{"10-pods.conflist": bridgeConf(range4)})
	p := n.pod()
	a := n.attach(p)
	own := a.IPs[0]
	n.run(p.NetNS, `for i in $(seq 70); do echo "link add l$i type bridge"; done | ip -batch -
		ip addr flush dev eth0
		for i in $(seq 1100); do echo "addr add 10.9.$((i/250)).$((i%250+1))/32 dev eth0"; done | ip -batch -
		ip addr add `+own+`/16 dev eth0`)
	if text, _ := n.wrong(p, a); text != "" {
		t.Error(text)
	}
	err := ns.Do(p.NetNS, func() error {
		set, err := addressesOn(0)
		if len(set.ips) > maxAddresses || !set.truncated {
			t.Errorf("%d addresses are read, truncated %t", len(set.ips), set.truncated)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	if idle, err := Idle([]string{own, "10.7.200.203"}, []string{p.NetNS}, nil); err != nil || !slices.Equal(idle, []string{"10.7.200.203"}) {
		t.Errorf("idle: %q, %v", idle, err)
	}
	n.run(p.NetNS, "ip addr flush dev eth0; ip addr add "+own+"/16 dev eth0") // the plugin releases what it finds
	n.detach(p, a)
}

func TestVerifyHostPorts(t *testing.T) {
	t.Parallel()
	n := newNode(t, map[string]string{"10-pods.conflist": plainConf(range4 + "," + range6)})
	verify := func() string {
		t.Helper()
		var wrong []string
		err := n.do(func() (err error) {
			wrong, err = n.VerifyHostPorts(context.Background())
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return strings.Join(wrong, "\n")
	}
	expect := func(what, want string) {
		t.Helper()
		if got := verify(); !strings.Contains(got, want) || want == "" && got != "" {
			t.Errorf("%s: %q, want %q", what, got, want)
		}
	}
	expect("no pods", "")
	p := n.pod()
	p.PortMappings = []*cri.PortMapping{
		mapping(cri.Protocol_TCP, 8080, 80, ""), mapping(cri.Protocol_UDP, 8081, 81, "10.7.0.1"), mapping(cri.Protocol_SCTP, 8082, 82, "0.0.0.0"),
	}
	a := n.expose(p)
	live := map[string]*Attachment{p.ID: a}
	expect("as made", "")
	for _, c := range []struct{ script, want string }{
		{"nft delete element ip crius-hostports ports '{ 6 . 8080 }'", "ports { 6 . 8080 : " + a.IPs[0] + " . 80 } is missing"},
		{"nft add element ip6 crius-hostports ports '{ 6 . 9 : fd00:7::9 . 9 }'", "ports { 6 . 9 : fd00:7::9 . 9 } belongs to no pod"},
		{"nft flush chain ip crius-hostports translate", "chain translate of table ip crius-hostports has 0 rules"},
		{"nft delete table ip6 crius-hostports", "table ip6 crius-hostports is missing"},
		{"nft flush ruleset", "table ip crius-hostports is missing"},
	} {
		n.run(n.host.Net, c.script)
		expect(c.script, c.want)
		n.restart() // a program that only inspects
		n.Load(live)
		expect(c.script+", from the records", c.want)
		n.recover(live)
		expect("restored", "")
	}
	n.restart()
	expect("without the records", "no pod has host ports")
	n.recover(live)
	n.detach(p, a)
	expect("detached", "")
}
