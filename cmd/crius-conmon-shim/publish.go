package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	eventservice "github.com/containerd/containerd/api/services/ttrpc/events/v1"
	"github.com/containerd/ttrpc"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/crius-run/crius/conmon/shim"
	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/internal/unixsocket"
)

// oomTopic is the only kind of event that is needed: Wait reports how a container ended,
// but nothing else reports OOM kills.
const oomTopic = "/tasks/oom"

// maxEvent is far more bytes than any event has.
const maxEvent = 1 << 20

// publish handles an event that a shim passes on standard input. Shims run it in their own
// working directory.
func publish(topic string, event io.Reader) error {
	if topic != oomTopic {
		return nil
	}
	text, err := io.ReadAll(io.LimitReader(event, maxEvent))
	if err != nil {
		return err
	}
	var envelope anypb.Any
	if err := proto.Unmarshal(text, &envelope); err != nil {
		return fmt.Errorf("event %s: %w", topic, err)
	}
	dir, err := os.Getwd()
	if err != nil {
		return err
	}
	return noteOOM(dir, envelope.GetValue())
}

// noteOOM marks the run directory of the container that an OOM event names. That directory
// is a sibling of dir, where the shim works, or is among the server's containers if dir is
// a pod's. The name comes from the guest, which may only name its own containers.
func noteOOM(dir string, event []byte) error {
	id, err := containerOf(event)
	if err != nil {
		return fmt.Errorf("event %s: %w", oomTopic, err)
	}
	if id == "" || strings.ContainsAny(id, "/\x00") || strings.HasPrefix(id, ".") {
		return fmt.Errorf("event %s: invalid container ID %q", oomTopic, id)
	}
	for _, beside := range []string{"..", "../../../containers"} {
		bundle := filepath.Join(dir, beside, id)
		if _, err := os.Lstat(filepath.Join(bundle, configFile)); err != nil {
			continue
		}
		if !together(dir, bundle) {
			return fmt.Errorf("event %s: container %s does not belong to this shim", oomTopic, id)
		}
		return os.WriteFile(filepath.Join(bundle, wire.OOMFile), nil, 0o600)
	}
	return nil // the infra container, or one that is gone
}

const configFile = "config.json"

// together reports whether the containers of two bundles have the same shim or, since some
// runtimes have a shim for each container, live in the same sandbox.
func together(one, other string) bool {
	a, errA := shim.ReadRecord(one)
	b, errB := shim.ReadRecord(other)
	if errA == nil && errB == nil && a.Address != "" && a.Address == b.Address {
		return true
	}
	sandbox := sandboxOf(one)
	return sandbox != "" && sandbox == sandboxOf(other)
}

// sandboxOf returns the id of the pod that the server has written into a bundle, "" if
// there is none.
func sandboxOf(bundle string) string {
	var spec struct{ Annotations map[string]string }
	text, err := os.ReadFile(filepath.Join(bundle, configFile))
	if err != nil || json.Unmarshal(text, &spec) != nil {
		return ""
	}
	return spec.Annotations["io.kubernetes.cri.sandbox-id"]
}

// containerOf returns the container's id, the only field of the message TaskOOM. Importing
// its package, containerd/api/events, would add several others.
func containerOf(event []byte) (string, error) {
	number, kind, n := protowire.ConsumeTag(event)
	if n < 0 || number != 1 || kind != protowire.BytesType {
		return "", errors.New("not a TaskOOM message")
	}
	id, n := protowire.ConsumeString(event[n:])
	return id, protowire.ParseError(min(n, 0))
}

// forwarder receives the events of shims that do not run a publisher.
type forwarder struct{ dir string }

func (f forwarder) Forward(_ context.Context, r *eventservice.ForwardRequest) (*emptypb.Empty, error) {
	if r.GetEnvelope().GetTopic() == oomTopic {
		if err := noteOOM(f.dir, r.Envelope.GetEvent().GetValue()); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
	}
	return new(emptypb.Empty), nil
}

// serveEvents receives events at a socket in dir. It replaces the socket of a process that
// has died.
func serveEvents(ctx context.Context, dir string) (stop func(), err error) {
	path := filepath.Join(dir, eventSocket)
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	listener, err := unixsocket.Listen(ctx, path, unixsocket.Private)
	if err != nil {
		return nil, err
	}
	server, err := ttrpc.NewServer()
	if err != nil {
		return nil, errors.Join(err, listener.Close())
	}
	eventservice.RegisterTTRPCEventsService(server, forwarder{dir})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = server.Serve(ctx, listener) // until it is closed
	}()
	return func() {
		_ = server.Close()
		<-ended
	}, nil
}
