// Cluster runs the end-to-end tests of Kubernetes in a cluster of one node with
// crius, without the internet:
//
//	go run ./test/cluster [-runtime containerd] [-suite features] [-focus REGEXP] [-skip REGEXP]
//
// The cluster is etcd, an API server, a controller manager, a scheduler and a
// kubelet, all in the network of a node of package node. It makes the images
// that the tests use, as far as possible, and the node's registry serves them
// under their public names.
//
// The suite "conformance" is NodeConformance, "features" are the other tests of
// sig-node that need no cloud. "disk" runs none of them: on a node with a small
// file system for images and containers it fills that, and checks what the
// kubelet does. At the end of a run it prints the counts, what has not run and
// why, and what has failed:
//
//	crius: 162 passed, 0 failed, 13 not run
//
// The exit code is 1 if a spec failed that is not known to fail (see known.go),
// or if pods have left something behind on crius's node. The output of the
// tests and their report, in the format of JUnit, are kept in
// .cache/cluster/RUNTIME.log and .xml.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/crius-run/crius/test/kit/claim"
	"github.com/crius-run/crius/test/kit/tools"
)

// options are the settings of a run.
type options struct {
	runtime, handler string
	selection        selection
	own              bool // see evictions
}

func main() {
	runtime := flag.String("runtime", withCrius, "run pods with this: "+withCrius+" or "+withContainerd)
	handler := flag.String("handler", "runc", "run pods on crius with this runtime handler; runc-current is a runc of today")
	suite := flag.String("suite", "conformance", "run these specs: conformance or features; disk: none, but fill the image disk of a node with crius")
	focus := flag.String("focus", "", "run the specs whose names match this regular expression, in the place of the suite's")
	skip := flag.String("skip", "", "do not run specs whose names match this regular expression, in the place of those that the suite leaves out")
	flag.Parse()
	o := options{runtime: *runtime, handler: *handler}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := o.choose(*suite, *focus, *skip)
	if err == nil {
		err = run(ctx, o)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "\ncluster:", err)
		os.Exit(1)
	}
}

// choose decides which specs run.
func (o *options) choose(suite, focus, skip string) error {
	named, known := selections[suite]
	if !known {
		return fmt.Errorf("there is no suite %q: take conformance, features or disk", suite)
	}
	if o.runtime != withCrius && o.runtime != withContainerd {
		return fmt.Errorf("the runtime %q is none that the tests can be run with: take %s or %s", o.runtime, withCrius, withContainerd)
	}
	if named.disk && (o.runtime != withCrius || focus != "" || skip != "") {
		return fmt.Errorf("the suite %q is for %s and has no specs to choose from: leave out -runtime, -focus and -skip", suite, withCrius)
	}
	o.selection, o.own = named, focus == ""
	if focus != "" {
		o.selection.focus = focus
	}
	if skip != "" {
		o.selection.skip = skip
	}
	return nil
}

func run(ctx context.Context, o options) error {
	repo, err := tools.Repository()
	if err != nil {
		return err
	}
	dir := filepath.Join(repo, ".cache", "cluster")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	programs, err := tools.ClusterPrograms(ctx, tools.ClusterVersion())
	if err != nil {
		return err
	}
	names, err := listImages(ctx, programs.Tests)
	if err != nil {
		return err
	}
	images, err := newImages(ctx, programs, names)
	if err != nil {
		return err
	}
	if _, err := claim.Sweep(); err != nil { // left by a run that was killed
		return err
	}
	t := &trial{options: o, programs: programs, images: images, dir: dir}
	r, err := t.run(ctx)
	if err != nil {
		return err
	}
	fmt.Printf("%d images that tests ask for cannot be made here\n", len(images.missing))
	if r.print(os.Stdout, o.runtime) {
		return errors.New("there were failures")
	}
	return nil
}
