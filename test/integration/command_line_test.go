package integration

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/race"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
)

// crius runs a subcommand with the node's configuration.
func (w *world) crius(t *testing.T, args ...string) (said string, err error) {
	t.Helper()
	argv := w.Argv(args...)
	// A check has a time limit of its own, which a busy machine may reach.
	wait.For(t, "an answer of crius within its own time limit", func() bool {
		var out []byte
		out, err = exec.CommandContext(t.Context(), argv[0], argv[1:]...).CombinedOutput()
		said = string(out)
		return !strings.Contains(said, "no result within ")
	})
	return said, err
}

func TestConfigurationLaysDropInsAndFlagsOverTheFile(t *testing.T) {
	t.Parallel()
	w := shared(t)
	out, err := w.crius(t, "config")
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, want := range []string{w.StateRoot(), w.RunRoot(), w.Socket(), `cgroup_driver = "cgroupfs"`, w.Path("policy.json")} {
		if !strings.Contains(out, want) {
			t.Errorf("crius config does not show %s:\n%s", want, out)
		}
	}
	out, err = w.crius(t, "--log-level", "warn", "--network-conf-dir", "/from/a/flag", "config")
	if err != nil || !strings.Contains(out, `"/from/a/flag"`) || !strings.Contains(out, `"warn"`) {
		t.Errorf("flags do not override: %v:\n%s", err, out)
	}
}

func TestUnknownConfigurationIsAnErrorThatNamesIt(t *testing.T) {
	t.Parallel()
	n, err := node.New(t.Context(), node.Options{Race: race.Enabled, Config: "[network]\nconf_dri = \"/x\"\n"})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	if err := n.Start(t.Context()); err == nil || !strings.Contains(err.Error(), "conf_dri") {
		t.Errorf("an unknown key: %v", err)
	}
	for text, word := range map[string]string{
		"[runtime]\ncgroup_driver = \"magic\"\n":        "magic",
		"[runtime]\ndefault_handler = \"nobody\"\n":     "nobody",
		"log_level = 7\n":                               "log_level",
		"[api\n":                                        "10-options",
		"[network]\ntimeout = \"soon\"\n":               "timeout",
		"[pod]\ndefault_sysctls = [\"no equals sign\"]": "no equals sign",
	} {
		if err := n.Configure("10-options", text); err != nil {
			t.Fatal(err)
		}
		if err := n.Start(t.Context()); err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%q: %.500v", text, err)
		}
		if exit := new(exec.ExitError); !errors.As(n.ExitErr(), &exit) || exit.ExitCode() != 78 { // see the systemd unit
			t.Errorf("%q: the server ended with %v", text, n.ExitErr())
		}
		n.Stop()
	}
}

func TestCheckOfAHealthyNode(t *testing.T) {
	t.Parallel()
	if out, err := shared(t).crius(t, "check"); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

func TestStacksOfALiveServer(t *testing.T) {
	t.Parallel()
	if out, err := shared(t).crius(t, "status", "goroutines"); err != nil || !strings.Contains(out, "\nmain.serve(") {
		t.Errorf("%v: %.500s", err, out)
	}
}

// A check reports, for a running server, what its status reports and which
// configuration changes it has not loaded.
func TestCheckAsksTheServer(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{Config: "[network]\nready_grace_period = \"0s\"\n"})
	says := func(when string, fails bool, words ...string) {
		t.Helper()
		out, err := w.crius(t, "check")
		for _, word := range words {
			if (err != nil) != fails || !strings.Contains(out, word) {
				t.Errorf("%s: %v; want %q in\n%s", when, err, word, out)
			}
		}
	}
	says("healthy", false, " has been running for ")
	must(t, w.Configure("20-more", "[pod]\npids_limit = 77\n"))
	says("with a changed option", false, "1 option has changed since the server read the configuration: pod.pids_limit")
	must(t, os.Rename(w.Path("cni", "net.d", "10-p.conflist"), w.Path("aside")))
	wait.For(t, "the network not to be ready", func() bool { return !w.condition(t, "NetworkReady").Status })
	says("without a network", false, "NetworkReady is false: ")
	must(t, w.Stop())
	says("without a server", false, "no server is running at "+w.Socket())
	must(t, os.Rename(w.Path("aside"), w.Path("cni", "net.d", "10-p.conflist")))
	must(t, w.Node.Start(t.Context()))
	c := w.run(t, "runc").start(t, "sleep")
	must(t, w.Stop())
	says("without a server for a container", true, "no server is running at "+w.Socket()+", but 1 container runs", "-> systemctl start crius")
	level := filepath.Join(w.StateRoot(), "level")
	before, err := os.ReadFile(level)
	must(t, err)
	must(t, os.WriteFile(level, []byte(`{"level": 99, "version": "9.0.0"}`), 0o600))
	if err := w.Node.Start(t.Context()); err == nil || !strings.Contains(err.Error(), `level 99, written by crius "9.0.0"`) {
		t.Errorf("a server on the records of a later one: %v", err)
	}
	says("on the records of a later server", true, `level 99, written by crius "9.0.0"`)
	must(t, os.WriteFile(level, before, 0o600))
	must(t, w.Node.Start(t.Context()))
	c.stop(t, 0) // which the refused server has not touched
}

// An archive for a bug report describes the server, and nothing private of
// pods.
func TestDebugArchive(t *testing.T) {
	t.Parallel()
	w := shared(t)
	const secret = "hunter2-hunter2"
	w.run(t, "runc").start(t, "sleep", func(c *cri.ContainerConfig) {
		c.Envs = []*cri.KeyValue{{Key: "PASSWORD", Value: []byte(secret)}}
		c.Args = append(c.Args, "; echo "+secret)
	})
	file := filepath.Join(t.TempDir(), "archive.tar.gz")
	if out, err := w.crius(t, "debug", file); err != nil || strings.TrimSpace(out) != file {
		t.Fatalf("%q, %v", out, err)
	}
	all, err := exec.CommandContext(t.Context(), "tar", "-xzOf", file).CombinedOutput()
	must(t, err)
	for _, word := range []string{"RuntimeReady", "\nmain.serve(", "listen = \"" + w.Socket(), w.StateRoot() + "/containers"} {
		if !bytes.Contains(all, []byte(word)) {
			t.Errorf("the archive has no %q", word)
		}
	}
	if bytes.Contains(all, []byte(secret)) {
		t.Error("the archive has the secret of a container")
	}
}

// It contains nothing that a container has written: neither its output nor the
// names of its files and processes.
func TestDebugArchiveHoldsNothingOfContainers(t *testing.T) {
	t.Parallel()
	w := shared(t)
	const mark = "m4rk-0f-c"
	each(t, func(t *testing.T, handler string) {
		c := w.run(t, handler).start(t, strings.ReplaceAll("echo MARK ; echo -err MARK ; write /MARK MARK ; write /dev/shm/MARK MARK ; pose MARK MARK", "MARK", mark))
		wait.For(t, "the process of that name", func() bool { return strings.Contains(c.output(t), "ready") })
		file := filepath.Join(t.TempDir(), "archive.tar.gz")
		if out, err := w.crius(t, "debug", file); err != nil {
			t.Fatalf("%q, %v", out, err)
		}
		all, err := exec.CommandContext(t.Context(), "tar", "-xzOf", file).CombinedOutput()
		must(t, err)
		for line := range bytes.Lines(all) {
			if bytes.Contains(line, []byte(mark)) {
				t.Errorf("%.300q", line)
			}
		}
	})
}
