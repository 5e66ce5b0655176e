// Conformance runs all of critest, the conformance suite of CRI, against crius,
// without the internet:
//
//	go run ./test/conformance [-focus REGEXP] [HANDLER...]
//
// Each runtime handler, by default Debian's runc and crun and a current runc
// (runc-current), and on request another one of test/kit/tools, such as gVisor
// (runsc) or its shim (shim-runsc), gets its own node. The images that the suite names are built
// here and served by the node's registry under their public names. At the end
// of a run it prints one plain line, the specs that were skipped and those that
// failed, and anything that the pods have left behind:
//
//	runc: 122 passed, 0 failed, 20 skipped
//
// The exit code is 1 if any failed that is not known to fail (see known.go), or
// if one of these has passed. The suite's own output is kept in
// .cache/conformance/HANDLER.log.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/mount"
	"github.com/crius-run/crius/test/kit/claim"
	"github.com/crius-run/crius/test/kit/critest"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/tools"
	"github.com/crius-run/crius/test/kit/wait"
)

func main() {
	focus := flag.String("focus", "", "run only specs whose names match this regular expression")
	flag.Parse()
	handlers := flag.Args()
	if len(handlers) == 0 {
		handlers = allHandlers()
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := conform(ctx, *focus, handlers); err != nil {
		fmt.Fprintln(os.Stderr, "\nconformance:", err)
		os.Exit(1)
	}
}

func conform(ctx context.Context, focus string, handlers []string) error {
	repo, err := tools.Repository()
	if err != nil {
		return err
	}
	parts, err := tools.CritestParts(ctx)
	if err != nil {
		return err
	}
	suite, err := critest.New(parts)
	if err != nil {
		return err
	}
	suite.Focus = focus
	if _, err := claim.Sweep(); err != nil { // left by a run that was killed
		return err
	}
	failed := false
	for _, handler := range handlers {
		path := filepath.Join(repo, ".cache", "conformance", handler+".log")
		r, err := logged(ctx, path, suite, handler)
		if err != nil {
			return fmt.Errorf("%s: %w\nthe suite's log: %s", handler, err, path)
		}
		r.Print(os.Stdout, handler)
		failed = failed || r.Failed()
	}
	if failed {
		return errors.New("there were failures")
	}
	return nil
}

// logged is run with the suite's output in a file.
func logged(ctx context.Context, path string, suite *critest.Suite, handler string) (*critest.Result, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	log, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	suite.Log = log
	fmt.Printf("%s: the suite runs, its log is %s\n", handler, path)
	return run(ctx, suite, handler)
}

// everywhere are the handlers that every node has.
var everywhere = []string{"runc", "crun"}

func allHandlers() []string { return append(slices.Clone(everywhere), tools.CurrentRunc) }

// options returns the options of a node for a handler.
func options(ctx context.Context, handler string) (o node.Options, err error) {
	if !slices.Contains(everywhere, handler) {
		o.Config, err = tools.Handler(ctx, handler)
	}
	return o, err
}

// run runs the suite once with a runtime handler, on its own node.
func run(ctx context.Context, suite *critest.Suite, handler string) (_ *critest.Result, err error) {
	o, err := options(ctx, handler)
	if err != nil {
		return nil, err
	}
	n, err := node.New(ctx, o)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	if err := n.Registries(critest.Registries(node.RegistryAddress)); err != nil {
		return nil, err
	}
	suite.Push(n.Registry)
	if err := n.Start(ctx); err != nil {
		return nil, err
	}
	target := critest.Target{Socket: n.Socket(), NRI: n.Path("nri.sock"), Handler: handler, Dir: n.Path("suite"), Do: n.Do}
	if err := settle(ctx, n, *suite, target); err != nil {
		return nil, err
	}
	empty, err := n.Stock(ctx)
	if err != nil {
		return nil, err
	}
	r, err := suite.Run(ctx, target)
	if err != nil {
		return nil, fmt.Errorf("%w\nend of the server's log:\n%s", err, n.LogTail(20))
	}
	if r.Failed() {
		if err := tidy(ctx, n, target.Dir); err != nil {
			return nil, err
		}
	}
	r.Excuse(knownFailures(handler))
	if err := n.Clean(ctx, empty, wait.Limit); err != nil {
		r.Fail("what is left", err.Error())
	}
	if err := n.Stop(); err != nil {
		r.Fail("the server at its end", err.Error())
	}
	for _, fault := range n.Faults() {
		r.Fail("the server's log", fault)
	}
	return r, nil
}

// tidy removes what failed specs have left: mounts of the suite's own below its
// directory, and pods. A pod that has been stopped stays, because the suite has
// requested its removal.
func tidy(ctx context.Context, n *node.Node, dir string) error {
	if err := mount.UnmountBelow(dir); err != nil {
		return err
	}
	ready := &cri.PodSandboxFilter{State: &cri.PodSandboxStateValue{State: cri.PodSandboxState_SANDBOX_READY}}
	pods, err := n.Runtime().ListPodSandbox(ctx, &cri.ListPodSandboxRequest{Filter: ready})
	if err != nil {
		return err
	}
	for _, pod := range pods.Items {
		_, stopErr := n.Runtime().StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: pod.Id})
		_, err := n.Runtime().RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: pod.Id})
		if err := errors.Join(stopErr, err); err != nil {
			return fmt.Errorf("remove pod %s, which a failed spec has left: %w", pod.Id, err)
		}
	}
	return nil
}

// settle runs a few pods of the suite, so that permanent objects made by the
// first of each kind do not look like leftovers.
func settle(ctx context.Context, n *node.Node, suite critest.Suite, target critest.Target) error {
	suite.Focus = "UserNamespaces|PodPID|should support starting container with log"
	if _, err := suite.Run(ctx, target); err != nil {
		return err
	}
	// A cleanup that has failed at first is retried, and the node is at rest until then.
	var left []string
	gone := wait.Until(ctx, func() bool {
		pods, _ := filepath.Glob(filepath.Join(n.StateRoot(), "pods", "*")) // the pattern is valid
		containers, _ := filepath.Glob(filepath.Join(n.StateRoot(), "containers", "*"))
		left = append(pods, containers...)
		return len(left) == 0
	})
	if !gone {
		return fmt.Errorf("the first pods were removed, and records of them stay: %q", left)
	}
	return nil
}
