package oci

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	task "github.com/containerd/containerd/api/runtime/task/v2"
	tasktypes "github.com/containerd/containerd/api/types/task"
	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/crius-run/crius/conmon/shim"
)

// careless is a shim that deletes a container whatever its state, as Kata's
// does with a sandbox.
type careless struct {
	state tasktypes.Status
	ended chan struct{} // closed once the container has ended

	mu       sync.Mutex
	calls    []string
	deadline bool // a request has told how long its caller waits
}

func (s *careless) note(ctx context.Context, name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls = append(s.calls, name)
	_, limited := ctx.Deadline()
	s.deadline = s.deadline || limited
}

// serve listens at a socket until the test ends.
func (s *careless) serve(t *testing.T, path string) {
	t.Helper()
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	server, err := ttrpc.NewServer()
	if err != nil {
		t.Fatal(err)
	}
	method := func(name string, answer func() (any, error)) ttrpc.Method {
		return func(ctx context.Context, _ func(any) error) (any, error) {
			s.note(ctx, name)
			return answer()
		}
	}
	empty := func() (any, error) { return new(emptypb.Empty), nil }
	server.RegisterService("containerd.task.v2.Task", &ttrpc.ServiceDesc{Methods: map[string]ttrpc.Method{
		"Kill":  method("Kill", empty),
		"State": method("State", func() (any, error) { return &task.StateResponse{Status: s.state}, nil }),
		"Wait": method("Wait", func() (any, error) {
			<-s.ended
			s.note(context.Background(), "end")
			return &task.WaitResponse{ExitStatus: 137}, nil
		}),
		"Delete":   method("Delete", func() (any, error) { return new(task.DeleteResponse), nil }),
		"Shutdown": method("Shutdown", func() (any, error) { _ = listener.Close(); return new(emptypb.Empty), nil }),
		"Stats":    method("Stats", func() (any, error) { return nil, status.Error(codes.Unknown, "no") }),
	}})
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

// A sandbox is deleted after its end, and only then its shim is told to exit:
// otherwise its virtual machine would be left to nobody. One that was never
// started has no end. The shim does not learn how long crius waits, because it
// would end with a request what must outlive it.
func TestShimDeletesAfterTheEnd(t *testing.T) {
	t.Parallel()
	for state, want := range map[tasktypes.Status][]string{
		tasktypes.Status_RUNNING: {"Kill", "State", "Wait", "end", "Delete", "Shutdown"},
		tasktypes.Status_CREATED: {"Kill", "State", "Delete", "Shutdown"},
		tasktypes.Status_STOPPED: {"Kill", "State", "Delete", "Shutdown"},
	} {
		t.Run(state.String(), func(t *testing.T) {
			t.Parallel()
			s := &careless{state: state, ended: make(chan struct{})}
			dir := t.TempDir()
			s.serve(t, filepath.Join(dir, "s"))
			record := shim.Record{Endpoint: shim.Endpoint{Address: "unix://" + dir + "/s", Version: 2}, Sandboxed: true}
			if err := record.Write(dir); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, shim.LogFile), nil, 0o600); err != nil {
				t.Fatal(err)
			}
			r := &shimmed{entry: &entry{name: "h", handler: Handler{Root: t.TempDir()}}}
			done := make(chan error, 1)
			go func() { done <- r.forget(t.Context(), Ref{ID: "c1", Dir: dir}) }()
			close(s.ended)
			if err := <-done; err != nil {
				t.Fatal(err)
			}
			s.mu.Lock()
			defer s.mu.Unlock()
			if !slices.Equal(s.calls, want) {
				t.Errorf("the shim was asked for %q, want %q", s.calls, want)
			}
			if s.deadline {
				t.Error("the shim was told of a deadline")
			}
		})
	}
}
