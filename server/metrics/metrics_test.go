package metrics

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/inherit"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/pod"
	"github.com/crius-run/crius/pod/view"
	"github.com/crius-run/crius/server/stream"
	"github.com/crius-run/crius/storage"
	"github.com/crius-run/crius/storage/pull/progress"
	"github.com/crius-run/crius/test/kit/wait"
)

// scrape returns what Prometheus would read.
func scrape(t *testing.T, m *Metrics) string {
	t.Helper()
	out := httptest.NewRecorder()
	m.Handler().ServeHTTP(out, httptest.NewRequest("GET", "/metrics", nil))
	body, err := io.ReadAll(out.Result().Body)
	if err != nil || out.Code != 200 {
		t.Fatalf("code %d, %v: %s", out.Code, err, body)
	}
	return string(body)
}

func full(t *testing.T) *Metrics {
	t.Helper()
	m := New()
	pulls := new(progress.Counts)
	pulls.Bytes.Store(7)
	pulls.Resumed.Store(5)
	pulls.Warned.Store(4)
	pulls.Took.Note(50e6, 3*time.Second)
	vulnerable := func() map[string][]string { return map[string][]string{"runc": {"CVE-2024-21626", "CVE-2025-31133"}} }
	m.Register(t.Context(), Sources{Version: "1.2.3", Pulls: pulls, Vulnerable: vulnerable,
		Sizes: func() (uint64, uint64, error) { return 9, 10, nil },
		Status: func() (*view.RuntimeStatus, *view.NetworkStatus) {
			return &view.RuntimeStatus{}, &view.NetworkStatus{NotReady: errors.New("no network")}
		},
		Sessions: func() stream.Counts {
			return stream.Counts{Refused: map[string]uint64{"node": 13, "container": 0}, Closed: 14}
		},
		Logged: func(context.Context) conmon.LogCount {
			return conmon.LogCount{Written: 8, Discarded: 12, JournalLost: 5}
		}, Node: func() pod.Summary {
			return pod.Summary{
				Pods:       map[cri.PodSandboxState]int{cri.PodSandboxState_SANDBOX_READY: 2},
				Containers: map[cri.ContainerState]int{cri.ContainerState_CONTAINER_RUNNING: 3},
				Cleanups:   4,
				Work:       []trace.Work{{Operation: "run pod", Took: 5 * time.Second}, {Operation: "run pod", Took: time.Second}},
				OOMKilled:  6,

				EventsDropped: 11,

				Checkpointed: pod.CheckpointCounts{Bytes: 15, Times: 3, Sum: 4 * time.Second, Within: map[float64]uint64{0.5: 1, 60: 3}}, Restored: 16,
			}
		}})
	tracer := trace.New(m)
	_ = tracer.Do(t.Context(), "run pod", "a", func(ctx context.Context) error {
		return trace.Do(ctx, "attach network", func(context.Context) error { return errors.New("broken") })
	})
	for _, verb := range []string{"create container", "start"} {
		_ = tracer.Do(t.Context(), verb, "a", func(context.Context) error { return nil })
	}
	for _, err := range []error{fmt.Errorf("pull: %w", fault.NotFound), errors.Join(fault.Denied, storage.ErrSignature), errors.New("odd"),
		inherit.Explain(unix.EAGAIN), fmt.Errorf("%w: %w", unix.EDQUOT, fault.Exhausted), nil} {
		_ = tracer.Do(t.Context(), "pull image", "x", func(context.Context) error { return err })
	}
	for _, err := range []error{fmt.Errorf("dump: %w", fault.Timeout), fmt.Errorf("no space: %w: %w", unix.ENOSPC, fault.Exhausted), errors.New("odd"), nil} {
		_ = tracer.Do(t.Context(), "checkpoint", "x", func(context.Context) error { return err })
		_ = tracer.Do(t.Context(), "checkpoint pod", "y", func(context.Context) error { return err })
		_ = tracer.Do(t.Context(), "restore pod", "z", func(context.Context) error { return err })
	}
	_ = tracer.Call(t.Context(), "RunPodSandbox", func(context.Context) error { return status.Error(codes.Unknown, "broken") })
	_ = tracer.Call(t.Context(), "Version", func(context.Context) error { return nil })
	return m
}

