package integration

import (
	"context"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/registry"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

func TestStatusCommand(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	p := w.run(t, "runc")
	p.start(t, "sleep")
	p.start(t, "exit 1").wait(t)

	// A hanging plugin is named as what the server is waiting for.
	plugin := w.cni(t)
	plugin.does(t, "ADD", "hang")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	config := w.podConfig(t)
	gaveUp := make(chan struct{})
	go func() {
		defer close(gaveUp)
		_, _ = w.Runtime().RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: config})
	}()
	out := ""
	if !wait.Until(t.Context(), func() bool {
		var err error
		out, err = w.crius(t, "status")
		return err == nil && strings.Contains(out, "CNI ADD")
	}) {
		t.Fatalf("crius status does not say what hangs:\n%s", out)
	}
	for _, want := range []string{
		w.Socket(), "RuntimeReady  yes", "NetworkReady  yes", "1 ready, 0 not ready", "0 created, 1 running, 1 exited; 1 monitor",
		"run pod " + config.Metadata.Namespace + "/" + config.Metadata.Name, "root = " + strconv.Quote(w.StateRoot()) + " (file ",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("crius status lacks %q:\n%s", want, out)
		}
	}
	out, err := w.crius(t, "status", "-o", "json")
	var report struct {
		Server struct {
			Containers map[string]int
			Work       []struct{ Operation, Step string }
		}
		Config   map[string]any
		Settings []struct{ Key, Value, Origin string }
	}
	if err != nil || json.Unmarshal([]byte(out), &report) != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if len(report.Server.Work) != 1 || report.Server.Work[0].Step != "CNI ADD" || report.Server.Containers["running"] != 1 || len(report.Config) == 0 {
		t.Errorf("JSON: %+v", report)
	}
	origins := map[string]string{}
	for _, s := range report.Settings {
		origins[s.Key] = s.Value + " of " + s.Origin
	}
	if !strings.HasPrefix(origins["root"], strconv.Quote(w.StateRoot())+" of file "+w.Path("")) || origins["log_format"] != "" {
		t.Errorf("what is configured: %q", origins)
	}
	out, err = w.crius(t, "status", "--stuck", "-o", "json")
	var stuck []struct{ Seconds float64 }
	if err != nil || json.Unmarshal([]byte(out), &stuck) != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, work := range stuck {
		if work.Seconds < 10 {
			t.Errorf("what has just begun is not stuck: %s", out)
		}
	}
	cancel()
	<-gaveUp // but the work continues
	if out, _ := w.crius(t, "status"); !strings.Contains(out, "CNI ADD") {
		t.Errorf("the work ended with its caller:\n%s", out)
	}
	must(t, w.Kill())
	if out, err := w.crius(t, "status"); err == nil || !strings.Contains(out, w.Socket()) {
		t.Errorf("no server: %v, %s", err, out)
	}
	plugin.heal(t)
	must(t, w.Start(t.Context()))
}

func TestEventsCommand(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "crun")
	old := p.start(t, "sleep")
	argv := w.Argv("events", "--follow")
	cmd := exec.CommandContext(t.Context(), argv[0], argv[1:]...)
	file := filepath.Join(w.dir(t), "out")
	out, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	sees := func(text string) {
		t.Helper()
		if !wait.Until(t.Context(), func() bool { return strings.Contains(read(t, file), text) }) {
			t.Fatalf("crius events never says %q:\n%s", text, read(t, file))
		}
	}
	sees("started  container \"" + old.config.Metadata.Name + "\" " + old.id[:13])
	c := p.start(t, "exit 3")
	sees("created  container \"" + c.config.Metadata.Name + "\" " + c.id[:13])
	sees(c.id[:13] + " of pod \"" + p.config.Metadata.Namespace + "/" + p.config.Metadata.Name + "\": Error, code 3")
	c.remove(t)
	sees("deleted  container " + c.id[:13])
	must(t, cmd.Process.Signal(os.Interrupt))
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	if err := scene.Receive(t, "crius events to end when it is interrupted", ended); err != nil {
		t.Errorf("interrupted: %v", err)
	}
}

func TestPullsCommand(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	data, err := io.ReadAll(noise(4 * mib))
	if err != nil {
		t.Fatal(err)
	}
	ref := w.unusual(t, "slow", image.Regular("noise", 0o644, data))
	if out, err := w.crius(t, "pulls"); err != nil || out != "no image is being pulled\n" {
		t.Errorf("no pull: %v, %q", err, out)
	}
	w.Registry.Inject(registry.Fault{Path: "/slow/blobs/", Do: registry.Slow(192 << 10)})
	pulled := make(chan error, 1)
	go func() {
		_, err := w.Images().PullImage(t.Context(), &cri.PullImageRequest{Image: &cri.ImageSpec{Image: ref}})
		pulled <- err
	}()
	out := ""
	far := regexp.MustCompile(`registry\.test/slow:latest\s+\S+\s+[1-3]\.\d of \d\.\d MiB\s+\d of \d blobs`)
	if !wait.Until(t.Context(), func() bool {
		out, err = w.crius(t, "pulls")
		return err == nil && far.MatchString(out)
	}) {
		t.Errorf("crius pulls does not say how far it is: %v\n%s", err, out)
	}
	w.Registry.Heal()
	if err := <-pulled; err != nil {
		t.Error(err)
	}
	if out, err := w.crius(t, "pulls"); err != nil || out != "no image is being pulled\n" {
		t.Errorf("after the pull: %v, %q", err, out)
	}
}
