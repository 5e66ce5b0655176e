package classes

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crius-run/crius/internal/fault"
)

func file(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "classes.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

const (
	podWide = "blockio.resources.beta.kubernetes.io/pod"
	forOne  = "blockio.resources.beta.kubernetes.io/container.app"
	byCRI   = "io.kubernetes.cri.blockio-class"
)

// weightOf returns the weight of the class into which a container app is put;
// 0: none.
func weightOf(t *testing.T, c *Classes, pod, container map[string]string) (uint16, error) {
	t.Helper()
	s := &specs.Spec{Linux: &specs.Linux{Resources: &specs.LinuxResources{}}}
	err := c.AddTo(t.Context(), s, Container{Name: "app", Annotations: container, PodAnnotations: pod})
	if b := s.Linux.Resources.BlockIO; b != nil {
		return *b.Weight, err
	}
	return 0, err
}

func TestBlockIO(t *testing.T) {
	path := file(t, "Classes:\n  slow:\n  - Weight: 20\n  fast:\n  - Weight: 900\n")
	c, err := New(Config{BlockIOFile: path})
	if err != nil {
		t.Fatal(err)
	}
	type annotations = map[string]string
	for _, a := range []struct {
		pod, container annotations
		want           uint16
	}{
		{nil, nil, 0},
		{annotations{podWide: "slow"}, nil, 20},
		{annotations{podWide: "slow", forOne: "fast"}, nil, 900},
		{annotations{podWide: "slow", forOne + "2": "fast"}, nil, 20},
		{annotations{forOne: "slow"}, annotations{byCRI: "fast"}, 900},
	} {
		if weight, err := weightOf(t, c, a.pod, a.container); err != nil || weight != a.want {
			t.Errorf("%v, %v: %d, %v; want %d", a.pod, a.container, weight, err, a.want)
		}
	}
	if _, err := weightOf(t, c, annotations{podWide: "medium"}, nil); !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), `"medium"`) || !strings.Contains(err.Error(), "fast, slow") {
		t.Errorf("unknown class: %v", err)
	}
	if named, err := c.BlockIO("slow"); err != nil || *named.Weight != 20 {
		t.Errorf("named by a plugin: %+v, %v", named, err)
	}
	if _, err := c.BlockIO("medium"); !errors.Is(err, fault.Invalid) {
		t.Errorf("unknown class named by a plugin: %v", err)
	}
	// The file is read again.
	if err := os.WriteFile(path, []byte("Classes:\n  medium:\n  - Weight: 300\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if weight, err := weightOf(t, c, annotations{podWide: "medium"}, nil); err != nil || weight != 300 {
		t.Errorf("a class that was added: %d, %v", weight, err)
	}
	if c, err = New(Config{}); err != nil {
		t.Fatal(err)
	}
	if weight, err := weightOf(t, c, annotations{podWide: "medium", "rdt.resources.beta.kubernetes.io/pod": "gold"}, nil); err != nil || weight != 0 {
		t.Errorf("without classes: %d, %v", weight, err)
	}
	if _, err := c.BlockIO("medium"); !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), "runtime.blockio_config_file") {
		t.Errorf("without classes, named by a plugin: %v", err)
	}
	if _, err := c.RDT("gold"); !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), "runtime.rdt_config_file") {
		t.Errorf("without RDT classes, named by a plugin: %v", err)
	}
}

func TestFilesAreChecked(t *testing.T) {
	for text, word := range map[string]string{
		"Classes: 7":                                "cannot unmarshal",
		"Klasses: {}":                               "Klasses",
		"Classes:\n  slow:\n  - Weight: 5000\n":     "Weight",
		"Classes:\n  slow:\n  - ThrottleReadBps: x": "ThrottleReadBps",
	} {
		if _, err := New(Config{BlockIOFile: file(t, text)}); !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), "runtime.blockio_config_file") || !strings.Contains(err.Error(), word) {
			t.Errorf("%q: %v", text, err)
		}
	}
	if _, err := New(Config{BlockIOFile: "/nowhere"}); !errors.Is(err, fault.Invalid) {
		t.Errorf("no file: %v", err)
	}
	for text, word := range map[string]string{
		"partitions: 7":                   "cannot unmarshal",
		"partition: {}":                   "partition",
		"partitions:\n  all:\n    l4: {}": "l4",
	} {
		if _, err := New(Config{RDTFile: file(t, text)}); !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), "runtime.rdt_config_file") || !strings.Contains(err.Error(), word) {
			t.Errorf("%q: %v", text, err)
		}
	}
	if _, err := New(Config{RDTFile: "/nowhere"}); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "runtime.rdt_config_file") {
		t.Errorf("no file: %v", err)
	}
}

// A node without RDT runs, and refuses containers in an RDT class.
func TestNoRDT(t *testing.T) {
	mounts, err := os.ReadFile("/proc/mounts")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(mounts), " resctrl ") {
		return // the test would change it
	}
	c, err := New(Config{RDTFile: file(t, "partitions: {}\n")})
	if err == nil {
		err = c.Load(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := weightOf(t, c, map[string]string{"rdt.resources.beta.kubernetes.io/pod": "gold"}, nil); !errors.Is(err, fault.Unavailable) || !strings.Contains(err.Error(), `"gold"`) {
		t.Errorf("%v", err)
	}
	if _, err := c.RDT("gold"); !errors.Is(err, fault.Unavailable) {
		t.Errorf("named by a plugin: %v", err)
	}
	if _, err := weightOf(t, c, nil, nil); err != nil {
		t.Errorf("no class: %v", err)
	}
}
