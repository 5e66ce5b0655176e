//go:build kubelet

package kubelet

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"net/http"
	"net/url"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crius-run/crius/test/kit/wait"
)

func TestLogs(t *testing.T) {
	each(t, func(t *testing.T, k *machine) {
		p := k.run(t, `
  containers: [{name: main, image: registry.test/probe, args: [lines, "5", ;, echo, -err, aside, ;, sleep]}]
`)
		p.says(t, "main", "aside")
		sameLines(t, "the log", p.logs(t, "main", nil), "line 1", "line 2", "line 3", "line 4", "line 5", "aside")
		sameLines(t, "its tail", p.logs(t, "main", url.Values{"tailLines": {"2"}}), "line 5", "aside")
		sameLines(t, "its beginning", p.logs(t, "main", url.Values{"limitBytes": {"7"}}), "line 1")
		if line := p.logs(t, "main", url.Values{"tailLines": {"1"}, "timestamps": {"true"}}); !strings.HasSuffix(line, "Z aside\n") {
			t.Errorf("with its time stamp: %q", line)
		}
	})
}

func TestLogsOfThePreviousContainer(t *testing.T) {
	each(t, func(t *testing.T, k *machine) {
		dir := k.Dir(t)
		p := k.run(t, `
  terminationGracePeriodSeconds: 1
  volumes: [{name: diary, hostPath: {path: `+dir+`}}]
  containers:
  - name: main
    image: registry.test/probe
    args: [note, /diary/runs, run, ;, cat, /diary/runs, ;, await, /diary/go, ;, remove, /diary/go]
    volumeMounts: [{name: diary, mountPath: /diary}]
`)
		p.ready(t)
		p.says(t, "main", "run")
		p.do(t, "main", "/probe write /diary/go on")
		p.await(t, "the container to be restarted", func(s *podStatus) bool { return s.of("main").RestartCount == 1 && s.of("main").Ready })
		wait.For(t, "its log", func() bool { return strings.Count(p.logs(t, "main", nil), "run\n") == 2 })
		sameLines(t, "the log before", p.logs(t, "main", url.Values{"previous": {"true"}}), "run")
	})
}

// A reader follows a container that writes more than fits into one file: the
// kubelet rotates, crius opens the new file, and no line is lost or repeated.
func TestLogRotationWhileFollowed(t *testing.T) {
	const lines = 8000 // of some 60 bytes in the log, a dozen times the size of a file
	each(t, func(t *testing.T, k *machine) {
		p := k.run(t, `
  restartPolicy: Never
  containers: [{name: main, image: registry.test/probe, args: [lines, "`+fmt.Sprint(lines)+`", 4ms]}]
`)
		p.await(t, "the container to run", func(s *podStatus) bool { return s.of("main").State.Running != nil })
		last := 0
		k.follow(t, p.path("containerLogs", "main", url.Values{"follow": {"true"}}), func(line string) {
			if last++; line != fmt.Sprintf("line %d", last) {
				t.Fatalf("line %d is %q", last, line)
			}
		})
		equal(t, "number of lines that were followed", last, lines)
		p.phase(t, "Succeeded")
		files, err := filepath.Glob(k.Path("logs", "default_"+p.name+"_*", "main", "0.log*"))
		if err != nil {
			t.Fatal(err)
		}
		if len(files) < 2 || len(files) > 3 {
			t.Errorf("the files are %q", files)
		}
	})
}

// follow reads an answer of the kubelet line by line until it ends.
func (k *machine) follow(t *testing.T, path string, line func(string)) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), wait.Limit)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+address+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	client := http.Client{Transport: &http.Transport{
		DialContext: k.Dial, DisableKeepAlives: true,
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // as in ask
	}}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		line(lines.Text())
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
}
