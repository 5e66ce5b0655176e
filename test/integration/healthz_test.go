package integration

import (
	"context"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
)

// healthz sends a probe's request: at the socket or, with an address, there.
func (w *world) healthz(t *testing.T, address string) (code int, text string) {
	t.Helper()
	return w.request(t, address, "/healthz")
}

// request sends a request to the metrics server, at the socket or, with an
// address, there.
func (w *world) request(t *testing.T, address, path string) (code int, text string) {
	t.Helper()
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		if address != "" {
			return w.Dial(ctx, "tcp", address)
		}
		return net.Dial("unix", filepath.Join(w.RunRoot(), "metrics.sock"))
	}}}
	resp, err := client.Get("http://crius" + path)
	must(t, err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	must(t, err)
	return resp.StatusCode, string(body)
}

// A probe reports whether the node can run pods, and why not. A missing network
// is not a failure, because a pod has to install it.
func TestHealthz(t *testing.T) {
	t.Parallel()
	const address = "127.0.0.1:9537"
	w := private(t, node.Options{Config: "[runtime]\nmonitor = \"{{.Path \"crius-conmon\"}}\"\n[network]\nready_grace_period = \"0s\"\n[metrics]\naddress = \"" + address + "\"\n"})
	monitor := w.Path("crius-conmon")
	must(t, os.Symlink(w.Program("crius-conmon"), monitor))
	become := func(wanted int, words string) {
		t.Helper()
		for _, at := range []string{"", address} {
			var code int
			var text string
			wait.For(t, "the answer of /healthz", func() bool { code, text = w.healthz(t, at); return code == wanted })
			if !strings.Contains(text, words) {
				t.Errorf("%d %q, want %q", code, text, words)
			}
		}
	}
	become(200, "ok\n")
	equal(t, "runtime ready", w.metric(t, `crius_ready{condition="RuntimeReady"}`), 1.0)

	conf := w.Path("cni", "net.d", "10-p.conflist")
	must(t, os.Rename(conf, conf+".away"))
	wait.For(t, "NetworkReady to be false", func() bool {
		return strings.Contains(string(w.metrics(t)), "crius_ready{condition=\"NetworkReady\"} 0\n")
	})
	become(200, "ok\n")
	must(t, os.Rename(conf+".away", conf))

	must(t, os.Rename(monitor, monitor+".away"))
	become(503, "RuntimeReady is false: ")
	equal(t, "runtime ready", w.metric(t, `crius_ready{condition="RuntimeReady"}`), 0.0)
	must(t, os.Rename(monitor+".away", monitor))
	become(200, "ok\n")

	// The kubelet's socket counts, not that of the probe.
	must(t, os.Rename(w.Socket(), w.Socket()+".away"))
	become(503, w.Socket())
	must(t, os.Rename(w.Socket()+".away", w.Socket()))
	become(200, "ok\n")
}
