package main

import (
	"context"
	"path/filepath"
	"testing"

	task "github.com/containerd/containerd/api/runtime/task/v2"
	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crius-run/crius/conmon/shim"
)

func TestOutcomesOfStarts(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		answer error
		want   shim.StartOutcome
	}{
		"started": {nil, shim.StartOutcome{}},
		"refused": {
			status.Error(codes.Unknown, `OCI runtime start failed: exec: "x": no such file or directory`),
			shim.StartOutcome{Error: `shim Start: OCI runtime start failed: exec: "x": no such file or directory`},
		},
		"in another state": {status.Error(codes.FailedPrecondition, "it has ended"), shim.StartOutcome{Error: "shim Start: it has ended"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			bundle(t, dir, "unix://"+filepath.Join(dir, "s"), "")
			serveTask(t, filepath.Join(dir, "s"), map[string]ttrpc.Method{
				"Start": func(_ context.Context, unmarshal func(any) error) (any, error) {
					var req task.StartRequest
					if err := unmarshal(&req); err != nil || req.ID != "c1" || req.ExecID != "" {
						t.Errorf("asked to start %v, %v", &req, err)
					}
					return &task.StartResponse{}, c.answer
				},
			})
			if got := shim.Outcome(startBy(t.Context(), shim.Program{ID: "c1", Dir: dir})); got != c.want {
				t.Errorf("got %+v, want %+v", got, c.want)
			}
		})
	}
}

func TestStartByDeadShim(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	bundle(t, dir, "unix://"+filepath.Join(dir, "none"), "")
	if got := shim.Outcome(startBy(t.Context(), shim.Program{ID: "c1", Dir: dir})); got.Error == "" || !got.Unavailable {
		t.Errorf("got %+v", got)
	}
}
