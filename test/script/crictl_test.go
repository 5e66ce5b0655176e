// Package script walks through crius with crictl, like a person who follows its
// manual: what an operator types, and what they should see.
package script

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/crius-run/crius/internal/race"
	"github.com/crius-run/crius/test/images"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/tools"
	"github.com/crius-run/crius/test/kit/wait"
)

// A shell runs crictl against one node.
type shell struct {
	node   *node.Node
	crictl string
}

func open(t *testing.T) *shell {
	t.Helper()
	crictl, err := tools.Crictl(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	n, err := node.New(t.Context(), node.Options{Race: race.Enabled})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if faults := n.Faults(); len(faults) > 0 {
			t.Errorf("the server's log has %d faults; the first:\n%s", len(faults), faults[0])
		}
		if t.Failed() {
			t.Logf("end of the server's log:\n%s", n.LogTail(40))
		}
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	built, err := images.Build(nil)
	if err != nil {
		t.Fatal(err)
	}
	n.Registry.Push("probe", "latest", built)
	if err := n.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	return &shell{n, crictl}
}

// args returns the arguments for crictl; "@name" in the line is a file of the
// node.
func (s *shell) args(line string) []string {
	endpoint := "unix://" + s.node.Socket()
	args := []string{"--config", s.node.Path("crictl.yaml"), "--timeout", wait.Limit.String(), "--runtime-endpoint", endpoint, "--image-endpoint", endpoint}
	for _, word := range strings.Fields(line) {
		if name, ok := strings.CutPrefix(word, "@"); ok {
			word = s.node.Path(name)
		}
		args = append(args, word)
	}
	return args
}

// try runs a crictl command line.
func (s *shell) try(t *testing.T, line string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), wait.Limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, s.crictl, s.args(line)...)
	var stdout, stderr strings.Builder
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("crictl %s: %w: %s", line, err, stderr.String())
	}
	return strings.TrimRight(stdout.String(), "\n"), nil
}

