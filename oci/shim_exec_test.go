package oci

import (
	"context"
	"errors"
	"math"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	task "github.com/containerd/containerd/api/runtime/task/v2"
	tasktypes "github.com/containerd/containerd/api/types/task"
	"github.com/containerd/ttrpc"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/conmon/shim"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/oci/proc"
	"github.com/crius-run/crius/oci/stdio"
	testprogram "github.com/crius-run/crius/test/kit/program"
	"github.com/crius-run/crius/test/kit/wait"
)

// answering is a shim that answers each start of a command with the same pid.
// Its commands end when they are killed.
type answering struct {
	pid  int
	hold chan struct{} // unless nil, no command is started until it is closed

	starts  atomic.Int32 // how many more start requests are carried out
	started atomic.Bool
	stopped bool // the command has ended

	input chan string // unless nil, gets the input of the command, which the shim opens late
	dies  bool        // with its answer to a start

	fails atomic.Int32 // how many more questions for a state it answers with an error
	all   atomic.Bool  // the last Kill was for all processes of the container

	mu    sync.Mutex
	calls []string
	ended chan struct{}
}

// serve listens until the test ends.
func (a *answering) serve(t *testing.T, path string) {
	t.Helper()
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	server, err := ttrpc.NewServer()
	if err != nil {
		t.Fatal(err)
	}
	a.ended = make(chan struct{})
	method := func(name string, request interface{ GetExecID() string }, answer func() any) (string, ttrpc.Method) {
		return name, func(_ context.Context, unmarshal func(any) error) (any, error) {
			if err := unmarshal(request); err != nil {
				return nil, err
			}
			a.mu.Lock()
			a.calls = append(a.calls, name+" "+request.GetExecID())
			a.mu.Unlock()
			reply := answer()
			if err, failed := reply.(error); failed {
				return nil, err
			}
			return reply, nil
		}
	}
	empty := func() any { return new(emptypb.Empty) }
	methods := map[string]ttrpc.Method{}
	add := func(name string, m ttrpc.Method) { methods[name] = m }
	exec := new(task.ExecProcessRequest)
	add(method("Exec", exec, empty))
	add(method("Start", new(task.StartRequest), func() any {
		if a.hold != nil {
			<-a.hold
		}
		a.started.Store(true)
		if a.input != nil {
			go func() {
				time.Sleep(50 * time.Millisecond)
				text, _ := os.ReadFile(exec.Stdin)
				a.input <- string(text)
			}()
		}
		return &task.StartResponse{Pid: uint32(a.pid)}
	}))
	kill := new(task.KillRequest)
	add(method("Kill", kill, func() any {
		a.all.Store(kill.All)
		if a.started.Load() { // before that there is nothing to kill
			close(a.ended)
		}
		return empty()
	}))
	add(method("CloseIO", new(task.CloseIORequest), empty))
	add(method("ResizePty", new(task.ResizePtyRequest), empty))
	add(method("State", new(task.StateRequest), func() any {
		if a.fails.Add(-1) >= 0 {
			return errors.New("too busy")
		}
		if a.starts.Add(-1) >= 0 {
			return &task.StateResponse{Status: tasktypes.Status_CREATED}
		}
		a.started.Store(true)
		if a.stopped {
			return &task.StateResponse{Status: tasktypes.Status_STOPPED, Pid: uint32(a.pid)}
		}
		return &task.StateResponse{Status: tasktypes.Status_RUNNING, Pid: uint32(a.pid)}
	}))
	add(method("Wait", new(task.WaitRequest), func() any {
		if a.dies {
			go server.Close()
		}
		<-a.ended
		return &task.WaitResponse{ExitStatus: 137}
	}))
	add(method("Delete", new(task.DeleteRequest), func() any { return new(task.DeleteResponse) }))
	server.RegisterService("containerd.task.v2.Task", &ttrpc.ServiceDesc{Methods: methods})
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = server.Serve(context.Background(), listener) // until it is closed
	}()
	t.Cleanup(func() {
		_ = server.Close()
		<-served
	})
}

