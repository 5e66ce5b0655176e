//go:build kubelet

package kubelet

import (
	"context"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/crius-run/crius/test/kit/claim"
	"github.com/crius-run/crius/test/kit/tools"
)

// handlerVariable names the runtime handler of all pods. By default it is runc
// with the first version and crun with the others.
const handlerVariable = "CRIUS_TEST_KUBELET_HANDLER"

// shared are the nodes whose kubelet and crius no test restarts, one for each
// version.
var shared []*sharedNode

type sharedNode struct {
	options options
	open    func() (*machine, error)
}

func TestMain(m *testing.M) {
	flag.Parse()
	flag.Set("test.parallel", "4")
	if _, err := claim.Sweep(); err != nil {
		fmt.Fprintln(os.Stderr, "sweep:", err)
	}
	for i, version := range tools.KubeletVersions() {
		o := options{version: version, handler: os.Getenv(handlerVariable), facade: i == 0, statsFromCRI: i > 0}
		if o.handler == "" {
			o.handler = []string{"runc", "crun"}[min(i, 1)]
		}
		shared = append(shared, &sharedNode{o, sync.OnceValues(func() (*machine, error) { return newMachine(context.Background(), o) })})
	}
	code := m.Run()
	for _, s := range shared {
		k, err := s.open()
		if err == nil {
			err = k.checkTeardown()
		}
		if err != nil {
			fmt.Fprintf(os.Stderr, "FAIL: the node with kubelet %s at its end: %v\n", s.options.version, err)
			code = 1
		}
	}
	os.Exit(code)
}

// each runs a test on a node of each version.
func each(t *testing.T, test func(t *testing.T, k *machine)) {
	t.Parallel()
	for _, s := range shared {
		t.Run(s.options.version, func(t *testing.T) {
			t.Parallel()
			k, err := s.open()
			if err != nil {
				t.Fatalf("the node: %.2000v", err)
			}
			test(t, k)
		})
	}
}

// eachPrivate does the same with a node of the test's own.
func eachPrivate(t *testing.T, change func(*options), test func(t *testing.T, k *machine)) {
	t.Parallel()
	for _, s := range shared {
		t.Run(s.options.version, func(t *testing.T) {
			t.Parallel()
			o := s.options
			if change != nil {
				change(&o)
			}
			k, err := newMachine(t.Context(), o)
			if err != nil {
				t.Fatalf("the node: %.2000v", err)
			}
			t.Cleanup(func() {
				if err := k.checkTeardown(); err != nil {
					t.Error(err)
				}
			})
			test(t, k)
		})
	}
}

// equal compares one thing.
func equal[T comparable](t *testing.T, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s is %v, want %v", what, got, want)
	}
}

// sameLines compares texts line by line.
func sameLines(t *testing.T, what, got string, want ...string) {
	t.Helper()
	if lines := strings.Split(strings.TrimSuffix(got, "\n"), "\n"); !slices.Equal(lines, want) {
		t.Errorf("%s is %q, want %q", what, lines, want)
	}
}