// run is try for a command that must succeed.
func (s *shell) run(t *testing.T, format string, args ...any) string {
	t.Helper()
	out, err := s.try(t, fmt.Sprintf(format, args...))
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// sees runs a command whose output must contain all the words.
func (s *shell) sees(t *testing.T, line string, words ...string) {
	t.Helper()
	// Its JSON has one space after a colon or two, depending on the build of
	// crictl (protojson).
	out := strings.ReplaceAll(s.run(t, "%s", line), `":  `, `": `)
	for _, word := range words {
		if !strings.Contains(out, word) {
			t.Errorf("crictl %s does not show %q:\n%s", line, word, out)
		}
	}
}

// willSee is sees for what happens by itself, a moment later.
func (s *shell) willSee(t *testing.T, line, word string) {
	t.Helper()
	var out string
	if !wait.Until(t.Context(), func() bool { out = s.run(t, "%s", line); return strings.Contains(out, word) }) {
		t.Errorf("crictl %s never shows %q:\n%s", line, word, out)
	}
}

// showsNot runs a command whose output must not contain the word.
func (s *shell) showsNot(t *testing.T, line, word string) {
	t.Helper()
	if out := s.run(t, "%s", line); strings.Contains(out, word) {
		t.Errorf("crictl %s still shows %q:\n%s", line, word, out)
	}
}

func (s *shell) write(t *testing.T, name string, document any) {
	t.Helper()
	data, err := json.MarshalIndent(document, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(s.node.Path(name), data, 0o644); err != nil {
		t.Fatal(err)
	}
}

type object = map[string]any

// files writes the files of the walk, as the manual shows them.
func (s *shell) files(t *testing.T) {
	t.Helper()
	if err := os.WriteFile(s.node.Path("crictl.yaml"), fmt.Appendf(nil, "timeout: %d\n", wait.Limit/time.Second), 0o644); err != nil {
		t.Fatal(err)
	}
	s.write(t, "pod.json", object{
		"metadata":      object{"name": "sandbox", "namespace": "default", "attempt": 1, "uid": "hdishd83djaidwnduwk28bcsb"},
		"log_directory": s.node.Path("logs"),
		"linux":         object{},
	})
	s.write(t, "container.json", object{
		"metadata": object{"name": "busy"},
		"image":    object{"image": images.Probe},
		"args":     []string{"echo", "this is the log", ";", "sleep"},
		"log_path": "busy.log",
		"linux":    object{"resources": object{"memory_limit_in_bytes": 64 << 20}},
	})
}

func TestCrictlWalk(t *testing.T) {
	s := open(t)
	s.files(t)
	s.sees(t, "version", "RuntimeName:  crius", "RuntimeApiVersion:  v1")
	s.sees(t, "info", `"RuntimeReady"`, `"NetworkReady"`)
	s.sees(t, "runtime-config", "cgroup driver:")
	s.sees(t, "imagefsinfo", `"imageFilesystems"`, `"mountpoint"`, `"inodesUsed"`)
	s.sees(t, "metricdescs", "container_cpu_usage_seconds_total", "container_memory_working_set_bytes")
	s.run(t, "update-runtime-config --pod-cidr 10.99.0.0/16")
	for _, handler := range []string{"runc", "crun"} {
		t.Run(handler, func(t *testing.T) { s.walk(t, handler) })
	}
}

func (s *shell) walk(t *testing.T, handler string) {
	s.sees(t, "pull "+images.Probe, "Image is up to date for")
	s.sees(t, "images", "registry.test/probe", "latest")
	s.sees(t, "inspecti "+images.Probe, `"repoTags"`, images.Probe)
	image := s.run(t, "images -q")

	pod := s.run(t, "runp -r %s @pod.json", handler)
	s.sees(t, "pods", pod[:13], "Ready", "sandbox", handler)
	s.sees(t, "inspectp "+pod, `"SANDBOX_READY"`, `"ip": "10.99.`, `"runtimeHandler": "`+handler+`"`)

	container := s.run(t, "create %s @container.json @pod.json", pod)
	s.sees(t, "ps -a", container[:13], "Created", "busy")
	s.run(t, "start %s", container)
	s.sees(t, "ps", container[:13], "Running", "busy")
	s.sees(t, "inspect "+container, `"CONTAINER_RUNNING"`, image[:12], `"pid"`)
	s.willSee(t, "logs "+container, "this is the log")
	if out := s.run(t, "exec -s %s /probe echo from inside", container); out != "from inside" {
		t.Errorf("exec -s printed %q", out)
	}
	if _, err := s.try(t, "exec -s "+container+" /probe exit 3"); err == nil || !strings.Contains(err.Error(), "3") {
		t.Errorf("exec -s of a command that fails: %v", err)
	}
	s.run(t, "update --memory %d --cpu-share 512 %s", 128<<20, container)
	s.sees(t, "inspect "+container, fmt.Sprint(128<<20))
	s.sees(t, "stats", container[:13], "busy")
	s.sees(t, "statsp", pod[:13], "sandbox")
	s.sees(t, "statsp -o json "+pod[:13], `"name": "eth0"`, `"processCount"`, container)
	s.sees(t, "metricsp", pod, "container_memory_working_set_bytes", "container_network_receive_bytes_total")
	// Ids may be shortened as long as they are unique.
	s.sees(t, "inspect "+container[:13], container)
	s.sees(t, "inspecti "+image[:12], image)
	s.sees(t, "images "+image[:12], image[:12])

	s.run(t, "stop --timeout 300 %s", container)
	s.sees(t, "ps -a", container[:13], "Exited")
	s.sees(t, "inspect "+container, `"exitCode": 143`)
	s.showsNot(t, "stats", container[:13])
	s.sees(t, "stats -a", container[:13])
	s.run(t, "rm %s", container)
	s.showsNot(t, "ps -a", container[:13])
	s.run(t, "stopp %s", pod)
	s.sees(t, "pods", pod[:13], "NotReady")
	s.run(t, "rmp %s", pod)
	s.showsNot(t, "pods", pod[:13])
	s.run(t, "rmi %s", image[:12])
	s.showsNot(t, "images", "registry.test/probe")
}

func TestCrictlRunsAContainerInOneStep(t *testing.T) {
	s := open(t)
	s.files(t)
	container := s.run(t, "run --with-pull @container.json @pod.json")
	s.sees(t, "ps", container[:13], "Running")
	s.run(t, "rm -f %s", container)
	s.run(t, "rmp -f -a")
	s.showsNot(t, "pods", "sandbox")
}

func TestCrictlIsToldWhatIsWrong(t *testing.T) {
	s := open(t)
	s.files(t)
	pod := s.run(t, "runp @pod.json")
	container := s.run(t, "create --with-pull %s @container.json @pod.json", pod)
	for line, word := range map[string]string{
		"checkpoint --export @archive.tar " + container: "CONTAINER_CREATED",
		"exec " + container + " /probe exit 0":          "CONTAINER_CREATED",
		"update-runtime-config --pod-cidr nonsense":     "nonsense",
		"runp -r no-such-handler @pod.json":             "no-such-handler",
		"pull registry.test/no/such/image":              "no/such/image",
		"inspect 0123456789abcdef":                      "0123456789abcdef",
		"inspectp 0123456789abcdef":                     "0123456789abcdef",
		"inspecti registry.test/never/pulled":           "never/pulled",
		"start 0123456789abcdef":                        "0123456789abcdef",
		"create 0123456789ab @container.json @pod.json": "0123456789ab",
	} {
		if _, err := s.try(t, line); err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("crictl %s: %v, want an error that names %s", line, err, word)
		}
	}
	s.run(t, "rmp -f %s", pod)
}
