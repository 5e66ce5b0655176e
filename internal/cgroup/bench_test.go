package cgroup

import (
	"errors"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// BenchmarkJoin moves a process back and forth between the root and its own
// cgroup, in one hierarchy at a time and in all of them.
func BenchmarkJoin(b *testing.B) {
	run := func(b *testing.B, names []string) {
		cgroup := scratch(b)
		home := hierarchies(b)
		defer func() {
			for _, h := range home {
				if err := write(h.dir(h.own)+"/cgroup.procs", "0"); err != nil {
					b.Error(err)
				}
			}
			remove(b, cgroup)
		}()
		for b.Loop() {
			if err := errors.Join(join(cgroup, names...), join("/", names...)); err != nil {
				b.Fatal(err)
			}
		}
		b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(2*b.N), "µs/join")
	}
	for _, h := range hierarchies(b) {
		name := h.names
		if h.v2() {
			name = "unified"
		}
		b.Run(name, func(b *testing.B) { run(b, []string{strings.Split(h.names, ",")[0]}) })
	}
	b.Run("all", func(b *testing.B) { run(b, nil) })
}

// BenchmarkStart compares the ways to get a new process into a new cgroup. The
// pause makes each the first in a while, as on a real node: only the first move
// of a burst waits for the RCU grace period.
func BenchmarkStart(b *testing.B) {
	run := func(b *testing.B, start func(cgroup string, cmd *exec.Cmd) error) {
		var total time.Duration
		for range b.N {
			time.Sleep(100 * time.Millisecond)
			cgroup := scratch(b)
			cmd := exec.Command("/bin/cat")
			stdin, err := cmd.StdinPipe()
			if err != nil {
				b.Fatal(err)
			}
			begin := time.Now()
			if err := start(cgroup, cmd); err != nil {
				b.Fatal(err)
			}
			total += time.Since(begin)
			stdin.Close()
			cmd.Wait()
			remove(b, cgroup)
		}
		b.ReportMetric(float64(total.Microseconds())/float64(b.N), "µs/start")
	}
	b.Run("plain", func(b *testing.B) {
		run(b, func(_ string, cmd *exec.Cmd) error { return cmd.Start() })
	})
	b.Run("born", func(b *testing.B) {
		run(b, func(cgroup string, cmd *exec.Cmd) error {
			return Start(cgroup, func(attr *syscall.SysProcAttr) error {
				cmd.SysProcAttr = attr
				return cmd.Start()
			})
		})
	})
	b.Run("moved", func(b *testing.B) {
		run(b, func(cgroup string, cmd *exec.Cmd) error {
			if err := cmd.Start(); err != nil {
				return err
			}
			for _, h := range hierarchies(b) {
				if err := errors.Join(h.make(cgroup), write(h.dir(cgroup)+"/cgroup.procs", strconv.Itoa(cmd.Process.Pid))); err != nil {
					return err
				}
			}
			return nil
		})
	})
}

func BenchmarkFind(b *testing.B) {
	for b.Loop() {
		if _, _, err := find(); err != nil {
			b.Fatal(err)
		}
	}
}