func TestMetrics(t *testing.T) {
	text := scrape(t, full(t))
	for _, want := range []string{
		`crius_pods{state="ready"} 2`, `crius_pods{state="notready"} 0`, `crius_containers{state="running"} 3`, `crius_pending_cleanups 4`,
		`crius_operations_active{operation="run pod"} 2`, `crius_operation_longest_seconds 5`, `crius_containers_oom_total 6`,
		`crius_image_pull_duration_seconds_bucket{size="10MB-100MB",le="5"} 1`, `crius_image_pull_duration_seconds_sum{size="10MB-100MB"} 3`, `crius_image_pull_duration_seconds_count{size="over 10GB"} 0`,
		`crius_image_pull_bytes_total 7`, `crius_image_pull_resumed_bytes_total 5`, `crius_registry_warnings_total 4`, `crius_container_log_bytes_total 8`, `crius_container_log_discarded_bytes_total 12`, `crius_container_journal_lost_bytes_total 5`, `crius_build_info{version="1.2.3"} 1`,
		`crius_runtime_vulnerability{cve="CVE-2025-31133",handler="runc"} 1`, "\ncrius_panics_total ",
		`crius_operation_duration_seconds_count{operation="run pod",outcome="error"} 1`,
		`crius_step_duration_seconds_count{step="attach network"} 1`,
		`crius_rpc_duration_seconds_count{method="RunPodSandbox"} 1`, `crius_rpc_duration_seconds_count{method="Version"} 1`,
		`crius_rpc_errors_total{code="Unknown",method="RunPodSandbox"} 1`,
		`crius_ready{condition="RuntimeReady"} 1`, `crius_ready{condition="NetworkReady"} 0`, "\ncrius_image_bytes 9\n", "\ncrius_writable_layer_bytes 10\n",
		`crius_events_dropped_total 11`, `crius_sessions_refused_total{reason="node"} 13`, `crius_sessions_refused_total{reason="container"} 0`,
		`crius_stream_connections_closed_total 14`, `crius_image_pull_failures_total{reason="not found"} 1`, `crius_image_pull_failures_total{reason="signature"} 1`,
		`crius_image_pull_failures_total{reason="denied"} 0`, `crius_image_pull_failures_total{reason="other"} 1`,
		`crius_image_pull_failures_total{reason="limit"} 1`, `crius_image_pull_failures_total{reason="disk full"} 1`,
		`crius_restore_bytes_total 16`, `crius_restore_failures_total{reason="timeout"} 1`, `crius_restore_failures_total{reason="denied"} 0`,
		`crius_checkpoint_bytes_total 15`, `crius_checkpoint_frozen_seconds_count 3`, `crius_checkpoint_frozen_seconds_sum 4`, `crius_checkpoint_frozen_seconds_bucket{le="0.5"} 1`,
		`crius_checkpoint_failures_total{reason="timeout"} 2`, `crius_checkpoint_failures_total{reason="disk full"} 2`, `crius_checkpoint_failures_total{reason="other"} 2`, `crius_checkpoint_failures_total{reason="exists"} 0`,
		"\nprocess_resident_memory_bytes ", "\ngo_goroutines ",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is missing", want)
		}
	}
	if strings.Contains(text, `crius_rpc_errors_total{code="OK"`) {
		t.Error("a call that succeeded counts as an error")
	}
}

