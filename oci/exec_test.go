package oci

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crius-run/crius/internal/capture"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/oci/stdio"
	"github.com/crius-run/crius/test/kit/wait"
)

// flood is the output of commands that never stop printing.
var flood = bytes.Repeat([]byte("0123456789abcdef"), 2<<20/16)

// talker is a container whose commands print the requested amount to both
// streams, and end once all commands have printed.
type talker struct {
	t       *testing.T
	floods  int // of each stream
	running sync.WaitGroup
}

func (f *talker) exec(context.Context, Command) (*execution, error) {
	ended := make(chan struct{})
	ends := stdio.Ends{Ended: ended}
	var streams sync.WaitGroup
	for _, stream := range []**os.File{&ends.Stdout, &ends.Stderr} {
		r, w, err := os.Pipe()
		if err != nil {
			f.t.Fatal(err)
		}
		*stream = r
		streams.Go(func() {
			defer w.Close()
			for range f.floods {
				if _, err := w.Write(flood); err != nil {
					f.t.Error(err)
				}
			}
		})
	}
	go func() {
		streams.Wait()
		f.running.Done()
		f.running.Wait()
		close(ended)
	}()
	return &execution{Session: stdio.New(ends)}, nil
}

func (*talker) killExec(context.Context, *execution) {}

