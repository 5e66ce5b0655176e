// Package node runs a private crius: a cluster node in miniature.
//
// Everything of a node is below one directory with a short name (a unix
// socket's path ends at 108 bytes): state, run and image roots, namespaces,
// logs, configuration, CNI leases. Its network is its own namespace, with its
// own bridges, firewall rules and registry port; its cgroups are below one
// parent of its own. Nodes can therefore run concurrently, and [Node.Inventory]
// knows what belongs to one.
//
// The directory is a tmpfs, so that a node neither waits for the machine's
// disk, which every sync of a file system does for all data on it, nor wears
// it; the power cuts of test/node test durability. Its mount is shared, like
// the root of a systemd machine. Close removes everything that is left, and
// [claim.Sweep] does so for a process that was killed.
//
// The package depends on no testing package: the demo uses it too.
package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/ids"
	"github.com/crius-run/crius/test/kit/claim"
	"github.com/crius-run/crius/test/kit/inventory"
	"github.com/crius-run/crius/test/kit/registry"
	"github.com/crius-run/crius/test/kit/tools"
	"github.com/crius-run/crius/test/kit/wait"
)

// Options change a node. The zero value is a plain node.
type Options struct {
	// Config is TOML that overrides the node's own configuration.
	Config string
	// Env is added to the server's environment, as NAME=value.
	Env []string
	// Server is a program that serves in place of crius, such as [PointsServer];
	// empty: crius itself.
	Server string
	// Race builds the server with the race detector; see [tools.Programs].
	Race bool
	// Runtimes are the runtime programs that the machine must have; nil: runc and
	// crun.
	Runtimes []string
	// Disk puts the node on the machine's disk, for tests of what a tmpfs lacks,
	// such as a file cache.
	Disk bool
	// ImageDisk puts the images and crius's state, with the containers' writable
	// layers, on a file system of their own of that many bytes; 0: with the rest.
	ImageDisk int64
}

// Node is one private crius with its network and disk. Its methods may be
// called by several goroutines, except that only one may call Start, Stop, Kill
// and Reboot.
type Node struct {
	ID  string // short and unique on this machine
	Dir string // everything on disk lies below

	// Registry serves images named RegistryHost/REPOSITORY to the server.
	Registry *registry.Registry

	claim    *claim.Claim
	data     string // the directory of images and crius's state
	programs string
	program  string // of the server
	env      []string
	net      *network
	conn     *grpc.ClientConn

	mu      sync.Mutex
	server  *exec.Cmd
	done    chan struct{} // closed when the server has ended
	exitErr error         // valid after done
	boots   int
}

// New makes a node, but does not start its server.
func New(ctx context.Context, o Options) (_ *Node, err error) {
	if err := preflight(o.Runtimes); err != nil {
		return nil, err
	}
	programs, err := tools.Programs(ctx, o.Race)
	if err != nil {
		return nil, err
	}
	owned, err := claim.New()
	if err != nil {
		return nil, err
	}
	n := &Node{ID: owned.ID, Dir: owned.Dir, claim: owned, data: owned.Dir, programs: programs, program: o.Server, env: o.Env}
	if n.program == "" {
		n.program = n.Program("crius")
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, n.Close())
		}
	}()
	if err := n.makeDir(o.Disk); err != nil {
		return nil, err
	}
	if o.ImageDisk > 0 {
		if err := n.makeImageDisk(o.ImageDisk); err != nil {
			return nil, err
		}
	}
	if n.net, err = newNetwork(); err != nil {
		return nil, err
	}
	l, err := n.Listen(RegistryAddress)
	if err != nil {
		return nil, err
	}
	n.Registry = registry.New()
	n.Registry.Serve(l)
	if err := n.writeConfig(o.Config); err != nil {
		return nil, err
	}
	n.conn, err = Connect(n.Socket())
	return n, err
}

func (n *Node) makeDir(disk bool) error {
	if err := os.Mkdir(n.Dir, 0o755); err != nil {
		return err
	}
	var err error
	if mapsIDs, kernelErr := tmpfsMapsIDs(); mapsIDs && !disk {
		err = unix.Mount("tmpfs", n.Dir, "tmpfs", 0, "mode=755")
	} else {
		err = errors.Join(kernelErr, unix.Mount(n.Dir, n.Dir, "", unix.MS_BIND, ""))
	}
	if err != nil {
		return fmt.Errorf("mount %s: %w", n.Dir, err)
	}
	if err := unix.Mount("", n.Dir, "", unix.MS_SHARED, ""); err != nil {
		return fmt.Errorf("share mount %s: %w", n.Dir, err)
	}
	return nil
}

