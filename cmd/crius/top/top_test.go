package top

import (
	"context"
	"encoding/json"
	"io"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/spf13/cobra"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/cmd/crius/config"
	"github.com/crius-run/crius/test/kit/criserver"
	"github.com/crius-run/crius/test/kit/terminal"
	"github.com/crius-run/crius/test/kit/wait"
)

// server measures once a second by its own clock.
type server struct {
	cri.UnimplementedRuntimeServiceServer
	asked atomic.Int64
}

func (s *server) ListPodSandboxStats(context.Context, *cri.ListPodSandboxStatsRequest) (*cri.ListPodSandboxStatsResponse, error) {
	const second = 1_000_000_000
	n := s.asked.Add(1)
	pod := func(name string, perSecond, memory uint64) *cri.PodSandboxStats {
		return &cri.PodSandboxStats{
			Attributes: &cri.PodSandboxAttributes{Id: name, Metadata: &cri.PodSandboxMetadata{Namespace: "default", Name: name}},
			Linux: &cri.LinuxPodSandboxStats{
				Cpu:     &cri.CpuUsage{Timestamp: n * second, UsageCoreNanoSeconds: &cri.UInt64Value{Value: 100*second + uint64(n)*perSecond}},
				Memory:  &cri.MemoryUsage{WorkingSetBytes: &cri.UInt64Value{Value: memory << 20}},
				Process: &cri.ProcessUsage{ProcessCount: &cri.UInt64Value{Value: 3}},
			},
		}
	}
	list := []*cri.PodSandboxStats{
		pod("idle", 0, 64), pod("busy", 2*second, 8), pod("half", second/2, 8), pod("odd\x1b[2J", second/2, 16),
		{Attributes: &cri.PodSandboxAttributes{Id: "stopped"}, Linux: &cri.LinuxPodSandboxStats{}},
	}
	if n > 1 {
		list = append(list, pod("new", second, 1))
	}
	return &cri.ListPodSandboxStatsResponse{Stats: list}, nil
}

func (s *server) Status(context.Context, *cri.StatusRequest) (*cri.StatusResponse, error) {
	return &cri.StatusResponse{Info: map[string]string{"server": `{"checkpoints": [{"id": "c1", "podId": "idle"}, {"id": "c2", "podId": "other"}]}`}}, nil
}

func run(ctx context.Context, socket string, out io.Writer, args ...string) error {
	cmd := Command(func(*cobra.Command) (*config.Loaded, error) {
		cfg := config.Default()
		cfg.API.Listen = socket
		return &config.Loaded{Config: cfg}, nil
	})
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	cmd.SetArgs(args)
	cmd.SetOut(out)
	return cmd.ExecuteContext(ctx)
}

func TestTop(t *testing.T) {
	t.Parallel()
	for args, want := range map[string]string{
		"": "CPU MEMORY PROCESSES POD|2.00 8.0 MiB 3 default/busy|" + `0.50 16.0 MiB 3 default/odd\x1b[2J|` +
			"0.50 8.0 MiB 3 default/half|0.00 64.0 MiB 3 default/idle (being checkpointed)|- 1.0 MiB 3 default/new|",
		"--sort memory": `CPU MEMORY PROCESSES POD|0.00 64.0 MiB 3 default/idle (being checkpointed)|0.50 16.0 MiB 3 default/odd\x1b[2J|` +
			"2.00 8.0 MiB 3 default/busy|0.50 8.0 MiB 3 default/half|- 1.0 MiB 3 default/new|",
		"--sort name": "CPU MEMORY PROCESSES POD|2.00 8.0 MiB 3 default/busy|0.50 8.0 MiB 3 default/half|0.00 64.0 MiB 3 default/idle (being checkpointed)|" +
			"- 1.0 MiB 3 default/new|" + `0.50 16.0 MiB 3 default/odd\x1b[2J|`,
	} {
		t.Run("top "+args, func(t *testing.T) {
			t.Parallel()
			var out strings.Builder
			err := run(t.Context(), criserver.Serve(t, new(server), nil), &out, strings.Fields(args)...)
			got := regexp.MustCompile(` +`).ReplaceAllString(strings.ReplaceAll(out.String(), "\n", "|"), " ")
			if err != nil || got != want {
				t.Errorf("%v, %q, want %q", err, got, want)
			}
		})
	}
	if err := run(t.Context(), "", io.Discard, "--sort", "age"); err == nil || !strings.Contains(err.Error(), "must be one of cpu, memory, name") {
		t.Errorf("sorted by nothing that there is: %v", err)
	}
}

func TestTopAsJSON(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	if err := run(t.Context(), criserver.Serve(t, new(server), nil), &out, "-o", "json"); err != nil {
		t.Fatal(err)
	}
	var list []use
	if err := json.Unmarshal([]byte(out.String()), &list); err != nil || len(list) != 5 {
		t.Fatalf("%v: %s", err, out.String())
	}
	if first, last := list[0], list[4]; first.Pod != "default/busy" || *first.CPUs != 2 || *first.Memory != 8<<20 || *first.Processes != 3 || last.CPUs != nil {
		t.Errorf("%s", out.String())
	}
}

// The list is refreshed until it is interrupted; on a terminal each replaces the one
// before.
func TestWatchTop(t *testing.T) {
	t.Parallel()
	s := new(server)
	term := terminal.Open(t)
	term.Resize(t, 80, 4)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- run(ctx, criserver.Serve(t, s, nil), term.File, "-w") }()
	wait.For(t, "the second page", func() bool { return strings.Contains(term.Shown(), "\x1b[3A") })
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if text := term.Shown(); strings.Contains(text, "idle") || !strings.Contains(text, "busy") {
		t.Errorf("of six lines the terminal has room for three: %q", text)
	}
}

// CPU time that has not grown is zero, and a restarted counter is unknown.
func TestRate(t *testing.T) {
	t.Parallel()
	at := func(time int64, total uint64) *cri.CpuUsage {
		return &cri.CpuUsage{Timestamp: time, UsageCoreNanoSeconds: &cri.UInt64Value{Value: total}}
	}
	for _, c := range []struct {
		before, now *cri.CpuUsage
		want        float64
		known       bool
	}{
		{at(10, 5), at(20, 10), 0.5, true},
		{at(10, 5), at(20, 5), 0, true},
		{at(10, 5), at(20, 4), 0, false},
		{at(10, 5), at(10, 5), 0, false},
		{nil, at(20, 10), 0, false},
		{at(10, 5), nil, 0, false},
	} {
		if got := rate(c.before, c.now); (got != nil) != c.known || got != nil && *got != c.want {
			t.Errorf("from %v to %v: %v", c.before, c.now, got)
		}
	}
}
