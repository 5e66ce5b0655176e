package oci

import (
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	task "github.com/containerd/containerd/api/runtime/task/v2"
	"github.com/containerd/ttrpc"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/crius-run/crius/conmon/shim"
)

// answering is a shim that answers each start of a command with the same pid. What
// it runs ends when it is killed.
type answering struct {
	pid int

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
			return answer(), nil
		}
	}
	empty := func() any { return new(emptypb.Empty) }
	methods := map[string]ttrpc.Method{}
	add := func(name string, m ttrpc.Method) { methods[name] = m }
	add(method("Exec", new(task.ExecProcessRequest), empty))
	add(method("Start", new(task.StartRequest), func() any { return &task.StartResponse{Pid: uint32(a.pid)} }))
	add(method("Kill", new(task.KillRequest), func() any { close(a.ended); return empty() }))
	add(method("Wait", new(task.WaitRequest), func() any { <-a.ended; return &task.WaitResponse{ExitStatus: 137} }))
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

// called are the names of the methods so far, all of which were about one command.
func (a *answering) called(t *testing.T) []string {
	t.Helper()
	a.mu.Lock()
	defer a.mu.Unlock()
	var names, ids []string
	for _, call := range a.calls {
		name, id, _ := strings.Cut(call, " ")
		names, ids = append(names, name), append(ids, id)
	}
	if ids = slices.Compact(ids); len(ids) != 1 || ids[0] == "" {
		t.Errorf("asked about the commands %q", ids)
	}
	return names
}

// A shim that answers with a pid which cannot be that of a command is not believed,
// and the command is taken back. In a guest any will do, and nothing
// is done to whoever has that pid here.
func TestPIDsOfCommands(t *testing.T) {
	sleeper := exec.Command("sleep", "600")
	if err := sleeper.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sleeper.Process.Kill(); _ = sleeper.Wait() }()
	for _, c := range []struct {
		guest bool
		pid   int
		right bool
	}{
		{false, 0, false}, {false, 1, false}, {false, 1<<22 + 1, false}, {false, 1<<32 - 1, false},
		{true, 0, true}, {true, 1, true}, {true, sleeper.Process.Pid, true},
	} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(`{"process":{"cwd":"/"}}`), 0o600); err != nil {
			t.Fatal(err)
		}
		a := &answering{pid: c.pid}
		a.serve(t, filepath.Join(dir, "s"))
		st := &shimTask{
			runtime: &shimmed{name: "h"},
			record:  shim.Record{Endpoint: shim.Endpoint{Address: "unix://" + dir + "/s", Version: 2}, Guest: c.guest},
			watched: watched{ref: Ref{ID: "c1", Dir: dir}},
		}
		e, err := st.exec(t.Context(), Command{Args: []string{"true"}})
		if (err == nil) != c.right || err != nil && !strings.Contains(err.Error(), "which cannot be") {
			t.Errorf("%+v: %v", c, err)
		}
		want := []string{"Exec", "Start", "Kill", "Delete"}
		if err == nil {
			e.Session.kill()
			<-e.ended
			e.Session.Close()
			want = []string{"Exec", "Start", "Wait", "Kill", "Delete"}
		}
		var got []string
		for end := time.Now().Add(time.Minute); len(got) < len(want) && time.Now().Before(end); time.Sleep(time.Millisecond) {
			got = a.called(t)
		}
		if slices.Sort(got); !slices.Equal(got, slices.Sorted(slices.Values(want))) {
			t.Errorf("%+v: the shim was asked for %q, want %q", c, got, want)
		}
		var left []string
		for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(time.Millisecond) {
			if left, _ = filepath.Glob(filepath.Join(dir, "exec-*")); len(left) == 0 {
				break
			}
		}
		if len(left) > 0 {
			t.Errorf("%+v: FIFOs are left: %q", c, left)
		}
	}
	if !alive(sleeper.Process.Pid) {
		t.Error("the command that was ended by its shim was killed by its pid")
	}
}
