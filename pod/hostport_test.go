package pod

import (
	"errors"
	"maps"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/pod/records"
)

func (b *bench) runWithPort(e *Engine, name string) (string, error) {
	cfg := podConfig(name)
	cfg.PortMappings = []*cri.PortMapping{{HostPort: 8080, ContainerPort: 80}}
	return e.RunSandbox(b.Context(), "", cfg)
}

// TestHostPortsFollowTheRecords: after each restart, ports lead to the pods that live and to no
// other, whatever rules the firewall had.
func TestHostPortsFollowTheRecords(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	plain := b.run(e, "plain")
	live, err := b.runWithPort(e, "live")
	if err != nil {
		t.Fatal(err)
	}
	stopped, err := b.runWithPort(e, "stopped")
	if err != nil {
		t.Fatal(err)
	}
	if err := e.StopSandbox(t.Context(), stopped); err != nil {
		t.Fatal(err)
	}
	want := map[string]bool{live: true}
	for what, change := range map[string]func(){
		"nothing": func() {},
		"wiped":   func() { clear(b.node.exposed) },
		"more":    func() { b.node.exposed[stopped], b.node.exposed[plain] = true, true },
	} {
		b.close(e)
		change()
		e = b.engine()
		if !maps.Equal(b.node.exposed, want) {
			t.Errorf("%s: ports lead to %v, want %v", what, b.node.exposed, want)
		}
	}
	b.close(e)
	b.node.fail["restore"] = errInjected // no reason not to start
	e = b.engine()
	b.node.set(func() { delete(b.node.fail, "restore") })
	b.close(e)
	b.boot = "another"
	e = b.engine()
	if len(b.node.exposed) > 0 {
		t.Errorf("after a reboot ports lead to %v", b.node.exposed)
	}
	b.removeAll(e)
}

// TestHostPortsThatFail: the pod fails and leaves nothing, and its record, with what is needed
// to undo it, exists before the firewall is changed.
func TestHostPortsThatFail(t *testing.T) {
	for _, half := range []bool{false, true} {
		b := newBench(t)
		e := b.engine()
		b.node.fail["expose"], b.node.half["expose"] = errInjected, half
		if _, err := b.runWithPort(e, "a"); !errors.Is(err, errInjected) {
			t.Errorf("pod runs with %v", err)
		}
		b.nothingLeft()
		delete(b.node.fail, "expose")

		wait := make(chan struct{})
		b.node.block["expose"] = wait
		done := make(chan error)
		go func() { _, err := b.runWithPort(e, "a"); done <- err }()
		b.awaitCalls("expose", 2)
		docs, _, _, err := e.records.Pods.All()
		if err != nil || len(docs) != 1 {
			t.Fatalf("records %v, %v", docs, err)
		}
		for _, rec := range docs {
			if rec.Phase != records.Creating || rec.Network == nil || len(rec.Network.HostPorts) != 1 || len(rec.Network.IPs) != 2 {
				t.Errorf("record before the rules: %+v", rec)
			}
		}
		close(wait)
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		b.removeAll(e)
	}
}

// TestPodWithoutANetworkHasNoHostPorts: in the node's network, each port is the node's.
func TestPodWithoutANetworkHasNoHostPorts(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	cfg := podConfig("host")
	cfg.PortMappings = []*cri.PortMapping{{HostPort: 8080, ContainerPort: 8080}}
	cfg.Linux.SecurityContext.NamespaceOptions.Network = cri.NamespaceMode_NODE
	if _, err := e.RunSandbox(t.Context(), "", cfg); err != nil {
		t.Fatal(err)
	}
	if n := b.node.count("plan") + b.node.count("expose"); n != 0 {
		t.Errorf("%d steps of the network", n)
	}
	b.removeAll(e)
}
