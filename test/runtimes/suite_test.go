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
	gvisor      = tools.Gvisor
	ofRunc      = tools.RuncShim
	currentShim = tools.CurrentShim // only if named, or with all
	ofRunsc     = tools.GvisorShim  // the same
	kata        = tools.Kata
	kata1       = tools.Kata1
	kataCLI     = tools.KataCLI
	current     = tools.CurrentRunc
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
		return append(slices.Clone(scene.Handlers), current, gvisor, ofRunsc, ofRunc, currentShim, kata, kata1, kataCLI)
	}
	return strings.Split(*chosen, ",")
}

// prepare adds the handlers that are requested and available.
func prepare(ctx context.Context) (node.Options, error) {
	var o node.Options
	for _, handler := range slices.Clone(commons.Also) {
		config, err := config(ctx, handler)
		if err != nil {
			missing[handler] = err
			commons.Also = slices.DeleteFunc(commons.Also, func(h string) bool { return h == handler })
			continue
		}
		o.Config += config
	}
	return o, nil
}

// config returns the configuration of a handler, whose runtime it builds if
// necessary.
func config(ctx context.Context, handler string) (string, error) {
	config, err := tools.Handler(ctx, handler)
	switch handler {
	case kata, kata1:
		config += ofKata
	case gvisor:
		if debian, found := exec.LookPath("runsc"); err != nil && found == nil {
			fmt.Println("no current gVisor, so that of this machine is tested:", err)
			return fmt.Sprintf("[runtime.handlers.%s]\npath = %q\n", gvisor, debian), nil
		}
	}
	return config, err
}

var ofKata = fmt.Sprintf("allowed_annotations = [%q, %q, %q, %q]\n", bootTime, diesAt, answers, hangsAt)

// What the shim of tests can be asked for.
const (
	bootTime = "io.katacontainers.config.hypervisor.boot_time"
	diesAt   = "io.katacontainers.config.hypervisor.dies_at"
	answers  = "io.katacontainers.config.hypervisor.answer"
	hangsAt  = "io.katacontainers.config.hypervisor.hangs"
)

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
func limited(handler string) bool { return handler == gvisor || handler == ofRunsc }

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
