// Package unpack is the side of the pull worker in the protocol between it and its server,
// and the program that adds layers to containers/storage. See
// docs/decisions/0019-pull-worker.md.
//
// The program is started once for each image, and by containers/storage once more for each
// layer. So it links containers/storage and little else, which test/layout checks: how long
// it takes to start is most of what a small layer costs (docs/decisions/0051-unpack-program.md).
package unpack

import (
	"context"
	"fmt"
	"os"
	"unsafe"

	cstorage "go.podman.io/storage"
	"go.podman.io/storage/pkg/reexec"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/idlists"
	"github.com/crius-run/crius/storage/unpack/layers"
	"github.com/crius-run/crius/storage/unpack/untar"
)

// Name is that of the program, and its only argument when the server starts it.
const Name = "crius-unpack"

// VersionFlag makes the program print Version and end.
const VersionFlag = "--version"

// Version says which protocol the program speaks.
func Version() string { return fmt.Sprintf("%s with protocol %d", Name, Protocol) }

// Main does what the process was started for, by a server or by containers/storage, and
// reports whether it was.
func Main() bool {
	if untar.Child() || reexec.Init() {
		return true
	}
	if len(os.Args) != 1 || os.Args[0] != Name || !hasServer() {
		return false
	}
	_ = unix.Prctl(unix.PR_SET_NAME, uintptr(unsafe.Pointer(unsafe.StringData(Name+"\x00"))), 0, 0, 0) // it was started by the name of a descriptor
	unix.CloseOnExec(ProgramFD)
	Work(func(ctx context.Context, s *Server) (Message, error) {
		var order Order
		if err := s.Order(&order); err != nil || order.Protocol != Protocol {
			return Message{}, fmt.Errorf("crius-unpack is of another version than the server: install both from one package and restart crius: %w", fault.Precondition)
		}
		return Message{Unpacked: true}, s.putLayers(ctx, order)
	})
	return true
}

// hasServer tells whether the process has a socket to a server; one that a shell has started
// has none.
func hasServer() bool {
	var st unix.Stat_t
	return unix.Fstat(socketFD, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFSOCK
}

// putLayers adds the layers to the store.
func (s *Server) putLayers(ctx context.Context, order Order) error {
	store, err := order.OpenStore()
	if err != nil {
		return err
	}
	in := layers.Intake{
		Store: store, Dir: order.Temporary, Parallel: max(order.Parallel, 1),
		Fetch: func(l layers.Layer) (layers.Arrival, error) { return s.Fetch(Blob{l.Blob, l.Size}) },
		Added: func(l layers.Layer) { s.Send(Message{Added: &Blob{l.Blob, l.Size}}) },
		Lost:  func(l layers.Layer, err error) { s.Lost(fmt.Errorf("blob %s: %w", l.Blob, err)) },
	}
	return in.Put(ctx, order.Layers)
}

// OpenStore opens the store of the order, which the server has mounted.
func (o *Order) OpenStore() (cstorage.Store, error) {
	o.Store.GraphDriverOptions = append(o.Store.GraphDriverOptions, o.Store.GraphDriverName+".skip_mount_home=true")
	store, err := cstorage.GetStore(o.Store)
	if err != nil {
		return nil, fmt.Errorf("open image store: %w", err)
	}
	return layers.BoundFiles(layers.BoundRepeats(layers.AnyName(idlists.Forget(store), o.Temporary), o.RepeatRoom)), nil
}
