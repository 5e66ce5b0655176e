// Package worker is the program crius-unpack, which unpacks the layers of one image, and the worker's
// end of the connection to its server (package wire). See docs/decisions/0019-pull-worker.md.
//
// The program is started once for each image. So it links what unpacks and little else, which
// test/layout checks: how long it takes to start is most of what a small image costs
// (docs/decisions/0051-unpack-program.md). The server adds the layers to the store.
package worker

import (
	"context"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/unpack/layers"
	"github.com/crius-run/crius/storage/unpack/wire"
)

// Main does the work for which a server has started the process, and reports whether there was any.
func Main() bool {
	if len(os.Args) != 1 || os.Args[0] != wire.Name || !hasServer() {
		return false
	}
	_ = unix.Prctl(unix.PR_SET_NAME, uintptr(unsafe.Pointer(unsafe.StringData(wire.Name+"\x00"))), 0, 0, 0) // else it has the name of a descriptor
	Work(func(ctx context.Context, c *Client) (wire.Message, error) {
		var order wire.Order
		if err := c.Order(&order); err != nil || order.Protocol != wire.Protocol {
			return wire.Message{}, fmt.Errorf("crius-unpack is of another version than the server: install both from one package and restart crius: %w", fault.Precondition)
		}
		return wire.Message{Unpacked: true}, c.putLayers(ctx, order)
	})
	return true
}

// hasServer reports whether the process has a socket to a server. A process that a shell has
// started has none.
func hasServer() bool {
	var st unix.Stat_t
	return unix.Fstat(wire.SocketFD, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFSOCK
}

// putLayers unpacks the layers, and has the server add them to the store.
func (c *Client) putLayers(ctx context.Context, order wire.Order) error {
	store, err := openStore()
	if err != nil {
		return err
	}
	in := layers.Intake{
		Into: layers.NewUnpacker(store, order.Staging, order.RepeatRoom), Dir: order.Temporary,
		Parallel: max(order.Parallel, 1), Unpack: max(order.Unpack, 1),
		Fetch: func(l layers.Layer) (layers.Arrival, error) { return c.Fetch(wire.Blob{Digest: l.Blob, Size: l.Size}) },
		Added: func(l layers.Layer) { c.Send(wire.Message{Added: &wire.Blob{Digest: l.Blob, Size: l.Size}}) },
		Lost:  func(l layers.Layer, err error) { c.Lost(fmt.Errorf("blob %s: %w", l.Blob, err)) },
	}
	return in.Put(ctx, order.Layers)
}
