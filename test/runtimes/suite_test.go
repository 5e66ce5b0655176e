// Package runtimes is the runtime matrix: what pods do, with every runtime that
// crius drives, by the OCI command line or by a containerd shim, with the time
// that each of them takes. For runc and crun the package test/integration tests
// far more, so these are left out by default:
//
//	make runtimes
package runtimes

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"text/tabwriter"

	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/tools"
	"github.com/crius-run/crius/test/kit/turn"
	"github.com/crius-run/crius/test/scene"
)

// Handlers that are not in every node.
const (
	gvisor  = "runsc"
	ofRunc  = "shim-runc"  // containerd's own shim
	ofRunsc = "shim-runsc" // gVisor's, only if named
	kata    = "shim-kata"  // one that behaves like Kata's
	kata1   = "shim-kata1"
	kataCLI = "kata-runtime" // the command line of Kata 1
	current = "runc-current"
)

var (
	chosen = flag.String("handlers", strings.Join([]string{gvisor, ofRunc, kata, kata1, kataCLI}, ","), "runtime handlers of the matrix, separated by commas")
	every  = flag.Bool("all", false, "all handlers of the matrix")
)

// missing says why there is no runtime for a handler.
var missing = map[string]error{}

var commons scene.Commons

func TestMain(m *testing.M) {
	flag.Parse()
	flag.Set("test.parallel", "3")
	commons.Prepare = prepare
	for _, handler := range wanted() {
		if !slices.Contains(scene.Handlers, handler) {
			commons.Also = append(commons.Also, handler)
		}
	}
	code := scene.Run(m, &commons)
	results.print()
	os.Exit(code)
}

func wanted() []string {
	if *every {
		return append(slices.Clone(scene.Handlers), current, gvisor, ofRunc, kata, kata1, kataCLI)
	}
	return strings.Split(*chosen, ",")
}

// prepare adds the handlers that are requested and available.
func prepare(ctx context.Context) (node.Options, error) {
	var o node.Options
	for _, handler := range slices.Clone(commons.Also) {
		path, err := program(ctx, handler)
		if err != nil {
			missing[handler] = err
			commons.Also = slices.DeleteFunc(commons.Also, func(h string) bool { return h == handler })
			continue
		}
		further, err := extra(ctx, handler)
		if err != nil {
			return o, err
		}
		o.Config += fmt.Sprintf("[runtime.handlers.%s]\ntype = %q\npath = %q\n", handler, kind(handler), path) + further
	}
	return o, nil
}

// extra returns further keys of a handler.
func extra(ctx context.Context, handler string) (string, error) {
	switch handler {
	case kata, kata1:
		return ofKata, nil
	case kataCLI:
		return "options = [\"--kata-config={{.Path \"kata\"}}\"]\n", nil
	case ofRunsc:
		config, err := tools.RunscShimConfig(ctx)
		return fmt.Sprintf("options = [\"--TypeUrl=io.containerd.runsc.v1.options\", %q]\n", "--ConfigPath="+config), err
	}
	return "", nil
}

var ofKata = fmt.Sprintf("allowed_annotations = [%q, %q, %q, %q]\n", bootTime, diesAt, answers, hangsAt)

// What the shim of tests can be asked for.
const (
	bootTime = "io.katacontainers.config.hypervisor.boot_time"
	diesAt   = "io.katacontainers.config.hypervisor.dies_at"
	answers  = "io.katacontainers.config.hypervisor.answer"
	hangsAt  = "io.katacontainers.config.hypervisor.hangs"
)

// kind is the type of a handler.
func kind(handler string) string {
	if strings.HasPrefix(handler, "shim-") {
		return "shim"
	}
	return "oci"
}

// program returns the path of a runtime, which it builds if necessary.
func program(ctx context.Context, handler string) (string, error) {
	switch handler {
	case current:
		return tools.Runc(ctx)
	case ofRunc:
		return exec.LookPath("containerd-shim-runc-v2")
	case ofRunsc:
		return tools.RunscShim(ctx)
	case kata:
		return tools.KataShim(ctx)
	case kata1:
		return tools.OldKataShim(ctx)
	case kataCLI:
		return tools.KataRuntime(ctx)
	case gvisor:
		path, err := tools.Runsc(ctx)
		if err != nil {
			if debian, found := exec.LookPath("runsc"); found == nil {
				fmt.Println("no current gVisor, so that of this machine is tested:", err)
				return debian, nil
			}
		}
		return path, err
	}
	return "", fmt.Errorf("the matrix has no handler %q", handler)
}

// each runs a test once per handler, and records the result.
func each(t *testing.T, test func(t *testing.T, w *scene.World, handler string)) {
	t.Helper()
	eachOf(t, wanted(), test)
}

func eachOf(t *testing.T, handlers []string, test func(t *testing.T, w *scene.World, handler string)) {
	t.Helper()
	t.Parallel()
	w := commons.World(t)
	for _, handler := range handlers {
		t.Run(handler, func(t *testing.T) {
			t.Cleanup(func() { results.note(handler, t) })
			if err := missing[handler]; err != nil {
				t.Skipf("NOT TESTED, there is no %s: %v", handler, err)
			}
			if handler == gvisor || handler == ofRunsc {
				turn.HideAddresses(t)
			}
			test(t, w, handler)
		})
	}
}

// eachPrivate is each with a node of the test's own, which it may restart.
func eachPrivate(t *testing.T, test func(t *testing.T, w *scene.World, handler string)) {
	t.Helper()
	eachPrivateOf(t, wanted(), test)
}

func eachPrivateOf(t *testing.T, handlers []string, test func(t *testing.T, w *scene.World, handler string)) {
	t.Helper()
	eachOf(t, handlers, func(t *testing.T, _ *scene.World, handler string) {
		o, err := prepare(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		test(t, scene.Private(t, o), handler)
	})
}

// sandboxed reports whether all containers of a pod live in one sandbox.
func sandboxed(handler string) bool {
	return handler == gvisor || handler == ofRunsc || handler == kata || handler == kata1 || handler == kataCLI
}

// limited reports whether the sandbox of a pod has the limits of the pod.
func limited(handler string) bool { return handler == gvisor }

// ledger is the results of the matrix.
type ledger struct {
	mu                      sync.Mutex
	passed, failed, skipped map[string]int
	times                   map[string]map[string]string // by handler and step
	steps                   []string
}

var results = ledger{passed: map[string]int{}, failed: map[string]int{}, skipped: map[string]int{}, times: map[string]map[string]string{}}

func (l *ledger) note(handler string, t *testing.T) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case t.Failed():
		l.failed[handler]++
	case t.Skipped():
		l.skipped[handler]++
	default:
		l.passed[handler]++
	}
}

func (l *ledger) print() {
	l.mu.Lock()
	defer l.mu.Unlock()
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "handler\tpassed\tfailed\tskipped\t%s\n", strings.Join(l.steps, "\t"))
	for _, handler := range wanted() {
		fmt.Fprintf(w, "%s\t%d\t%d\t%d", handler, l.passed[handler], l.failed[handler], l.skipped[handler])
		for _, step := range l.steps {
			fmt.Fprintf(w, "\t%s", cmp.Or(l.times[handler][step], "-"))
		}
		fmt.Fprintln(w)
	}
	w.Flush()
	for _, handler := range slices.Sorted(maps.Keys(missing)) {
		fmt.Printf("NOT TESTED: %s: %v\n", handler, missing[handler])
	}
}
