package main

import (
	"bytes"
	"context"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	task "github.com/containerd/containerd/api/runtime/task/v2"
	tasktypes "github.com/containerd/containerd/api/types/task"
	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/crius-run/crius/conmon/shim"
)

// Kata 1 says of a container that ended with its virtual machine that it
// succeeded, gVisor's shim that its status is unknown. That is believed as long as the sandbox answers or lives.
func TestSuccessInDeadSandbox(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		usage   codes.Code       // of the answer about its usage
		state   tasktypes.Status // of the sandbox
		reports uint32           // of the container
		want    int
	}{
		"lives":                  {codes.OK, tasktypes.Status_RUNNING, 0, 0},
		"dead":                   {codes.Unknown, tasktypes.Status_STOPPED, 0, killed},
		"gVisor's is dead":       {codes.Unknown, tasktypes.Status_STOPPED, 128, killed},
		"gVisor's lives":         {codes.OK, tasktypes.Status_RUNNING, 128, 128},
		"dead after a failure":   {codes.Unknown, tasktypes.Status_STOPPED, 3, 3},
		"fails":                  {codes.Unknown, tasktypes.Status_RUNNING, 0, 0},
		"never has usage":        {codes.Unimplemented, tasktypes.Status_RUNNING, 0, 0},
		"never had usage, ended": {codes.Unimplemented, tasktypes.Status_STOPPED, 0, killed},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			root := t.TempDir()
			dir, infra := filepath.Join(root, "containers", "c1"), filepath.Join(root, "pods", "p1", "infra")
			address := "unix://" + filepath.Join(root, "s")
			bundle(t, dir, address, "p1")
			bundle(t, infra, address, "p1")
			if err := (shim.Record{Endpoint: shim.Endpoint{Address: address, Version: 2}, Sandboxed: true}).Write(dir); err != nil {
				t.Fatal(err)
			}
			var asked atomic.Int32
			serveTask(t, filepath.Join(root, "s"), map[string]ttrpc.Method{
				"Wait": func(context.Context, func(any) error) (any, error) {
					return &task.WaitResponse{ExitStatus: c.reports}, nil
				},
				"Stats": func(context.Context, func(any) error) (any, error) {
					if c.usage != codes.OK {
						return nil, status.Error(c.usage, "transport is closing")
					}
					return &task.StatsResponse{Stats: &anypb.Any{TypeUrl: "io.containerd.cgroups.v1.Metrics"}}, nil
				},
				"State": func(context.Context, func(any) error) (any, error) {
					if asked.Add(1); c.state == tasktypes.Status_RUNNING && c.usage != codes.Unimplemented {
						cancel() // its time is over
					}
					return &task.StateResponse{Status: c.state}, nil
				},
			})
			r, err := shim.ReadRecord(dir)
			if err != nil {
				t.Fatal(err)
			}
			got, err := waitFor(ctx, r, shim.Program{ID: "c1", Dir: dir})
			if err != nil || got != c.want {
				t.Errorf("%d, %v; want %d", got, err, c.want)
			}
			if c.usage == codes.Unimplemented && asked.Load() != 1 {
				t.Errorf("its state was asked for %d times", asked.Load())
			}
		})
	}
}

func TestTrimLog(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ written, want int64 }{"small": {1 << 10, 1 << 10}, "large": {2 << 20, 0}} {
		file := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(file, bytes.Repeat([]byte("x"), int(c.written)), 0o600); err != nil {
			t.Fatal(err)
		}
		trimLog(file)
		info, err := os.Stat(file)
		if err != nil || info.Size() != c.want {
			t.Errorf("%s: %d bytes, %v; want %d", name, info.Size(), err, c.want)
		}
	}
	trimLog(filepath.Join(t.TempDir(), "none")) // a runtime that has said nothing has none
}

// serveTask serves methods of a shim on a socket until the test ends.
func serveTask(t *testing.T, path string, methods map[string]ttrpc.Method) {
	t.Helper()
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	server, err := ttrpc.NewServer()
	if err != nil {
		t.Fatal(err)
	}
	server.RegisterService("containerd.task.v2.Task", &ttrpc.ServiceDesc{Methods: methods})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = server.Serve(context.Background(), listener) // until it is closed
	}()
	t.Cleanup(func() {
		_ = server.Close()
		<-ended
	})
}