// Names and help texts follow Prometheus's conventions.
func TestLint(t *testing.T) {
	problems, err := promlint.New(strings.NewReader(scrape(t, full(t)))).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

// The manual has all metrics, and no others.
func TestManual(t *testing.T) {
	manual, err := os.ReadFile("../../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for line := range strings.Lines(scrape(t, full(t))) {
		if fields := strings.Fields(line); fields[0] == "#" && fields[1] == "TYPE" && strings.HasPrefix(fields[2], "crius_") {
			names[fields[2]] = true
			if !strings.Contains(string(manual), "`"+fields[2]+"{") && !strings.Contains(string(manual), "`"+fields[2]+"`") {
				t.Errorf("docs/metrics.md lacks %s", fields[2])
			}
		}
	}
	for _, name := range regexp.MustCompile("`(crius_[a-z_]+?)(_count)?[{`]").FindAllStringSubmatch(string(manual), -1) {
		if !names[name[1]] {
			t.Errorf("docs/metrics.md has %s, which is no metric", name[1])
		}
	}
}

// The dashboard shows every metric, in panels that do not overlap.
func TestDashboardIsComplete(t *testing.T) {
	content, err := os.ReadFile("../../contrib/grafana/crius.json")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(scrape(t, full(t))) {
		if fields := strings.Fields(line); fields[0] == "#" && fields[1] == "TYPE" && strings.HasPrefix(fields[2], "crius_") && !strings.Contains(string(content), fields[2]) {
			t.Errorf("the dashboard lacks %s", fields[2])
		}
	}
	var dashboard struct {
		Panels []struct {
			ID      int
			Title   string
			GridPos struct{ H, W, X, Y int }
		}
	}
	if err := json.Unmarshal(content, &dashboard); err != nil {
		t.Fatal(err)
	}
	taken := map[any]string{}
	for _, p := range dashboard.Panels {
		g := p.GridPos
		for _, place := range []any{p.ID, [2]int{g.X, g.Y}} {
			if other, ok := taken[place]; ok {
				t.Errorf("panels %q and %q are both at %v", other, p.Title, place)
			}
			taken[place] = p.Title
		}
		if g.W != 12 || g.H != 8 || g.X%12 != 0 || g.Y%8 != 0 {
			t.Errorf("panel %q is at %+v", p.Title, g)
		}
	}
}

// The dashboard and the alerts use only existing metrics.
func TestDashboardAndAlerts(t *testing.T) {
	text := scrape(t, full(t))
	for _, file := range []string{"grafana/crius.json", "prometheus/crius.rules.yaml"} {
		content, err := os.ReadFile("../../contrib/" + file)
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasSuffix(file, ".json") && !json.Valid(content) {
			t.Errorf("%s is not valid JSON", file)
		}
		names := regexp.MustCompile(`crius_[a-z_]+`).FindAllString(string(content), -1)
		if len(names) < 8 {
			t.Errorf("%s: only %q", file, names)
		}
		for _, name := range names {
			if !strings.Contains(text, "\n"+name+"{") && !strings.Contains(text, "\n"+name+" ") {
				t.Errorf("%s: there is no metric %s", file, name)
			}
		}
		for _, list := range regexp.MustCompile(`(reason|condition|operation|outcome)=~?"([^"]+)"`).FindAllStringSubmatch(string(content), -1) {
			for _, value := range strings.Split(list[2], "|") {
				if !strings.Contains(text, list[1]+`="`+value+`"`) {
					t.Errorf("%s: no metric has the %s %q", file, list[1], value)
				}
			}
		}
	}
}

// Each alert links to a section that exists.
func TestAlertsLinkToThePageOfSymptoms(t *testing.T) {
	rules, err := os.ReadFile("../../contrib/prometheus/crius.rules.yaml")
	if err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile("../../docs/troubleshoot.md")
	if err != nil {
		t.Fatal(err)
	}
	sections := map[string]bool{}
	for _, title := range regexp.MustCompile(`(?m)^## (.+)$`).FindAllSubmatch(page, -1) {
		sections[strings.ReplaceAll(strings.ReplaceAll(strings.ToLower(string(title[1])), ",", ""), " ", "-")] = true
	}
	links := regexp.MustCompile(`runbook_url: "https://\S+/docs/troubleshoot.md#(\S+)"`).FindAllSubmatch(rules, -1)
	for _, link := range links {
		if !sections[string(link[1])] {
			t.Errorf("docs/troubleshoot.md has no section %s", link[1])
		}
	}
	if alerts := bytes.Count(rules, []byte("- alert:")); len(links) != alerts {
		t.Errorf("%d of %d alerts link to it", len(links), alerts)
	}
}

func TestServer(t *testing.T) {
	dir := t.TempDir()
	s, err := full(t).Listen(t.Context(), Options{Healthy: well, Socket: filepath.Join(dir, "s"), Config: Config{Address: "127.0.0.1:0"}})
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- s.Serve() }()
	for _, l := range s.listeners {
		client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(context.Context, string, string) (net.Conn, error) {
			return net.Dial(l.Addr().Network(), l.Addr().String())
		}}}
		resp, err := client.Get("http://crius/metrics")
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || !strings.Contains(string(text), "crius_pending_cleanups 4") {
			t.Errorf("%s: %v, %s", l.Addr(), err, text)
		}
	}
	if st, err := os.Stat(filepath.Join(dir, "s")); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("socket: %v, %v", st, err)
	}
	if err := errors.Join(s.Close(t.Context()), <-ended); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "s")); err == nil {
		t.Error("the socket stays")
	}
	// After a kill the socket stays, and is replaced.
	if err := os.WriteFile(filepath.Join(dir, "s"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	again, err := full(t).Listen(t.Context(), Options{Healthy: well, Socket: filepath.Join(dir, "s")})
	if err != nil {
		t.Fatal(err)
	}
	if err := again.close(); err != nil {
		t.Error(err)
	}
	for name, c := range map[string]Config{
		"address": {Address: "nowhere"},
		"no key":  {Address: "127.0.0.1:0", TLSCertFile: "/c"},
		"no use":  {TLSCertFile: "/c", TLSKeyFile: "/k"},
	} {
		c := Options{Config: c, Healthy: well, Socket: filepath.Join(dir, "a")}
		if _, err := full(t).Listen(t.Context(), c); err == nil {
			t.Errorf("%s: served", name)
		}
		if _, err := os.Stat(c.Socket); err == nil {
			t.Errorf("%s: the socket stays", name)
		}
	}
}

// The status page reveals more than metrics do, so it exists only on request.
func TestStatusPageIsOffByDefault(t *testing.T) {
	t.Parallel()
	page := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "pods") })
	for on, want := range map[bool]int{false: http.StatusNotFound, true: http.StatusOK} {
		s, err := full(t).Listen(t.Context(), Options{Healthy: well, Page: page, Socket: filepath.Join(t.TempDir(), "s"), Config: Config{StatusPage: on}})
		if err != nil {
			t.Fatal(err)
		}
		answer := httptest.NewRecorder()
		s.http.Handler.ServeHTTP(answer, httptest.NewRequestWithContext(t.Context(), "GET", "/status", nil))
		if answer.Code != want || strings.Contains(answer.Body.String(), "pods") != on {
			t.Errorf("switched on %t: %d, %q", on, answer.Code, answer.Body)
		}
		if err := s.close(); err != nil {
			t.Error(err)
		}
	}
}