// called returns the names of the methods called so far, all about one command.
func (a *answering) called(t *testing.T) []string {
	t.Helper()
	a.mu.Lock()
	defer a.mu.Unlock()
	var names, ids []string
	for _, call := range a.calls {
		name, id, _ := strings.Cut(call, " ")
		names, ids = append(names, name), append(ids, id)
	}
	if ids = slices.Compact(ids); len(ids) > 1 || slices.Contains(ids, "") {
		t.Errorf("asked about the commands %q", ids)
	}
	return names
}

// taskOf returns the task of a container that a runs.
func taskOf(t *testing.T, a *answering, guest bool) *shimTask {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(`{"process":{"cwd":"/"}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	a.serve(t, filepath.Join(dir, "s"))
	return &shimTask{
		runtime: &shimmed{entry: &entry{name: "h"}},
		record:  shim.Record{Endpoint: shim.Endpoint{Address: "unix://" + dir + "/s", Version: 2}, Sandboxed: guest},
		watched: watched{ref: Ref{ID: "c1", Dir: dir}, client: new(conmon.Client)},
	}
}

// A container whose shim is dead still exists, although nothing can be done
// with it; only a signal may count it as gone.
func TestShimIsDead(t *testing.T) {
	t.Parallel()
	task := taskOf(t, new(answering), true)
	task.record.Address += ".none"
	task.runtime.monitor = filepath.Join(task.ref.Dir, "crius-conmon")
	says := "#!/bin/sh\necho '{\"error\":\"reach shim at x: it is gone\",\"unavailable\":true}'\n"
	if err := testprogram.Write(task.runtime.monitor+"-shim", []byte(says)); err != nil {
		t.Fatal(err)
	}
	_, execErr := task.Open(t.Context(), Command{Args: []string{"true"}})
	for verb, err := range map[string]error{"start": task.Start(t.Context()), "exec": execErr} {
		if !errors.Is(err, fault.Unavailable) || errors.Is(err, fault.NotFound) {
			t.Errorf("%s: %v", verb, err)
		}
	}
	if err := (&sandboxedShimTask{shimTask: task}).Signal(t.Context(), unix.SIGTERM); err != nil {
		t.Errorf("signal: %v", err)
	}
}

// Behind gVisor's shim a command is told of the new size of its terminal, and no
// other process: some stop on SIGWINCH. All are told of that of the container.
func TestResizeByShims(t *testing.T) {
	t.Parallel()
	const runsc, kata = "/usr/bin/containerd-shim-runsc-v1", "/usr/bin/containerd-shim-kata-v2"
	for _, c := range []struct {
		program, exec string
		want          []string
	}{
		{runsc, "e1", []string{"ResizePty e1", "Kill e1"}},
		{runsc, "", []string{"ResizePty ", "Kill "}},
		{kata, "e1", []string{"ResizePty e1"}},
	} {
		a := new(answering)
		task := taskOf(t, a, true)
		task.record.Program = c.program
		if err := task.resize(shim.Process{ID: "c1", Exec: c.exec})(t.Context(), stdio.Size{Width: 80, Height: 24}); err != nil {
			t.Error(err)
		}
		if !slices.Equal(a.calls, c.want) || a.all.Load() != (c.exec == "") {
			t.Errorf("%s was asked for %q, of all processes: %t; want %q", c.program, a.calls, a.all.Load(), c.want)
		}
	}
}

// A shim must end a command that it starts after its caller has stopped
// waiting.
func TestCommandThatStartsTooLate(t *testing.T) {
	a := &answering{hold: make(chan struct{})}
	task := taskOf(t, a, true)
	ctx, cancel := context.WithCancelCause(t.Context())
	impatient := errors.New("impatient")
	refused := make(chan error)
	go func() {
		_, err := task.exec(ctx, Command{Args: []string{"true"}})
		refused <- err
	}()
	wait.For(t, "the shim to be asked", func() bool { return len(a.called(t)) == 2 })
	cancel(impatient)
	if err := <-refused; !errors.Is(err, impatient) {
		t.Errorf("exec: %v", err)
	}
	if got := a.called(t); !slices.Equal(got, []string{"Exec", "Start"}) {
		t.Errorf("the shim was asked for %q before it had started the command", got)
	}
	close(a.hold)
	wait.For(t, "the command to be killed", func() bool {
		select {
		case <-a.ended:
			return true
		default:
			return false
		}
	})
	wait.For(t, "the shim to forget the command", func() bool { return slices.Contains(a.called(t), "Delete") })
	wait.For(t, "the FIFOs to go", func() bool {
		left, _ := filepath.Glob(filepath.Join(task.ref.Dir, "*-*"))
		return len(left) == 0
	})
}

// sleeper is a process that lives until the test ends.
func sleeper(t *testing.T) (pid int) {
	t.Helper()
	cmd := exec.Command("sleep", "600")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	return cmd.Process.Pid
}

// runc's shim may open the input of a command after it has answered to its start: the input ends only then, or the
// shim would wait for ever for a writer.
func TestInputOfALateShim(t *testing.T) {
	t.Parallel()
	for text, c := range map[string]Command{"": {}, "text": {Stdin: true}} {
		a := &answering{pid: sleeper(t), input: make(chan string, 1)}
		c.Args = []string{"cat"}
		e, err := taskOf(t, a, false).exec(t.Context(), c)
		if err != nil {
			t.Fatal(err)
		}
		if c.Stdin {
			e.Input(strings.NewReader(text))
			e.EndInput()
		}
		wait.For(t, "the shim to read the input", func() bool { return len(a.input) > 0 })
		if got := <-a.input; got != text {
			t.Errorf("the input is %q, want %q", got, text)
		}
		e.kill()
		<-e.Ended()
		e.Session.Close()
		wait.For(t, "the shim to forget the command", func() bool { return slices.Contains(a.called(t), "Delete") })
	}
}

// A shim that dies after its answer to a start does not open the input any more, and nobody waits for that.
func TestShimDiesBeforeItReadsTheInput(t *testing.T) {
	usual := readerTime
	readerTime = 2 * wait.Limit
	t.Cleanup(func() { readerTime = usual })
	for _, stdin := range []bool{true, false} {
		task := taskOf(t, &answering{pid: sleeper(t), dies: true}, false)
		opened := make(chan *execution, 1)
		go func() {
			e, err := task.exec(t.Context(), Command{Args: []string{"cat"}, Stdin: stdin})
			if err != nil {
				t.Error(err)
			}
			opened <- e
		}()
		wait.For(t, "the exec", func() bool { return len(opened) > 0 })
		e := <-opened
		<-e.Ended()
		if _, err := e.ExitCode(); !errors.Is(err, shim.ErrGone) {
			t.Errorf("the command ended with %v", err)
		}
		e.Session.Close()
		wait.For(t, "the FIFOs to go", func() bool {
			left, _ := filepath.Glob(filepath.Join(task.ref.Dir, "*-*"))
			return len(left) == 0
		})
	}
}

func setAbandonedTime(t *testing.T, limit time.Duration) {
	usual := abandonedTime
	abandonedTime = limit
	t.Cleanup(func() { abandonedTime = usual })
}

// The shim may still be starting the command of a server that was killed: if
// the command were killed and deleted before that, the shim would start it
// nevertheless.
func TestAbandonedCommandIsAwaited(t *testing.T) {
	setAbandonedTime(t, wait.Limit)
	a := &answering{pid: 1}
	a.starts.Store(3)
	task := taskOf(t, a, true)
	if err := os.Mkdir(filepath.Join(task.ref.Dir, "exec-17"), 0o700); err != nil {
		t.Fatal(err)
	}
	task.EndAbandoned(t.Context())
	if got, want := a.called(t), []string{"State", "State", "State", "State", "Kill", "Wait", "Delete"}; !slices.Equal(got, want) {
		t.Errorf("the shim was asked for %q, want %q", got, want)
	}
	if left, _ := filepath.Glob(filepath.Join(task.ref.Dir, "*-*")); len(left) > 0 {
		t.Errorf("directories that are left: %q", left)
	}
}

// A session of an earlier server is not killed: its input ends, or its terminal hangs up, and it is deleted when it
// has ended.
func TestSessionsOfAnEarlierServer(t *testing.T) {
	t.Parallel()
	for _, terminal := range []bool{false, true} {
		a := &answering{pid: 1}
		a.started.Store(true)
		task := taskOf(t, a, false)
		dir := filepath.Join(task.ref.Dir, "session-18")
		err := os.Mkdir(dir, 0o700)
		if !terminal {
			err = errors.Join(err, os.WriteFile(filepath.Join(dir, "in"), nil, 0o600), os.WriteFile(filepath.Join(dir, "err"), nil, 0o600))
		}
		if err != nil {
			t.Fatal(err)
		}
		task.EndAbandoned(t.Context())
		if !terminal {
			wait.For(t, "the input to end", func() bool { return slices.Contains(a.called(t), "CloseIO") })
			if got := a.called(t); slices.Contains(got, "Kill") || slices.Contains(got, "Delete") {
				t.Errorf("the shim was asked for %q while the command ran", got)
			}
			close(a.ended) // the command
		}
		wait.For(t, "the command to be deleted", func() bool {
			_, err := os.Stat(dir)
			return errors.Is(err, os.ErrNotExist) && slices.Contains(a.called(t), "Delete")
		})
	}
}

// A session that a killed server has created in the shim and not started never ends. A shim that cannot answer yet is
// asked again.
func TestSessionsThatCannotBeLeftAtOnce(t *testing.T) {
	setAbandonedTime(t, 5*abandonedPace)
	for name, a := range map[string]*answering{"not started": {}, "busy shim": {pid: 1}} {
		want := []string{"State", "Kill", "Delete"}
		if a.pid == 0 {
			a.starts.Store(math.MaxInt32)
		} else {
			a.fails.Store(2)
			want = []string{"State", "Kill", "Wait", "Delete"} // of a terminal
		}
		task := taskOf(t, a, true)
		dir := filepath.Join(task.ref.Dir, "session-19")
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		task.EndAbandoned(t.Context())
		wait.For(t, "the session to be deleted: "+name, func() bool {
			_, err := os.Stat(dir)
			return errors.Is(err, os.ErrNotExist)
		})
		got := slices.Compact(a.called(t))
		slices.Sort(want)
		if slices.Sort(got); !slices.Equal(got, want) { // Wait and Kill come in any order
			t.Errorf("%s: the shim was asked for %q, want %q", name, got, want)
		}
	}
}

// The pid of an ended command, which runc's shim still reports, may belong to
// another process by now.
func TestAbandonedCommandThatHasEnded(t *testing.T) {
	another := exec.Command("sleep", "600")
	if err := another.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = another.Process.Kill(); _ = another.Wait() }()
	a := &answering{pid: another.Process.Pid, stopped: true}
	task := taskOf(t, a, false)
	if err := os.Mkdir(filepath.Join(task.ref.Dir, "exec-17"), 0o700); err != nil {
		t.Fatal(err)
	}
	if again := task.EndAbandoned(t.Context()); again != nil {
		t.Error("something is left to be done")
	}
	if proc.Exiting(a.pid) {
		t.Error("another process was killed")
	}
	if !slices.Contains(a.called(t), "Delete") {
		t.Errorf("the shim was asked for %q", a.called(t))
	}
}

// A server may have been killed before the shim started its command, which then
// never ends.
func TestAbandonedCommandThatIsNotStarted(t *testing.T) {
	setAbandonedTime(t, 5*abandonedPace)
	for _, guest := range []bool{true, false} {
		a := &answering{}
		a.starts.Store(math.MaxInt32)
		task := taskOf(t, a, guest)
		if err := os.Mkdir(filepath.Join(task.ref.Dir, "exec-17"), 0o700); err != nil {
			t.Fatal(err)
		}
		if again := task.EndAbandoned(t.Context()); again != nil {
			t.Error("something is left to be done")
		}
		if got, want := slices.Compact(a.called(t)), []string{"State", "Kill", "Delete"}; !slices.Equal(got, want) {
			t.Errorf("the shim was asked for %q, want %q", got, want)
		}
		if left, _ := filepath.Glob(filepath.Join(task.ref.Dir, "exec-*")); len(left) > 0 {
			t.Errorf("directories that are left: %q", left)
		}
	}
}

// A shim may not answer while a server starts. Its commands are ended once it
// does, and those of the new server are left alone.
func TestAbandonedCommandIsEndedLater(t *testing.T) {
	a := &answering{pid: 1}
	task := taskOf(t, a, true)
	begin := func(name string) {
		if err := os.Mkdir(filepath.Join(task.ref.Dir, name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	begin("exec-17")
	hopeless, cancel := context.WithCancel(t.Context())
	cancel()
	again := task.EndAbandoned(hopeless)
	if again == nil {
		t.Fatal("nothing is left to be done, and the shim has not been reached")
	}
	begin("exec-18")
	if err := again(hopeless); err == nil {
		t.Error("the shim was not reached the second time, either")
	}
	if err := again(t.Context()); err != nil {
		t.Error(err)
	}
	if got := a.called(t); !slices.Contains(got, "Kill") || !slices.Contains(got, "Delete") {
		t.Errorf("the shim was asked for %q", got)
	}
	if left, _ := filepath.Glob(filepath.Join(task.ref.Dir, "*-*")); len(left) != 1 || filepath.Base(left[0]) != "exec-18" {
		t.Errorf("directories that are left: %q", left)
	}
}

// An invalid pid from a shim is not accepted, and the command is taken back. In
// a guest any pid is valid, and the process with that pid on the host is left
// alone.
func TestPIDsOfCommands(t *testing.T) {
	sleeper := exec.Command("sleep", "600")
	if err := sleeper.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sleeper.Process.Kill(); _ = sleeper.Wait() }()
	largest := ^uint32(0) // that a shim can report
	for _, c := range []struct {
		guest bool
		pid   int
		right bool
	}{
		{false, 0, false}, {false, 1, false}, {false, 1<<22 + 1, false}, {false, int(largest), false},
		{true, 0, true}, {true, 1, true}, {true, sleeper.Process.Pid, true},
	} {
		a := &answering{pid: c.pid}
		st := taskOf(t, a, c.guest)
		dir := st.ref.Dir
		e, err := st.exec(t.Context(), Command{Args: []string{"true"}})
		if (err == nil) != c.right || err != nil && !strings.Contains(err.Error(), "invalid pid") {
			t.Errorf("%+v: %v", c, err)
		}
		want := []string{"Exec", "Start", "Kill", "Delete"}
		if err == nil {
			e.kill()
			<-e.Ended()
			e.Session.Close()
			want = []string{"Exec", "Start", "Wait", "Kill", "Delete"}
		}
		var got []string
		wait.For(t, "the shim to be asked", func() bool { got = a.called(t); return len(got) >= len(want) })
		if slices.Sort(got); !slices.Equal(got, slices.Sorted(slices.Values(want))) {
			t.Errorf("%+v: the shim was asked for %q, want %q", c, got, want)
		}
		wait.For(t, "the FIFOs to go", func() bool {
			left, _ := filepath.Glob(filepath.Join(dir, "*-*"))
			return len(left) == 0
		})
	}
	if !alive(sleeper.Process.Pid) {
		t.Error("the command that was ended by its shim was killed by its pid")
	}
}
