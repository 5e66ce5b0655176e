package incidents

import (
	"context"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/odd"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

func TestMain(m *testing.M) {
	odd.Main()
	os.Exit(scene.Run(m))
}

// incident is one way to break a node.
type incident struct {
	name   string
	config string // a drop-in, with which the server is restarted

	// happen breaks the node and does what people would do then. It returns what they see at
	// once: the error of the call, or the message of a container. It heals by t.Cleanup.
	happen func(t *testing.T, w *world) (event string)

	// What is said where; empty: nothing need be said there.
	event, status, check, log string

	// elsewhere: why a test node cannot have it, and the test that has it instead; nothing but the
	// name is set.
	elsewhere, test string

	// asked: the sender of the request made a mistake, so nothing is logged at warning.
	asked bool
}

type world struct{ *scene.World }

func TestIncidents(t *testing.T) {
	t.Parallel()
	w := &world{scene.Private(t, node.Options{ImageDisk: 512 << 20, Config: "[network]\nready_grace_period = \"0s\"\n"})}
	for _, i := range incidents {
		if i.elsewhere == "" {
			t.Run(i.name, func(t *testing.T) { w.meet(t, i) })
		}
	}
}

// meet has an incident happen, and looks for what should be said of it.
func (w *world) meet(t *testing.T, i incident) {
	if i.config != "" {
		w.configure(t, i.config)
		t.Cleanup(func() { w.configure(t, "") })
	}
	before := len(scene.Read(t, w.LogFile()))
	event := i.happen(t, w)
	if !strings.Contains(event, i.event) {
		t.Errorf("event: %q lacks %q", event, i.event)
	}
	for _, place := range []struct {
		what, words string
		read        func() string
	}{
		{"crius status", i.status, func() string { return w.ask(t, "status") }},
		{"crius check", i.check, func() string { return w.ask(t, "check") }},
		{"the log", i.log, func() string { return warnings(scene.Read(t, w.LogFile())[before:]) }},
	} {
		if place.words == "" {
			continue
		}
		said := ""
		if !wait.Until(t.Context(), func() bool { said = place.read(); return strings.Contains(said, place.words) }) {
			t.Errorf("%s lacks %q:\n%s", place.what, place.words, said)
		}
	}
	if i.log == "" && !i.asked {
		t.Error("nothing is said at warning")
	}
}

// warnings returns the lines of a log from warning on.
func warnings(log string) string {
	lines := slices.DeleteFunc(strings.Split(log, "\n"), func(line string) bool {
		return !strings.Contains(line, "level=WARN") && !strings.Contains(line, "level=ERROR")
	})
	return strings.ReplaceAll(strings.Join(lines, "\n"), `\"`, `"`)
}

func (w *world) ask(t *testing.T, command string) string {
	t.Helper()
	out, _ := w.Ask(t, command) // a check fails for what it finds
	return string(out)
}

// repair has crius finish what an incident has left.
func (w *world) repair(t *testing.T) {
	t.Helper()
	argv := w.Argv("check", "--repair")
	_ = w.Do(func() error { return exec.Command(argv[0], argv[1:]...).Run() }) // it fails for what the machine lacks
}

func (w *world) configure(t *testing.T, text string) {
	t.Helper()
	if err := w.Configure("20-incident", text); err != nil {
		t.Fatal(err)
	}
	if err := w.Crash(context.WithoutCancel(t.Context())); err != nil {
		t.Fatal(err)
	}
}

// run asks for a pod, which is removed at the end, and returns the error.
func (w *world) run(t *testing.T, change ...scene.PodChange) string {
	t.Helper()
	config := w.PodConfig(t, change...)
	resp, err := w.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: config, RuntimeHandler: config.GetAnnotations()["handler"]})
	if err != nil {
		return err.Error()
	}
	t.Cleanup(func() {
		if _, err := w.Runtime().RemovePodSandbox(context.WithoutCancel(t.Context()), &cri.RemovePodSandboxRequest{PodSandboxId: resp.PodSandboxId}); err != nil {
			t.Error(err)
		}
	})
	return ""
}

// create asks for a container in a new pod, and returns the error, or the message of the container if it
// cannot be started.
func (w *world) create(t *testing.T, change ...scene.ContainerChange) string {
	t.Helper()
	c, err := w.Pod(t, "crun").Try(t.Context(), "sleep", change...)
	if err != nil {
		return err.Error()
	}
	if err := c.TryStart(t.Context()); err != nil {
		return err.Error()
	}
	return ""
}

// pull asks for an image and returns the error.
func (w *world) pull(t *testing.T, image string) string {
	t.Helper()
	if _, err := w.Images().PullImage(t.Context(), &cri.PullImageRequest{Image: &cri.ImageSpec{Image: image}}); err != nil {
		return err.Error()
	}
	return ""
}

// replace writes a file of the node, or removes it if text is empty, until the end of the test.
func (w *world) replace(t *testing.T, file, text string) {
	t.Helper()
	before, err := os.ReadFile(file)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if before == nil {
			_ = os.Remove(file)
		} else {
			scene.Write(t, file, string(before))
		}
	})
	if text == "" {
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
		return
	}
	scene.Write(t, file, text)
}
