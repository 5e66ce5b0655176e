package cgroup

import (
	"bytes"
	"os/exec"
	"path"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/crius-run/crius/test/kit/wait"
)

// Warm moves nothing: neither this process nor the threads on which Start
// starts others elsewhere.
func TestWarm(t *testing.T) {
	t.Parallel()
	all := hierarchies(t)
	cgroup := scratch(t) + "/new"
	over := make(chan struct{})
	warmed := make(chan error, 1)
	go func() {
		for {
			select {
			case <-over:
				warmed <- nil
				return
			default:
			}
			if err := warm(); err != nil {
				warmed <- err
				return
			}
		}
	}()
	for range 15 {
		cmd := exec.Command("/bin/cat", "/proc/self/cgroup")
		var out bytes.Buffer
		cmd.Stdout = &out
		err := Start(cgroup, func(attr *syscall.SysProcAttr) error {
			cmd.SysProcAttr = attr
			return cmd.Start()
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Wait(); err != nil {
			t.Fatal(err)
		}
		for _, m := range memberships(out.String()) {
			ours := slices.ContainsFunc(all, func(h hierarchy) bool { return h.names == m.names })
			if ours && !strings.HasSuffix(m.own, cgroup) {
				t.Errorf("born in %s of %q", m.own, m.names)
			}
		}
	}
	close(over)
	if err := <-warmed; err != nil {
		t.Error(err)
	}
	if after := hierarchies(t); !slices.Equal(after, all) {
		t.Errorf("the process went from %v to %v", all, after)
	}
	remove(t, path.Dir(cgroup))
}

// One call warms the kernel for all: further concurrent calls are only counted.
func TestWarmOnce(t *testing.T) {
	first := Warm()
	wait.For(t, "the kernel to be warned", func() bool { return !warming.Load() })
	second := Warm()
	if warming.Load() {
		t.Error("it is done again for the second")
	}
	first()
	second()
	if n := moving.Load(); n != 0 {
		t.Errorf("%d are left", n)
	}
}

// BenchmarkWarm: the cost of a move after a rest, with and without Warm.
func BenchmarkWarm(b *testing.B) {
	for _, warned := range []bool{false, true} {
		name := "cold"
		if warned {
			name = "warm"
		}
		b.Run(name, func(b *testing.B) {
			cgroup, all := scratch(b), hierarchies(b)
			home := func() {
				for _, h := range all {
					if err := write(h.dir(h.own)+"/cgroup.procs", "0"); err != nil {
						b.Fatal(err)
					}
				}
			}
			defer remove(b, cgroup)
			defer home()
			for b.Loop() {
				b.StopTimer()
				home()
				time.Sleep(50 * time.Millisecond)
				if warned {
					if err := warm(); err != nil {
						b.Fatal(err)
					}
				}
				b.StartTimer()
				if err := join(cgroup); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
