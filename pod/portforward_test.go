package pod

import (
	"context"
	"errors"
	"net"
	"testing"

	"github.com/crius-run/crius/test/kit/wait"
)

// A port-forward that has found a pod ready does not connect to the node if the pod ends before
// it connects: like pods in the node's network, an ended pod has no network namespace.
func TestPortForwardToPodThatHasEnded(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	l, err := net.Listen("tcp", "127.0.0.1:0") // on the node
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	s, err := e.sandboxes.Find(pod)
	if err != nil {
		t.Fatal(err)
	}
	ready := s.View()
	if ready.NetNS == "" {
		t.Fatal("the pod has no network namespace of its own")
	}
	if err := e.StopSandbox(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	if conn, err := s.dial(t.Context(), ready, uint16(l.Addr().(*net.TCPAddr).Port)); err == nil {
		conn.Close()
		t.Error("connected to a port of the node")
	}
	b.remove(e, pod)
	b.nothingLeft()
}

// A port-forward that is still connecting ends with the pod, and says so.
func TestStopPodCallsOffPortForward(t *testing.T) {
	b := newBench(t)
	b.node.sandbox = true
	b.node.block["forward 80"] = make(chan struct{})
	e := b.engine()
	pod := b.run(e, "a")
	client, leave := context.WithCancel(context.Background())
	defer leave()
	forwarded := make(chan error, 1)
	go func() { forwarded <- e.PortForward(client, pod, 80, nil) }()
	b.awaitCalls("forward 80", 1)
	if err := e.StopSandbox(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	wait.For(t, "the port-forward to end", func() bool { return len(forwarded) > 0 })
	if err := <-forwarded; !errors.Is(err, errPodEnding) {
		t.Errorf("it ended with %v", err)
	}
	b.remove(e, pod)
	b.nothingLeft()
}
