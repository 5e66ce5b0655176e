package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/crius-run/crius/test/images"
	"github.com/crius-run/crius/test/kit/containerd"
	"github.com/crius-run/crius/test/kit/node"
)

// server is any CRI server, on its own node.
type server struct {
	client
	label   string
	on      *node.Node // crius does not run on it if the server is another one
	program program
	used    accounting
	end     func() error // of the program and its node
	metrics func(ctx context.Context) (string, error)
}

// program is the serving program. Kill uses SIGKILL; Start returns once it
// answers.
type program interface {
	Start(ctx context.Context) error
	Stop() error
	Kill() error
	PID() int
}

func newServer(label string, n *node.Node, handler string) *server {
	return &server{label: label, on: n, client: client{
		handler: handler, image: images.Probe, args: []string{"sleep"}, probe: []string{"/probe", "exit", "0"},
		logs: n.Path("logs"), cgroup: func(string) string { return n.CgroupParent() },
	}}
}

func (s *server) name() string          { return s.label }
func (s *server) cpu() (float64, error) { return s.used.seconds() }
func (s *server) where() *node.Node     { return s.on }

func (s *server) close() error { return s.end() }

// newCrius runs crius with an operator's settings, not a test's.
func newCrius(ctx context.Context, handler string) (*server, error) {
	return newCriusOn(ctx, handler, node.Options{})
}

// newCriusOn is the same on another node.
func newCriusOn(ctx context.Context, handler string, o node.Options) (_ *server, err error) {
	o.Config = "log_level = \"info\"\n" + o.Config
	n, err := node.New(ctx, o)
	if err != nil {
		return nil, err
	}
	s := newServer(crius, n, handler)
	s.conn, s.program, s.end = n.Conn(), n, n.Close
	s.metrics = func(ctx context.Context) (string, error) {
		return get(ctx, "unix", filepath.Join(n.RunRoot(), "metrics.sock"), "/metrics")
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	return s, s.start(ctx)
}

// start starts the server, puts it into its accounting cgroup and gives it its
// images.
func (s *server) start(ctx context.Context) (err error) {
	if s.used, err = newAccounting("/" + s.on.ID); err != nil {
		return err
	}
	if err := s.program.Start(ctx); err != nil {
		return err
	}
	if err := s.used.enter(s.program.PID()); err != nil {
		return err
	}
	built, err := images.Build(nil)
	if err != nil {
		return err
	}
	s.on.Registry.Push("probe", "latest", built)
	return s.pull(ctx, images.Probe, built)
}

// peer is the kind of containerd in this run.
var peer = containerd.Kinds["current"]

// ofDebian ends the name of Debian's containerd in tables in which another one
// is the peer as well.
const ofDebian = " (Debian's)"

// peerOf returns the peer for a handler, and its name in tables. Debian's crun
// does not accept the version of the runtime specification that a current
// containerd writes.
func peerOf(handler string) (kind containerd.Kind, name string) {
	if handler == "crun" {
		return containerd.Kinds["debian"], "containerd" + ofDebian
	}
	return peer, "containerd"
}

// newContainerd runs the peer on its own node.
func newContainerd(ctx context.Context, handler string, o node.Options) (_ *server, err error) {
	kind, label := peerOf(handler)
	c, err := containerd.New(ctx, kind, o)
	if err != nil {
		return nil, err
	}
	s := newServer(label, c.Node, handler)
	s.conn, s.program, s.end = c.Conn(), c, c.Close
	s.metrics = func(ctx context.Context) (string, error) { return c.Get(ctx, containerd.Metrics, "/v1/metrics") }
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	if err := s.start(ctx); err != nil {
		return nil, err
	}
	return s, s.pull(ctx, containerd.PauseImage, c.Pause)
}

// bundle returns the directory of one of crius's containers.
func (s *server) bundle(container string) string {
	return filepath.Join(s.on.RunRoot(), "containers", container)
}

// lowers returns the layers of the root file system of one of crius's
// containers, as the kernel lists them.
func (s *server) lowers(container string) (string, error) {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if fields[4] != filepath.Join(s.bundle(container), "rootfs") {
			continue
		}
		var layers []string
		for option := range strings.SplitSeq(fields[len(fields)-1], ",") {
			if key, layer, _ := strings.Cut(option, "="); key == "lowerdir" || key == "lowerdir+" {
				layers = append(layers, layer)
			}
		}
		return strings.Join(layers, ":"), nil
	}
	return "", fmt.Errorf("container %s has no root file system", container)
}
