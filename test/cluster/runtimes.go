package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/containerd"
	"github.com/crius-run/crius/test/kit/critest"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/tools"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// The runtimes with which the tests can be run.
const (
	withCrius      = "crius"
	withContainerd = "containerd"
)

// A trial is one run of the tests.
type trial struct {
	options
	programs tools.Cluster
	images   *images
	dir      string // for the log and the report
}

// hostFiles are what the tests of host paths write on the machine itself, and
// leave there.
var hostFiles = []string{"/tmp/test-file", "/tmp/sub-path", "/tmp/job-e2e"}

// run runs the tests on its own node.
func (t *trial) run(ctx context.Context) (_ *result, err error) {
	for _, file := range hostFiles {
		if _, err := os.Lstat(file); !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("the tests of host paths would overwrite %s: move it away", file)
		}
		defer func() { err = errors.Join(err, os.RemoveAll(file)) }()
	}
	if t.runtime == withContainerd {
		return t.onContainerd(ctx)
	}
	return t.onCrius(ctx)
}

// onCrius adds to the failures what the pods have left behind.
func (t *trial) onCrius(ctx context.Context) (_ *result, err error) {
	runc, err := tools.Runc(ctx)
	if err != nil {
		return nil, err
	}
	o := node.Options{Config: fmt.Sprintf("[runtime]\ndefault_handler = %q\n[runtime.handlers.runc-current]\npath = %q\n", t.handler, runc)}
	var kubelet map[string]any
	if t.selection.disk {
		o.ImageDisk, kubelet = diskSize<<20, diskKubelet
		o.Config += diskConfig
	}
	w, err := scene.New(ctx, o)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	t.images.push(w.Registry)
	if err := errors.Join(w.Registries(critest.Registries(node.RegistryAddress)), w.Restart(ctx)); err != nil {
		return nil, err
	}
	c, err := newCluster(ctx, w.Node, t.programs, w.Socket(), w.Conn(), kubelet)
	if err != nil {
		return nil, err
	}
	if t.selection.disk {
		c.kubeletArgs = diskKubeletArgs
	}
	if err := w.Settle(ctx, t.handler); err != nil {
		return nil, err
	}
	r, err := t.in(ctx, c)
	if err != nil {
		return nil, fmt.Errorf("%w\nend of the server's log:\n%s", err, w.LogTail(20))
	}
	if err := w.Clean(ctx, w.Empty, wait.Limit); err != nil {
		r.fail("what is left", err)
	}
	if err := w.Stop(); err != nil {
		r.fail("the server at its end", err)
	}
	for _, fault := range w.Faults() {
		r.fail("the server's log", errors.New(fault))
	}
	return r, nil
}

func (t *trial) onContainerd(ctx context.Context) (_ *result, err error) {
	c, err := containerd.New(ctx, containerd.Kinds["current"], node.Options{})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	t.images.push(c.Registry)
	if err := c.Start(ctx); err != nil {
		return nil, err
	}
	pause := &cri.PullImageRequest{Image: &cri.ImageSpec{Image: containerd.PauseImage}}
	if _, err := cri.NewImageServiceClient(c.Conn()).PullImage(ctx, pause); err != nil {
		return nil, err
	}
	cluster, err := newCluster(ctx, c.Node, t.programs, c.Socket(), c.Conn(), nil)
	if err != nil {
		return nil, err
	}
	return t.in(ctx, cluster)
}

// in runs the tests in a cluster, which it starts and stops.
func (t *trial) in(ctx context.Context, c *cluster) (_ *result, err error) {
	defer func() { err = errors.Join(err, c.stop()) }()
	if err := c.up(ctx); err != nil {
		return nil, err
	}
	fmt.Printf("%s: Kubernetes %s is ready\n", t.runtime, t.programs.Version)
	if t.selection.disk {
		return c.fillDisk(ctx, t.images)
	}
	if err := c.api.runPod(ctx, t.images.one("agnhost")); err != nil {
		return nil, err
	}
	r, err := c.runTests(ctx, t)
	if err != nil {
		return nil, err
	}
	if t.own {
		c.evict(ctx, t.images.one("busybox"), r)
	}
	if err := c.emptied(ctx); err != nil {
		r.fail("what is left", err)
	}
	return r, nil
}
