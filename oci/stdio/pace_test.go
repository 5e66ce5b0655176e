package stdio

import (
	"context"
	"io"
	"os"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/test/kit/wait"
)

// Input waits while the output is far behind, but for some bytes, and as long as the
// client takes any output; one that takes none is not waited for any longer.
func TestInputWaitsForTheOutput(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newPace()
		var behind atomic.Int64
		over := make(chan struct{})
		passed := func(n int) (after time.Duration) {
			began := time.Now()
			p.wait(n, func() int { return int(behind.Load()) }, over, nil)
			return time.Since(began)
		}
		take := func(left int64) { behind.Store(left); p.took() }
		for range 10 {
			if long := passed(freeInput); long > 0 {
				t.Fatalf("input of a client that reads waits for %v", long)
			}
		}
		behind.Store(farBehind)
		if long := passed(freeInput); long > 0 {
			t.Errorf("a little input waits for %v", long)
		}
		go func() {
			for range 10 {
				time.Sleep(stallTime * 9 / 10)
				take(farBehind)
			}
			time.Sleep(time.Second)
			take(farBehind - 1)
		}()
		if long, want := passed(1), stallTime*9+time.Second; long != want {
			t.Errorf("input beside a client that reads slowly waits for %v, want %v", long, want)
		}
		behind.Store(farBehind)
		if long := passed(freeInput + 1); long != stallTime {
			t.Errorf("input beside a client that reads nothing waits for %v", long)
		}
		if long := passed(freeInput + 1); long > 0 {
			t.Errorf("and then for %v", long)
		}
		take(farBehind)
		if long := passed(freeInput + 1); long != stallTime {
			t.Errorf("beside one that has only paused for %v", long)
		}
		take(farBehind)
		close(over)
		if long := passed(freeInput + 1); long > 0 {
			t.Errorf("the end of a session is waited for, for %v", long)
		}
	})
}

// Output that is unread counts until the other end is closed: nothing is added then.
func TestBehind(t *testing.T) {
	t.Parallel()
	var ours, theirs Pipes
	for i := range ours {
		var err error
		if ours[i], theirs[i], err = os.Pipe(); err != nil {
			t.Fatal(err)
		}
		defer ours[i].Close()
	}
	s := New(Ends{Stdout: ours[1], Stderr: ours[2]})
	for _, step := range []struct {
		do   func()
		want int
	}{
		{func() {}, 0},
		{func() { _, _ = theirs[1].WriteString("12345") }, 5},
		{func() { _, _ = theirs[2].WriteString("12345678") }, 8},
		{func() { _, _ = io.ReadFull(ours[2], make([]byte, 6)) }, 5},
		{func() { theirs[1].Close() }, 2},
		{func() { theirs[2].Close() }, 0},
	} {
		step.do()
		wait.For(t, "the right number of bytes", func() bool { return s.behind() == step.want }) // until its exec, a child of a parallel test has the pipes too
	}
	theirs[0].Close()
}

// All that descendants of a process write is copied before the limit, and what a pipe
// holds at the limit; whether one of them goes on is told.
func TestOutputEndsWithItsLastWriter(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ limited, closes, held bool }{
		"closed":         {false, true, false},
		"closed in time": {true, true, false},
		"kept open":      {true, false, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ours, theirs, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			defer theirs.Close()
			_ = unix.SetNonblock(int(theirs.Fd()), false)
			s := New(Ends{Stdout: ours})
			defer s.Close()
			s.Finish(0, nil) // the process has ended
			ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
			defer cancel()
			limit := make(chan struct{})
			if test.limited {
				close(limit)
			}
			if !test.closes {
				ctx, cancel = context.WithDeadline(t.Context(), time.Now())
				defer cancel()
				_, _ = theirs.WriteString("late")
			} else {
				go func() {
					_, _ = theirs.WriteString("late")
					theirs.Close()
				}()
			}
			var got text
			if err := s.Output(ctx, limit, &got, nil); err != nil || string(got) != "late" {
				t.Errorf("%q, %v", got, err)
			}
			if s.Held() != test.held {
				t.Errorf("held: %v, want %v", s.Held(), test.held)
			}
		})
	}
}

// A stream is copied as long as something comes, but not for ever, and not beyond the deadline
// of the context.
func TestDrain(t *testing.T) {
	t.Parallel()
	now := time.Now()
	late, cancel := context.WithDeadline(t.Context(), now)
	defer cancel()
	for name, test := range map[string]struct {
		ctx   context.Context
		drain drain
		holds string // of the pipe
		want  bool
	}{
		"silent":                   {t.Context(), drain{moved: now.Add(-DrainTime)}, "", false},
		"nothing ever came":        {t.Context(), drain{}, "", false},
		"something came":           {t.Context(), drain{moved: now.Add(time.Hour)}, "", true},
		"something is there":       {t.Context(), drain{}, "more", true},
		"for too long":             {t.Context(), drain{now.Add(time.Hour), now}, "more", false},
		"the command's time is up": {late, drain{moved: now.Add(time.Hour)}, "more", false},
		"again, and not too long":  {t.Context(), drain{now.Add(time.Hour), now.Add(time.Hour)}, "", true},
	} {
		ours, theirs, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		_, _ = theirs.WriteString(test.holds)
		if got := test.drain.goesOn(test.ctx, ours); got != test.want {
			t.Errorf("%s: goes on: %v", name, got)
		}
		ours.Close()
		theirs.Close()
	}
}

type text []byte

func (w *text) Write(p []byte) (int, error) { *w = append(*w, p...); return len(p), nil }