// The output of commands is bounded per call, both streams together, and over
// all calls, and no command is kept from printing more.
func TestExecOutputIsBoundedInSum_CVE_2022_1708_CVE_2022_31030(t *testing.T) {
	t.Parallel()
	const calls, all = 6, 20 << 20
	budget := capture.NewBudget(all)
	ctx, answered := context.WithCancel(t.Context())
	f := &talker{t: t, floods: 10}
	f.running.Add(calls)
	results := make([]*ExecResult, calls)
	var group sync.WaitGroup
	for i := range results {
		group.Go(func() {
			var err error
			if results[i], err = execSync(ctx, f, budget, []string{"flood"}, time.Duration(i)*time.Hour); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	sum := 0
	endless := strings.Repeat(string(flood), f.floods)
	for i, r := range results {
		if r == nil {
			continue
		}
		sum += len(r.Stdout) + len(r.Stderr)
		if n := len(r.Stdout) + len(r.Stderr); n > MaxExecOutput {
			t.Errorf("call %d: %d bytes", i, n)
		}
		for _, stream := range [][]byte{r.Stdout, r.Stderr} {
			if len(stream) < freeOutput || !strings.HasPrefix(endless, string(stream)) {
				t.Errorf("call %d: %d bytes that are not the first of the output", i, len(stream))
			}
		}
	}
	if most := all + calls*2*freeOutput; sum > most || sum < all {
		t.Errorf("%d bytes in all, want %d to %d", sum, all, most)
	}
	if left := budget.Left(); left != 0 {
		t.Errorf("%d bytes are left while the answers are being sent", left)
	}
	answered()
	wait.For(t, "the memory to be given back", func() bool { return budget.Left() == all })
}

// One stream may use what the other does not.
func TestExecOutputOfOneCall(t *testing.T) {
	t.Parallel()
	budget := capture.NewBudget(maxOutputInSum)
	f := &talker{t: t, floods: 10}
	f.running.Add(1)
	r, err := execSync(t.Context(), f, budget, []string{"flood"}, time.Hour)
	if err != nil || len(r.Stdout)+len(r.Stderr) != MaxExecOutput {
		t.Errorf("%d and %d bytes, %v", len(r.Stdout), len(r.Stderr), err)
	}
}

// unready is a container whose commands never begin.
type unready struct{ talker }

func (*unready) exec(ctx context.Context, _ Command) (*execution, error) {
	return beginWhole(ctx, func(context.Context) (*execution, error) {
		return nil, fmt.Errorf("the runtime did not answer within a minute: %w", fault.Timeout)
	}, nil)
}

// Only an expired time limit of the command is fault.Timeout: the kubelet
// counts that as a failed probe, and restarts a healthy container.
func TestExecOfRuntimeThatHangs(t *testing.T) {
	t.Parallel()
	for _, timeout := range []time.Duration{0, time.Hour} {
		_, err := execSync(t.Context(), &unready{}, capture.NewBudget(0), []string{"true"}, timeout)
		if errors.Is(err, fault.Timeout) || !errors.Is(err, fault.Unavailable) || strings.Contains(err.Error(), fault.Timeout.Error()) {
			t.Errorf("of %v: %v", timeout, err)
		}
	}
	over, cancel := context.WithTimeoutCause(t.Context(), 0, fault.Timeout)
	defer cancel()
	if _, err := execSync(over, &unready{}, capture.NewBudget(0), []string{"true"}, time.Hour); !errors.Is(err, fault.Timeout) {
		t.Errorf("of a command that has had its time: %v", err)
	}
}

// A pid file holds the pid of one process: to kill(2), zero and negative ones
// would mean several or all processes.
func FuzzReadPid(f *testing.F) {
	for _, text := range []string{"12", "7\n", "0", "-1", "+3", "4194305", "9223372036854775808", "1 2", ""} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		file := filepath.Join(t.TempDir(), "pid")
		if err := os.WriteFile(file, text, 0o600); err != nil {
			t.Fatal(err)
		}
		pid, err := readPid(file)
		if err != nil {
			if pid != 0 || !strings.Contains(err.Error(), "pid") {
				t.Errorf("%q is %d, %v", text, pid, err)
			}
			return
		}
		if pid <= 0 || !bytes.Contains(text, []byte(strconv.Itoa(pid))) {
			t.Errorf("%q is the pid %d", text, pid)
		}
	})
}

// A command has its container's environment; if there is no room for that, it
// is refused before anything is written.
func TestExecIsWrittenIfThereIsRoom(t *testing.T) {
	t.Parallel()
	process := &specs.Process{Args: []string{"/program"}, Env: []string{"A=" + strings.Repeat("\x01", 100_000)}}
	var claimed, freed int
	refusal := error(nil)
	dir := t.TempDir()
	task := &cliTask{watched: watched{ref: Ref{ID: "c", Dir: dir, Claim: func(bytes int) (func(), error) {
		claimed = bytes
		return func() { freed++ }, refusal
	}}}}
	e := new(execution)
	if err := task.writeProcess(process, e); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(processFileOf(e.dir)); err != nil || int(info.Size()) > claimed || freed != 1 {
		t.Errorf("%v, %v; %d bytes were claimed, and freed %d times", info, err, claimed, freed)
	}
	if !strings.Contains(execIDOf(e.dir), "-") {
		t.Errorf("directory %s does not say how the clock was set", e.dir)
	}
	e.forget()
	refusal = fault.Exhausted
	refused := task.writeProcess(process, new(execution))
	refusal = nil
	process.Args = slices.Repeat([]string{strings.Repeat("\x01", 100_000)}, 60)
	long := task.writeProcess(process, new(execution))
	if left, err := os.ReadDir(dir); !errors.Is(refused, fault.Exhausted) || !errors.Is(long, fault.Invalid) || len(left) > 0 || err != nil {
		t.Errorf("without room: %v; too long: %v; left %v, %v", refused, long, left, err)
	}
}

// A notice finds room in an answer that is full.
func TestExecResultTells(t *testing.T) {
	t.Parallel()
	const most = MaxExecOutput - answerRoom
	for _, test := range []struct{ stdout, stderr, wantOut, wantErr int }{
		{0, 0, 0, 6},
		{5, most - 11, 5, most - 5},
		{5, most - 5, 5, most - 5},
		{MaxExecOutput, 0, most - 6, 6},
	} {
		r := &ExecResult{Stdout: make([]byte, test.stdout), Stderr: make([]byte, test.stderr)}
		r.tell("notice")
		if len(r.Stdout) != test.wantOut || len(r.Stderr) != test.wantErr || !strings.HasSuffix(string(r.Stderr), "notice") {
			t.Errorf("%+v: %d and %d bytes", test, len(r.Stdout), len(r.Stderr))
		}
	}
}
