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

// oomTopic is the one kind of event that says what nobody else does. How a
// container has ended Wait tells.
const oomTopic = "/tasks/oom"

// maxEvent is far above the size of any event.
const maxEvent = 1 << 20

// publish is run by shims that tell of an event in this way: in the directory in
// which they themselves were started, with the event on standard input.
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

// noteOOM leaves a mark beside the container that an event of that topic is about:
// its run directory is a neighbour of the one in which the shim works, or the
// pod's containers are where those of the server are. Which one it is about is the
// word of the guest, that is not to speak of others' containers.
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
	return nil // the pod's own container, or one that is gone
}

const configFile = "config.json"

// together reports whether the containers of two bundles have the same shim or, as
// some shims have one for each container, live in the same sandbox.
func together(one, other string) bool {
	a, errA := shim.ReadRecord(one)
	b, errB := shim.ReadRecord(other)
	if errA == nil && errB == nil && a.Address != "" && a.Address == b.Address {
		return true
	}
	sandbox := sandboxOf(one)
	return sandbox != "" && sandbox == sandboxOf(other)
}

// sandboxOf is the id of the pod of a bundle, which the server has put there; empty
// if there is none.
func sandboxOf(bundle string) string {
	var spec struct{ Annotations map[string]string }
	text, err := os.ReadFile(filepath.Join(bundle, configFile))
	if err != nil || json.Unmarshal(text, &spec) != nil {
		return ""
	}
	return spec.Annotations["io.kubernetes.cri.sandbox-id"]
}

// containerOf is the first field, and the only one, of the message TaskOOM. (Its
// package, containerd/api/events, would bring several others along.)
func containerOf(event []byte) (string, error) {
	number, kind, n := protowire.ConsumeTag(event)
	if n < 0 || number != 1 || kind != protowire.BytesType {
		return "", errors.New("not a TaskOOM message")
	}
	id, n := protowire.ConsumeString(event[n:])
	return id, protowire.ParseError(min(n, 0))
}

// forwarder is where shims send their events that do not run a publisher.
type forwarder struct{ dir string }

func (f forwarder) Forward(_ context.Context, r *eventservice.ForwardRequest) (*emptypb.Empty, error) {
	if r.GetEnvelope().GetTopic() == oomTopic {
		if err := noteOOM(f.dir, r.Envelope.GetEvent().GetValue()); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
	}
	return new(emptypb.Empty), nil
}

// serveEvents takes events at a socket in dir, in the place of another process
// that has died.
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
