package pulls

import (
	"context"
	"encoding/json"
	"io"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/cmd/crius/cli"
	"github.com/crius-run/crius/cmd/crius/config"
	"github.com/crius-run/crius/storage/pull/progress"
	"github.com/crius-run/crius/test/kit/criserver"
	"github.com/crius-run/crius/test/kit/terminal"
	"github.com/crius-run/crius/test/kit/wait"
)

// server has active pulls, and one more that waits until the test ends it.
type server struct {
	cri.UnimplementedRuntimeServiceServer
	cri.UnimplementedImageServiceServer
	pulls []progress.Pull
	warns []progress.Warning
	end   chan error
	auth  atomic.Pointer[cri.AuthConfig] // of the last pull
	asked atomic.Int64                   // calls of Status
}

func (s *server) Status(context.Context, *cri.StatusRequest) (*cri.StatusResponse, error) {
	s.asked.Add(1)
	text, err := json.Marshal(map[string]any{"pulls": s.pulls, "registry_warnings": s.warns})
	return &cri.StatusResponse{Info: map[string]string{"server": string(text)}}, err
}

func (s *server) PullImage(ctx context.Context, req *cri.PullImageRequest) (*cri.PullImageResponse, error) {
	s.auth.Store(req.Auth)
	select {
	case err := <-s.end:
		return &cri.PullImageResponse{ImageRef: "i1"}, err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (s *server) serve(t *testing.T) cli.Load {
	cfg := config.Default()
	cfg.API.Listen = criserver.Serve(t, s, s)
	return func(*cobra.Command) (*config.Loaded, error) { return &config.Loaded{Config: cfg}, nil }
}

func run(ctx context.Context, cmd *cobra.Command, out, errs io.Writer, args ...string) error {
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	cmd.SetArgs(args)
	cmd.SetOut(out)
	cmd.SetErr(errs)
	return cmd.ExecuteContext(ctx)
}

var loading = progress.Pull{Image: "r.test/app:latest", Since: time.Now(), Bytes: 4 << 20, Total: 8 << 20, Blobs: 4, Done: 1, Unpacking: 2}

// On a terminal bars replace the ones before; a pipe gets lines.
func TestWatchPulls(t *testing.T) {
	t.Parallel()
	s := &server{pulls: []progress.Pull{loading}}
	load := s.serve(t)
	term := terminal.Open(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- run(ctx, Command(load), term.File, io.Discard, "-w") }()
	wait.For(t, "the second page", func() bool { return strings.Contains(term.Shown(), "\x1b[1A") })
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if want := "[############------------]"; !strings.Contains(term.Shown(), want) || !strings.Contains(term.Shown(), " left") {
		t.Errorf("the terminal shows %q", term.Shown())
	}
	var out strings.Builder
	if err := run(t.Context(), Command(load), &out, io.Discard); err != nil {
		t.Error(err)
	}
	if text := out.String(); !strings.HasPrefix(text, "r.test/app:latest  ") || !strings.Contains(text, "4.0 of 8.0 MiB  1 of 4 blobs, 2 being unpacked  ") {
		t.Errorf("%q", text)
	}
}

// A file does not fill with lines that say the same.
func TestWatchedPullsAreWrittenToAFileWhenTheyChange(t *testing.T) {
	t.Parallel()
	for format, want := range map[string]string{"text": "no image is being pulled\n", "json": "null\n"} {
		t.Run(format, func(t *testing.T) {
			t.Parallel()
			s := &server{}
			load := s.serve(t)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			var out strings.Builder
			ended := make(chan error, 1)
			go func() { ended <- run(ctx, Command(load), &out, io.Discard, "-w", "-o", format) }()
			wait.For(t, "the third look", func() bool { return s.asked.Load() >= 3 })
			cancel()
			if err := <-ended; err != nil || out.String() != want {
				t.Errorf("%v, %q", err, out.String())
			}
		})
	}
}

func TestBars(t *testing.T) {
	t.Parallel()
	since := time.Now()
	now := since.Add(10 * time.Second)
	for _, c := range []struct {
		pull progress.Pull
		want string
	}{
		{progress.Pull{}, "[------------------------]|10s|asking the registry"},
		{progress.Pull{Bytes: 10 << 20, Total: 40 << 20, Blobs: 3, Done: 1}, "[######------------------]|10s|10.0 of 40.0 MiB, 1 of 3 blobs, 1.0 MiB/s, 30s left"},
		{progress.Pull{Bytes: 10 << 20, Total: 40 << 20, Blobs: 1, Connections: 3}, "[######------------------]|10s|10.0 of 40.0 MiB, 0 of 1 blobs, 1.0 MiB/s over 3 connections, 30s left"},
		{progress.Pull{Total: 40 << 20, Blobs: 3, Connections: 1}, "[------------------------]|10s|0.0 of 40.0 MiB, 0 of 3 blobs, 0.0 MiB/s"},
		{progress.Pull{Bytes: 30 << 20, Total: 40 << 20, Resumed: 20 << 20, Blobs: 3, Done: 1}, "[##################------]|10s|30.0 of 40.0 MiB (20.0 MiB resumed), 1 of 3 blobs, 1.0 MiB/s, 10s left"},
		{progress.Pull{Bytes: 40 << 20, Total: 40 << 20, Blobs: 3, Done: 1, Unpacking: 2}, "[########################]|10s|unpacking, 1 of 3 blobs, 2 being unpacked"},
		{progress.Pull{Bytes: 50 << 20, Total: 40 << 20, Blobs: 3, Done: 3}, "[########################]|10s|storing, 3 of 3 blobs"},
	} {
		c.pull.Image, c.pull.Since = "a\x1b[2J", since
		var out strings.Builder
		new(bars).write(&out, []progress.Pull{c.pull}, now)
		if got, want := strings.ReplaceAll(out.String(), "\t", "|"), `a\x1b[2J|`+c.want+"\n"; got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// A pull is listed before its registry has answered, and while the registry asks it to wait.
func TestPullsThatWaitForTheirRegistry(t *testing.T) {
	t.Parallel()
	now := time.Now()
	asking := progress.Pull{Image: "r.test/a:1", Since: now.Add(-time.Minute)}
	throttled := progress.Pull{Image: "r.test/b:1", Since: now.Add(-time.Minute), Blobs: 2, Throttled: "r.test", Until: now}
	state := "registry r.test asks to wait until " + now.Local().Format(time.TimeOnly) + " (too many requests)"
	var lines, page strings.Builder
	writeLines(&lines, []progress.Pull{asking, throttled}, now)
	if want := "r.test/a:1\t1m0s\tasking the registry\nr.test/b:1\t1m0s\t" + state + "\n"; lines.String() != want {
		t.Errorf("%q, want %q", lines.String(), want)
	}
	if new(bars).write(&page, []progress.Pull{throttled}, now); !strings.HasSuffix(page.String(), "\t"+state+"\n") {
		t.Errorf("%q", page.String())
	}
}

// The rate follows the current speed, and the remaining time follows the rate.
func TestRateOfPull(t *testing.T) {
	t.Parallel()
	since := time.Now()
	r := rate{at: since}
	for i, want := range []float64{100, 50, 25, 212.5} {
		bytes := []int64{100, 100, 100, 500}[i]
		if r = r.next(since.Add(time.Duration(i+1)*time.Second), bytes); r.perSecond != want {
			t.Errorf("after %d seconds: %v, want %v", i+1, r.perSecond, want)
		}
	}
	if same := r.next(r.at, 1000); same != r {
		t.Errorf("a sample of no time: %+v", same)
	}
}

func TestPull(t *testing.T) {
	t.Parallel()
	s := &server{pulls: []progress.Pull{loading, {Image: "r.test/other:1", Since: time.Now()}}, end: make(chan error)}
	load := s.serve(t)
	term := terminal.Open(t)
	var out strings.Builder
	ended := make(chan error, 1)
	go func() { ended <- run(t.Context(), PullCommand(load), &out, term.File, "app") }()
	wait.For(t, "a bar", func() bool { return strings.Contains(term.Shown(), "r.test/app:latest  [####") })
	s.end <- nil
	if err := <-ended; err != nil || out.String() != "i1\n" {
		t.Errorf("%v, %q", err, out.String())
	}
	if strings.Contains(term.Shown(), "other") {
		t.Errorf("the terminal shows a pull of another image: %q", term.Shown())
	}

	go func() { s.end <- status.Error(codes.NotFound, "no such image") }()
	var errs strings.Builder
	if err := run(t.Context(), PullCommand(load), &out, &errs, "app"); err == nil || !strings.HasSuffix(err.Error(), ": no such image") || errs.Len() > 0 {
		t.Errorf("a pull that fails: %v, %q", err, errs.String())
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := run(ctx, PullCommand(load), &out, io.Discard, "app"); err == nil || !strings.Contains(err.Error(), "interrupted") {
		t.Errorf("interrupted: %v", err)
	}
}

// Warnings of registries come after the pulls; crius pull has those of its image, from its beginning.
func TestWarningsOfRegistriesAreShown(t *testing.T) {
	t.Parallel()
	old, now := time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	s := &server{end: make(chan error), warns: []progress.Warning{
		{Time: old, Registry: "r.test", Image: "r.test/app:latest", Text: "old"},
		{Time: now, Registry: "r.test", Image: "r.test/app:latest", Text: "moves\x1b[2J"},
		{Time: now, Registry: "r.test", Image: "r.test/other:1", Text: "other"},
	}}
	load := s.serve(t)
	when := now.Local().Format(time.DateTime)
	moves := when + ` r.test/app:latest: registry r.test warns: moves\x1b[2J` + "\n"
	var out, errs strings.Builder
	if err := run(t.Context(), Command(load), &out, io.Discard); err != nil ||
		out.String() != "no image is being pulled\n"+old.Local().Format(time.DateTime)+" r.test/app:latest: registry r.test warns: old\n"+moves+when+" r.test/other:1: registry r.test warns: other\n" {
		t.Errorf("%v, %q", err, out.String())
	}
	go func() { s.end <- nil }()
	if err := run(t.Context(), PullCommand(load), io.Discard, &errs, "app"); err != nil || errs.String() != moves {
		t.Errorf("%v, %q, want %q", err, errs.String(), moves)
	}
}

func TestNamesOfPulledImages(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		full, name string
		want       bool
	}{
		{"docker.io/library/app:latest", "app", true},
		{"docker.io/library/app:latest", "library/app:latest", true},
		{"docker.io/library/app:1", "app:1", true},
		{"docker.io/library/app:1", "app", false},
		{"docker.io/library/myapp:latest", "app", false},
		{"localhost:5000/app:latest", "localhost:5000/app", true},
		{"r.test/app@sha256:1", "r.test/app@sha256:1", true},
	} {
		if got := isNamed(c.full, c.name); got != c.want {
			t.Errorf("%s as %s: %t", c.full, c.name, got)
		}
	}
}
