package shim

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/containerd/containerd/api/runtime/bootstrap/v1"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/poll"
)

// Endpoint is where a shim listens and what it understands.
type Endpoint struct {
	Address string `json:"address"` // unix:///path or, without a scheme, the name of an abstract socket
	Version int    `json:"version"` // of the task service: 2 or 3
}

// parseEndpoint reads the answer to start, in one of three forms: the bare
// address, as up to containerd 1.7 and with Kata; a JSON object, as with gVisor
// and containerd 2; the same object as a protobuf message.
func parseEndpoint(answer []byte) (Endpoint, error) {
	text := strings.TrimSpace(string(answer))
	var result bootstrap.BootstrapResult
	switch {
	case strings.HasPrefix(text, "{"):
		if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal([]byte(text), &result); err != nil {
			return Endpoint{}, fmt.Errorf("cannot parse its answer %.200q: %w", text, err)
		}
	case proto.Unmarshal(answer, &result) == nil && result.Version > 0 && result.Address != "":
	default:
		result = bootstrap.BootstrapResult{Version: 2, Address: text, Protocol: "ttrpc"}
	}
	e := Endpoint{Address: result.Address, Version: int(result.Version)}
	scheme, _, hasScheme := strings.Cut(e.Address, "://")
	switch {
	case hasScheme && scheme != "unix":
		return e, fmt.Errorf("unsupported shim address %.200q: only unix sockets are supported", e.Address)
	case !e.dialable():
		return e, fmt.Errorf("its answer %.200q has no address", answer)
	case result.Protocol != "ttrpc" && result.Protocol != "":
		return e, fmt.Errorf("unsupported shim protocol %q: only ttrpc is supported", result.Protocol)
	case e.Version != 2 && e.Version != 3:
		return e, fmt.Errorf("unsupported version %d of the task service: only 2 and 3 are supported", e.Version)
	}
	return e, nil
}

// dialable reports whether the address names a socket and can be recorded: a
// relative path would depend on the directory of the process that dials.
func (e Endpoint) dialable() bool {
	socket := e.sockets()[0]
	return len(socket) > 1 && (socket[0] == '/' || socket[0] == '@') &&
		utf8.ValidString(socket) && !strings.ContainsAny(socket, "\n\x00")
}

// sockets returns the names under which the kernel may know the address.
// Without a scheme it is that of an abstract socket, as in containerd, even if
// it looks like a path: Kata 1 answers /containerd-shim/…/shim.sock. Shims
// built with Go before 1.22 bind an abstract name with a NUL at its end, which
// to the kernel is another name.
func (e Endpoint) sockets() []string {
	name, hasScheme := strings.CutPrefix(e.Address, "unix://")
	if hasScheme && !strings.HasPrefix(name, "@") {
		return []string{name}
	}
	name = "@" + strings.TrimPrefix(name, "@")
	return []string{name, name + "\x00"}
}

// dial connects, once. The error is fault.NotFound if nothing listens there.
func (e Endpoint) dial(ctx context.Context) (conn net.Conn, err error) {
	var dialer net.Dialer
	for _, socket := range e.sockets() {
		conn, err = dialer.DialContext(ctx, "unix", socket)
		if !errors.Is(err, unix.ECONNREFUSED) && !errors.Is(err, unix.ENOENT) {
			return conn, err
		}
	}
	return nil, fmt.Errorf("the shim is dead: %w: %w", err, fault.NotFound)
}

// dialTime is how long one attempt to connect to a shim with a full queue may
// take.
const dialTime = time.Second

// await connects to a shim that has just been started.
func (e Endpoint) await(ctx context.Context) (net.Conn, error) {
	const timeout, pause = 10 * time.Second, 5 * time.Millisecond
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	var conn net.Conn
	var err error
	poll.Until(ctx, pause, func() bool {
		once, done := context.WithTimeout(context.WithoutCancel(ctx), dialTime) // the last attempt comes after the end of ctx
		defer done()
		conn, err = e.dial(once)
		return err == nil
	})
	if err != nil {
		return nil, fmt.Errorf("connect to the shim at %s: %w", e.Address, err)
	}
	return conn, nil
}

// RemoveSocket removes the socket that a dead shim has left in the file system.
// It touches nothing else that the shim may have given as its address.
func (e Endpoint) RemoveSocket(ctx context.Context) error {
	path := e.sockets()[0]
	if !strings.HasPrefix(path, "/") {
		return nil
	}
	if st, err := os.Lstat(path); err != nil || st.Mode().Type() != os.ModeSocket {
		if errors.Is(err, os.ErrNotExist) {
			err = nil
		}
		return err
	}
	conn, err := e.dial(ctx)
	if err == nil {
		return conn.Close()
	}
	if !errors.Is(err, fault.NotFound) {
		return err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}
