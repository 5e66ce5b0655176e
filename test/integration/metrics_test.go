package integration

import (
	"context"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
)

// metrics returns the server's own metrics, as text.
func (w *world) metrics(t *testing.T) []byte {
	t.Helper()
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(context.Context, string, string) (net.Conn, error) {
		return net.Dial("unix", filepath.Join(w.RunRoot(), "metrics.sock"))
	}}}
	resp, err := client.Get("http://crius/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// metric returns one value of the server's own metrics; 0 if it is missing.
func (w *world) metric(t *testing.T, name string) float64 {
	t.Helper()
	match := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(name) + ` (\S+)$`).FindSubmatch(w.metrics(t))
	if match == nil {
		return 0
	}
	value, err := strconv.ParseFloat(string(match[1]), 64)
	if err != nil {
		t.Fatal(err)
	}
	return value
}

func TestMetricsOfTheNode(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	want := func(name string, value float64) {
		t.Helper()
		got := 0.0
		if !wait.Until(t.Context(), func() bool { got = w.metric(t, name); return got == value }) { // a monitor may count late
			t.Fatalf("%s is %v, want %v", name, got, value)
		}
	}
	p := w.run(t, "runc")
	c := p.start(t, "sleep")
	p.start(t, "exit 1").wait(t)
	want(`crius_pods{state="ready"}`, 1)
	want(`crius_containers{state="running"}`, 1)
	want(`crius_containers{state="exited"}`, 1)
	want("crius_monitors", 1)
	want("crius_pending_cleanups", 0)
	want("crius_container_log_bytes_total", 0)
	writer := p.start(t, "echo some words")
	writer.wait(t)
	logged, err := os.Stat(writer.logFile())
	if err != nil {
		t.Fatal(err)
	}
	want("crius_container_log_bytes_total", float64(logged.Size()))
	writer.remove(t)
	want("crius_container_log_bytes_total", float64(logged.Size()))
	want(`crius_operation_duration_seconds_count{operation="run pod",outcome="ok"}`, 1)
	want(`crius_operation_duration_seconds_count{operation="pull image",outcome="ok"}`, 1)
	want(`crius_step_duration_seconds_count{step="attach network"}`, 1)
	want(`crius_step_duration_seconds_count{step="runtime create"}`, 3)
	want(`crius_rpc_duration_seconds_count{method="StartContainer"}`, 3)
	want(`crius_image_pull_failures_total{reason="not found"}`, 0)
	missing := &cri.PullImageRequest{Image: &cri.ImageSpec{Image: node.RegistryHost + "/missing:1"}}
	if _, err := w.Images().PullImage(t.Context(), missing); err == nil {
		t.Error("an image that is not there was pulled")
	}
	want(`crius_image_pull_failures_total{reason="not found"}`, 1)
	if w.metric(t, "crius_image_bytes") == 0 {
		t.Error("the images have no bytes")
	}
	if w.metric(t, "crius_image_pull_bytes_total") == 0 {
		t.Error("the image was pulled without a byte")
	}
	_, err = w.Runtime().ContainerStatus(t.Context(), nil)
	if err == nil {
		t.Error("the status of nothing was told")
	}
	want(`crius_rpc_errors_total{code="InvalidArgument",method="ContainerStatus"}`, 1)
	c.stop(t, 0)
	want(`crius_containers{state="running"}`, 0)
	want("crius_monitors", 0)
	if err := w.Stop(); err != nil {
		t.Fatal(err)
	}
	if _, err := net.Dial("unix", filepath.Join(w.RunRoot(), "metrics.sock")); err == nil {
		t.Error("somebody still serves metrics")
	}
	if err := w.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	want(`crius_containers{state="exited"}`, 2)
	want("crius_container_log_bytes_total", 0)
}