func TestConnectionsToTheAddressAreLimited(t *testing.T) {
	t.Parallel()
	s, err := full(t).Listen(t.Context(), Options{Socket: filepath.Join(t.TempDir(), "s"), Config: Config{Address: "127.0.0.1:0"}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	listener := s.listeners[1]
	accepted := make(chan net.Conn, maxConnections+1)
	go func() {
		for range cap(accepted) {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			accepted <- c
		}
	}()
	var clients []net.Conn
	for range cap(accepted) {
		c, err := net.Dial("tcp", listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		clients = append(clients, c)
		defer (<-accepted).Close()
	}
	// The oldest one makes room: a client that holds all of them keeps no other
	// out.
	for i, c := range clients {
		_ = c.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
		if i == 0 {
			_ = c.SetReadDeadline(time.Now().Add(wait.Limit))
		}
		_, err := c.Read(make([]byte, 1))
		if timedOut := errors.Is(err, os.ErrDeadlineExceeded); timedOut != (i > 0) {
			t.Errorf("connection %d: %v", i, err)
		}
	}
}

func well(context.Context) error { return nil }

// A probe gets the reason as text. However many requests come, the server is
// checked once a second.
func TestHealth(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asked := 0
		var wrong error
		h := &health{check: func(ctx context.Context) error {
			asked++
			if deadline, bounded := ctx.Deadline(); !bounded || time.Until(deadline) > healthTime {
				t.Error("the check is not bounded")
			}
			return wrong
		}}
		probe := func(code int, body string) {
			t.Helper()
			out := httptest.NewRecorder()
			h.ServeHTTP(out, httptest.NewRequest("GET", "/healthz", nil))
			if out.Code != code || out.Body.String() != body {
				t.Errorf("%d %q, want %d %q", out.Code, out.Body, code, body)
			}
		}
		probe(200, "ok\n")
		wrong = fmt.Errorf("RuntimeReady is false: runc is not there: %w", fault.Unavailable)
		probe(200, "ok\n")
		if asked != 1 {
			t.Errorf("asked %d times", asked)
		}
		time.Sleep(healthAge)
		probe(503, "RuntimeReady is false: runc is not there\n")
	})
}