// makeImageDisk mounts a file system for images and crius's state.
func (n *Node) makeImageDisk(bytes int64) error {
	n.data = n.Path("disk")
	if err := os.Mkdir(n.data, 0o755); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", n.data, "tmpfs", 0, fmt.Sprintf("mode=755,size=%d", bytes)); err != nil {
		return fmt.Errorf("mount %s: %w", n.data, err)
	}
	return nil
}

// tmpfsMapsIDs reports whether a tmpfs can be mounted with mapped ids, as pods
// in user namespaces need it: since Linux 6.3.
func tmpfsMapsIDs() (bool, error) {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return false, err
	}
	var major, minor int
	release := unix.ByteSliceToString(name.Release[:])
	if _, err := fmt.Sscanf(release, "%d.%d", &major, &minor); err != nil {
		return false, fmt.Errorf("kernel release %q: %w", release, err)
	}
	return major > 6 || major == 6 && minor >= 3, nil
}

// Path returns the path of a file or directory of the node.
func (n *Node) Path(elem ...string) string {
	return filepath.Join(append([]string{n.Dir}, elem...)...)
}

// Socket returns the path at which CRI is served.
func (n *Node) Socket() string { return n.Path("crius.sock") }

// StateRoot returns the directory of crius's durable state.
func (n *Node) StateRoot() string { return filepath.Join(n.data, "lib") }

// ImageRoot returns the directory of crius's image store.
func (n *Node) ImageRoot() string { return filepath.Join(n.data, "img") }

// RunRoot returns the directory of crius's volatile state.
func (n *Node) RunRoot() string { return n.Path("r") }

// CgroupParent returns the cgroup below which pods live, relative to each
// hierarchy.
func (n *Node) CgroupParent() string { return "/" + n.ID + "/pods" }

// Program returns the path of crius or crius-conmon.
func (n *Node) Program(name string) string { return filepath.Join(n.programs, name) }

// Runtime returns a client of the node's RuntimeService.
func (n *Node) Runtime() cri.RuntimeServiceClient { return cri.NewRuntimeServiceClient(n.conn) }

// Images returns a client of the node's ImageService.
func (n *Node) Images() cri.ImageServiceClient { return cri.NewImageServiceClient(n.conn) }

// Conn returns the connection beneath both clients; it survives a restart.
func (n *Node) Conn() *grpc.ClientConn { return n.conn }

// Inventory lists what the node has now, except the server's own process.
func (n *Node) Inventory() (*inventory.Snapshot, error) {
	scope := inventory.Scope{
		Dir:     n.Dir,
		Roots:   []string{n.StateRoot(), n.RunRoot(), n.Path("ns")},
		Storage: n.ImageRoot(),
		Leases:  n.Path("cni", "leases"),
		Cgroup:  "/" + n.ID,
		NetNS:   n.net.inode,
		Within:  n.Do,
		Links:   []string{"lo", Bridge},
		Ignore:  []int{os.Getpid(), n.PID()},
		Shared:  inventory.OfRuntimes,
		Mark:    ids.Mark(n.StateRoot()),
	}
	return inventory.Take(scope)
}

// Stock returns an inventory for later comparisons: it leaves out what
// disappears by itself, such as a program that is ending, a temporary file that
// is about to be renamed, and zombies that are about to be reaped.
func (n *Node) Stock(ctx context.Context) (*inventory.Snapshot, error) {
	last, err := n.Inventory()
	if err != nil {
		return nil, err
	}
	var moves inventory.Difference
	atRest := wait.Until(ctx, func() bool {
		var now *inventory.Snapshot
		if now, err = n.Inventory(); err != nil {
			return true
		}
		now.Drop(now.About("] Z ")...)
		moves = inventory.Diff(last, now)
		last = now
		return moves.Empty()
	})
	if err == nil && !atRest {
		err = fmt.Errorf("the node does not come to rest:\n%s", moves)
	}
	return last, err
}

// Clean waits until the node has nothing that it did not have in before, or
// returns what is left.
func (n *Node) Clean(ctx context.Context, before *inventory.Snapshot, patience time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var left inventory.Difference
	var err error
	clean := wait.Until(ctx, func() bool {
		var now *inventory.Snapshot
		if now, err = n.Inventory(); err != nil {
			return true
		}
		left = inventory.Diff(before, now)
		return left.Empty()
	})
	if err == nil && !clean {
		err = fmt.Errorf("the node is not as it was before:\n%s", left)
	}
	return err
}

// Close ends the server and removes everything of the node.
func (n *Node) Close() error {
	var errs []error
	if n.conn != nil {
		errs = append(errs, n.conn.Close())
	}
	errs = append(errs, n.Kill(), n.claim.Release())
	if n.Registry != nil {
		n.Registry.Close()
	}
	if n.net != nil {
		errs = append(errs, n.net.close())
	}
	return errors.Join(errs...)
}
