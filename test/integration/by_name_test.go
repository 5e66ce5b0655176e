package integration

import (
	"bytes"
	"errors"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/crius-run/crius/test/images"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/registry"
)

// try runs a subcommand in the node's network, where sessions are served, and
// returns its exit code and its two outputs.
func (w *world) try(t *testing.T, stdin string, args ...string) (code int, out, errs string) {
	t.Helper()
	var stdout, stderr bytes.Buffer
	err := w.Do(func() error {
		argv := w.Argv(args...)
		cmd := exec.CommandContext(t.Context(), argv[0], argv[1:]...)
		cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &stdout, &stderr
		return cmd.Run()
	})
	if ended := new(exec.ExitError); errors.As(err, &ended) {
		return ended.ExitCode(), stdout.String(), stderr.String()
	}
	must(t, err)
	return 0, stdout.String(), stderr.String()
}

// Without crictl, the most common operations work by the name of a pod.
func TestCommandsByNameOfPod(t *testing.T) {
	t.Parallel()
	w := shared(t)
	for _, handler := range handlers {
		p := w.run(t, handler)
		c := p.start(t, "echo logged ; sleep")
		pod := p.config.Metadata.Namespace + "/" + p.config.Metadata.Name

		code, out, errs := w.try(t, "", "exec", pod, "--", "/probe", "echo", "-err", "to stderr", ";", "echo", "to stdout", ";", "exit", "7")
		if code != 7 || out != "to stdout\n" || errs != "to stderr\n" {
			t.Errorf("%s: crius exec: exit code %d, %q, %q", handler, code, out, errs)
		}
		code, out, errs = w.try(t, "", "exec", pod, "-c", c.config.Metadata.Name, "--", "/no/such")
		if code == 0 || out != "" || !strings.Contains(errs, "/no/such") {
			t.Errorf("%s: crius exec of nothing: exit code %d, %q, %q", handler, code, out, errs)
		}
		if code, out, errs = w.try(t, "typed", "exec", "-i", p.id, "--", "/probe", "cat"); code != 0 || out != "typed" {
			t.Errorf("%s: crius exec -i: exit code %d, %q, %q", handler, code, out, errs)
		}
		if code, out, errs = w.try(t, "", "top", "--sort", "name"); code != 0 || !regexp.MustCompile(`\n\d\.\d\d +\d+\.\d MiB +\d+ +`+pod+`\n`).MatchString(out) {
			t.Errorf("crius top: exit code %d, %s, %q", code, out, errs)
		}
		if code, out, errs = w.try(t, "", "images"); code != 0 || !regexp.MustCompile(`(?m)^`+images.Probe+` +[0-9a-f]{13} +\d+\.\d MiB +[1-9]\d* +no$`).MatchString(out) {
			t.Errorf("crius images: exit code %d, %s, %q", code, out, errs)
		}
	}
	code, out, errs := w.try(t, "", "pull", images.Probe)
	if code != 0 || !regexp.MustCompile(`^[0-9a-f]{64}\n$`).MatchString(out) || errs != "" {
		t.Errorf("crius pull: exit code %d, %q, %q", code, out, errs)
	}
	if code, out, errs = w.try(t, "", "pull", "registry.test/none:1"); code != 1 || out != "" || !strings.Contains(errs, "registry.test/none:1") {
		t.Errorf("crius pull of nothing: exit code %d, %q, %q", code, out, errs)
	}
}

// Credentials on the command line are for one pull.
func TestPullWithCredentials(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	built, err := images.Build(nil)
	must(t, err)
	w.Registry.Push("secret/image", "latest", built)
	ref := node.RegistryAddress + "/secret/image:latest"
	w.Registry.Require(registry.Auth{Username: "me", Password: "secret"})
	defer w.Registry.Require(registry.Auth{})
	for password, want := range map[string]int{"secret\n": 0, "wrong\n": 1} {
		code, out, errs := w.try(t, password, "pull", "--creds", "me", "--password-stdin", ref)
		if code != want || (out != "") != (want == 0) || strings.Contains(errs, strings.TrimSpace(password)) {
			t.Errorf("password %q: exit code %d, %q, %q", password, code, out, errs)
		}
	}
	if code, _, errs := w.try(t, "", "pull", ref); code != 1 {
		t.Errorf("without credentials: exit code %d, %q", code, errs)
	}
}
