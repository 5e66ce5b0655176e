package main_test

import (
	"os"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// withCDI is a node that reads CDI specifications from its directory cdi.
func withCDI(t *testing.T) *scene.World {
	t.Helper()
	w := scene.Private(t, node.Options{Config: "[pod]\ncdi_spec_dirs = [\"{{.Path \"cdi\"}}\", \"{{.Path \"cdi2\"}}\"]\n"})
	for _, dir := range []string{"cdi", "volume"} {
		if err := os.Mkdir(w.Path(dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	scene.Write(t, w.Path("volume", "f"), "from CDI")
	if err := w.Write("cdi/acme.json", acme); err != nil {
		t.Fatal(err)
	}
	return w
}

// acme is a vendor's file: edits for all of its devices, and for each.
const acme = `{
  "cdiVersion": "0.6.0",
  "kind": "acme.test/dev",
  "containerEdits": {"env": ["ACME=present"]},
  "devices": [
    {"name": "one", "containerEdits": {
      "env": ["ACME_ONE=1"],
      "deviceNodes": [{"path": "/dev/acme1", "hostPath": "/dev/zero", "permissions": "rw"}],
      "mounts": [{"containerPath": "/acme", "hostPath": "{{.Path "volume"}}", "options": ["ro", "bind"]}]
    }},
    {"name": "two", "containerEdits": {
      "env": ["ACME_TWO=2"],
      "deviceNodes": [{"path": "/dev/acme2", "hostPath": "/dev/zero", "fileMode": 432, "uid": 1001, "gid": 1002}],
      "hooks": [{"hookName": "createRuntime", "path": "/bin/sh", "args": ["sh", "-c", "cat >/dev/null; touch {{.Path "hooked"}}"]}]
    }}
  ]
}`

func cdi(names ...string) scene.ContainerChange {
	return func(c *cri.ContainerConfig) {
		for _, n := range names {
			c.CDIDevices = append(c.CDIDevices, &cri.CDIDevice{Name: n})
		}
	}
}

// cdiAnnotation requests devices as before the field existed.
func cdiAnnotation(value string) scene.ContainerChange {
	return func(c *cri.ContainerConfig) { c.Annotations["cdi.k8s.io/plugin_acme"] = value }
}

func env(t *testing.T, c *scene.Container, name string) string {
	t.Helper()
	value, _ := c.Facts(t).Getenv(name)
	return value
}

func TestCDI(t *testing.T) {
	t.Parallel()
	w := withCDI(t)
	t.Run("devices", func(t *testing.T) { cdiDevices(t, w) })
	t.Run("devices that are none", func(t *testing.T) { noCDIDevices(t, w) })
	t.Run("files that change", func(t *testing.T) { cdiFilesChange(t, w) })
}

func cdiDevices(t *testing.T, w *scene.World) {
	p := w.Pod(t, "crun")
	for how, change := range map[string]scene.ContainerChange{
		"field": cdi("acme.test/dev=one"), "annotation": cdiAnnotation("acme.test/dev=one"),
		"both": both(cdi("acme.test/dev=one"), cdiAnnotation("acme.test/dev=one")),
	} {
		t.Run(how, func(t *testing.T) {
			c := p.Start(t, "sleep", change)
			scene.Equal(t, "ACME", env(t, c, "ACME"), "present")
			scene.Equal(t, "ACME_ONE", env(t, c, "ACME_ONE"), "1")
			scene.Equal(t, "ACME_TWO", env(t, c, "ACME_TWO"), "")
			scene.Equal(t, "the device", c.Exec(t, "open /dev/acme1 rw"), "ok\n")
			scene.Equal(t, "the mount", c.Exec(t, "cat /acme/f"), "from CDI")
			c.Refuses(t, "write /acme/f x", "read-only file system")
			c.Refuses(t, "stat /dev/acme2", "no such file")
		})
	}
	os.Remove(w.Path("hooked"))
	c := p.Start(t, "sleep", cdi("acme.test/dev=one"), cdiAnnotation("acme.test/dev=two,acme.test/dev=one"))
	scene.Equal(t, "ACME_ONE and ACME_TWO", env(t, c, "ACME_ONE")+env(t, c, "ACME_TWO"), "12")
	scene.Equal(t, "owner of the second device", inside(t, c, "/dev/acme2"), "1001:1002")
	if _, err := os.Stat(w.Path("hooked")); err != nil {
		t.Errorf("the hook did not run: %v", err)
	}
	plain := p.Start(t, "sleep")
	scene.Equal(t, "ACME where nobody asked", env(t, plain, "ACME"), "")
	plain.Refuses(t, "stat /dev/acme1", "no such file")
	scene.Equal(t, "annotation in the status", c.Status(t).Annotations["cdi.k8s.io/plugin_acme"], "acme.test/dev=two,acme.test/dev=one")
}

func noCDIDevices(t *testing.T, w *scene.World) {
	scene.Write(t, w.Path("cdi", "broken.json"), `{"cdiVersion": "0.6.0", "kind": "broken.test/dev", "devices": [`)
	refused := []codes.Code{codes.InvalidArgument, codes.NotFound, codes.FailedPrecondition}
	p := w.Pod(t, "crun")
	p.Untouched(t, func() {
		for name, test := range map[string]struct {
			change scene.ContainerChange
			word   string
		}{
			"unknown device":     {cdi("acme.test/dev=nine"), "acme.test/dev=nine"},
			"unknown vendor":     {cdi("nobody.test/dev=one"), "nobody.test/dev=one"},
			"one of two":         {cdi("acme.test/dev=one", "acme.test/dev=nine"), "acme.test/dev=nine"},
			"by annotation":      {cdiAnnotation("acme.test/dev=nine"), "acme.test/dev=nine"},
			"of a broken file":   {cdi("broken.test/dev=one"), "broken.test/dev=one"},
			"no device's name":   {cdi("one"), `one`},
			"an empty name":      {cdi(""), "CDI"},
			"a wrong annotation": {cdiAnnotation("acme.test/dev"), "acme.test/dev"},
		} {
			t.Run(name, func(t *testing.T) {
				_, err := p.Try(t.Context(), "sleep", test.change)
				scene.WantOneOf(t, err, refused, test.word)
			})
		}
	})
	// A broken file affects only what it describes.
	scene.Equal(t, "ACME_ONE", env(t, p.Start(t, "sleep", cdi("acme.test/dev=one")), "ACME_ONE"), "1")
}

// Device plugins write and change their files while the node is running.
func cdiFilesChange(t *testing.T, w *scene.World) {
	p := w.Pod(t, "runc")
	scene.Equal(t, "at first", env(t, p.Start(t, "sleep", cdi("acme.test/dev=one")), "ACME_ONE"), "1")
	if err := w.Write("cdi/acme.json", strings.ReplaceAll(acme, "ACME_ONE=1", "ACME_ONE=changed")); err != nil {
		t.Fatal(err)
	}
	wait.For(t, "the changed file to be seen", func() bool {
		return env(t, p.Start(t, "sleep", cdi("acme.test/dev=one")), "ACME_ONE") == "changed"
	})
	later := `{"cdiVersion": "0.6.0", "kind": "later.test/dev", "devices": [{"name": "one", "containerEdits": {"env": ["LATER=yes"]}}]}`
	if err := w.Write("cdi2/later.json", later); err != nil { // in a directory that did not exist
		t.Fatal(err)
	}
	var c *scene.Container
	wait.For(t, "the new file to be seen", func() bool { c, _ = p.Try(t.Context(), "sleep", cdi("later.test/dev=one")); return c != nil })
	c.Start(t)
	scene.Equal(t, "LATER", env(t, c, "LATER"), "yes")
	if err := os.Remove(w.Path("cdi2", "later.json")); err != nil {
		t.Fatal(err)
	}
	wait.For(t, "the removed file's device to go", func() bool { _, err := p.Try(t.Context(), "sleep", cdi("later.test/dev=one")); return err != nil })
	scene.Equal(t, "a container that has it already", env(t, c, "LATER"), "yes")
}
