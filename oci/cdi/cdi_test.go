package cdi

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	"tags.cncf.io/container-device-interface/pkg/parser"

	"github.com/crius-run/crius/internal/fault"
)

func TestDevices(t *testing.T) {
	for name, c := range map[string]struct {
		config *cri.ContainerConfig
		want   []string
		err    error
	}{
		"none":  {config: &cri.ContainerConfig{Annotations: map[string]string{"example.com/a": "b"}}},
		"field": {config: &cri.ContainerConfig{CDIDevices: []*cri.CDIDevice{{Name: "v.com/c=1"}, {Name: "v.com/c=0"}}}, want: []string{"v.com/c=1", "v.com/c=0"}},
		"both, once each": {config: &cri.ContainerConfig{
			CDIDevices:  []*cri.CDIDevice{{Name: "v.com/c=1"}},
			Annotations: map[string]string{"cdi.k8s.io/b": "v.com/c=3", "cdi.k8s.io/a": "v.com/c=2,v.com/c=1"},
		}, want: []string{"v.com/c=1", "v.com/c=2", "v.com/c=3"}},
		"malformed": {config: &cri.ContainerConfig{Annotations: map[string]string{"cdi.k8s.io/a": "/dev/sda"}}, err: fault.Invalid},
	} {
		got, err := Devices(c.config)
		if !slices.Equal(got, c.want) || !errors.Is(err, c.err) {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
}

func TestInject(t *testing.T) {
	low, high := t.TempDir(), t.TempDir()
	dirs := []string{low, high}
	write := func(dir, name, value string) {
		t.Helper()
		text := "cdiVersion: 0.6.0\nkind: v.com/c\ndevices:\n- name: one\n  containerEdits:\n    env: [FROM=" + value + "]\n"
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	env := func() string {
		t.Helper()
		s := &specs.Spec{Process: &specs.Process{}}
		if err := Inject(s, dirs, []string{"v.com/c=one"}); err != nil {
			t.Fatal(err)
		}
		return strings.Join(s.Process.Env, " ")
	}
	if err := Inject(nil, dirs, nil); err != nil {
		t.Errorf("no devices: %v", err)
	}
	write(low, "v.yaml", "low")
	if got := env(); got != "FROM=low" {
		t.Error(got)
	}
	write(high, "v.yaml", "high") // seen without a notification
	if got := env(); got != "FROM=high" {
		t.Error(got)
	}
	if err := os.WriteFile(filepath.Join(low, "broken.json"), []byte("{"), 0o644); err != nil {
		t.Fatal(err)
	}
	if got := env(); got != "FROM=high" {
		t.Errorf("beside a broken file: %s", got)
	}
	err := Inject(&specs.Spec{}, dirs, []string{"v.com/c=one", "v.com/c=two"})
	for _, want := range []string{"v.com/c=two", low, "broken.json"} {
		if !errors.Is(err, fault.NotFound) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v lacks %q", err, want)
		}
	}
}

// A directory that does not exist is no error. Files of one directory must not describe the same
// device, and a device must change something: the error says which file is wrong.
func TestFilesThatAreNoUse_cdi_115_moby_47633(t *testing.T) {
	dir := t.TempDir()
	dirs := []string{filepath.Join(dir, "missing"), dir}
	for name, text := range map[string]string{
		"good.yaml":  "cdiVersion: 0.6.0\nkind: v.com/good\ndevices:\n- name: one\n  containerEdits:\n    env: [GOOD=1]\n",
		"same1.yaml": "cdiVersion: 0.6.0\nkind: v.com/same\ndevices:\n- name: one\n  containerEdits:\n    env: [A=1]\n",
		"same2.yaml": "cdiVersion: 0.6.0\nkind: v.com/same\ndevices:\n- name: one\n  containerEdits:\n    env: [A=2]\n",
		"empty.yaml": "cdiVersion: 0.6.0\nkind: v.com/empty\ncontainerEdits:\n  env: [B=1]\ndevices:\n- name: one\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	s := &specs.Spec{Process: &specs.Process{}}
	if err := Inject(s, dirs, []string{"v.com/good=one"}); err != nil || !slices.Equal(s.Process.Env, []string{"GOOD=1"}) {
		t.Errorf("%q, %v", s.Process.Env, err)
	}
	for device, files := range map[string][]string{"v.com/same=one": {"same1.yaml", "same2.yaml"}, "v.com/empty=one": {"empty.yaml"}} {
		err := Inject(&specs.Spec{}, dirs, []string{device})
		for _, want := range append(files, device) {
			if !errors.Is(err, fault.NotFound) || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v lacks %q", device, err, want)
			}
		}
	}
}

// After a reboot or an update files describe devices that are not there any more, or are others.
func TestDevicesThatAreGone_nvidia_container_toolkit_885(t *testing.T) {
	dir := t.TempDir()
	text := `{"cdiVersion": "0.6.0", "kind": "v.com/c", "devices": [
		{"name": "gone", "containerEdits": {"deviceNodes": [{"path": "/dev/one", "hostPath": "` + dir + `/gone"}]}},
		{"name": "file", "containerEdits": {"deviceNodes": [{"path": "/dev/two", "hostPath": "` + dir + `/v.json"}]}},
		{"name": "other", "containerEdits": {"deviceNodes": [{"path": "/dev/null", "type": "b"}]}},
		{"name": "known", "containerEdits": {"deviceNodes": [{"path": "/dev/three", "hostPath": "` + dir + `/gone", "type": "c", "major": 195}]}}]}`
	if err := os.WriteFile(filepath.Join(dir, "v.json"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	for device, path := range map[string]string{"gone": dir + "/gone", "file": dir + "/v.json", "other": "/dev/null"} {
		err := Inject(&specs.Spec{}, []string{dir}, []string{"v.com/c=" + device})
		if !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "v.com/c="+device) {
			t.Errorf("%s: %v", device, err)
		}
	}
	// A file may describe a device that the node does not have yet.
	s := &specs.Spec{}
	if err := Inject(s, []string{dir}, []string{"v.com/c=known"}); err != nil || s.Linux.Devices[0].Major != 195 {
		t.Errorf("%+v, %v", s.Linux, err)
	}
}

// Annotations come from requests: each requested device is a qualified name,
// and appears once.
func FuzzDevices(f *testing.F) {
	f.Add("cdi.k8s.io/a", "v.com/c=1,v.com/c=2", "v.com/c=1")
	f.Add("cdi.k8s.io/", "", "")
	f.Add("cdi.k8s.io/a", "/dev/sda,=,v.com/c=", "x")
	f.Add("example.com/a", "v.com/c=\xff", "../x")
	f.Fuzz(func(t *testing.T, key, value, field string) {
		c := &cri.ContainerConfig{
			Annotations: map[string]string{key: value},
			CDIDevices:  []*cri.CDIDevice{{Name: field}, {Name: field}},
		}
		names, err := Devices(c)
		if err != nil {
			if !errors.Is(err, fault.Invalid) || len(names) > 0 {
				t.Errorf("%q=%q: %q, %v", key, value, names, err)
			}
			return
		}
		if names[0] != field || len(slices.Compact(slices.Sorted(slices.Values(names)))) != len(names) {
			t.Errorf("%q=%q and %q: %q", key, value, field, names)
		}
		for _, name := range names[1:] {
			if !parser.IsQualifiedName(name) || !utf8.ValidString(name) || !strings.HasPrefix(key, "cdi.k8s.io/") {
				t.Errorf("%q=%q asks for %q", key, value, name)
			}
		}
	})
}

// A device's variables take the place of those of the image and the request (cri-o#9296), and it
// may be visible without any access to it (container-device-interface#300).
func TestInjectedEditsWin_crio_9296_cdi_300(t *testing.T) {
	dir := t.TempDir()
	text := `{"cdiVersion": "1.1.0", "kind": "v.com/c", "devices": [{"name": "one", "containerEdits": {
		"env": ["DEVICE=assigned"], "deviceNodes": [{"path": "/dev/null", "permissions": "none"}]}}]}`
	if err := os.WriteFile(filepath.Join(dir, "v.json"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	s := &specs.Spec{Process: &specs.Process{Env: []string{"A=1", "DEVICE=all", "B=2"}}}
	if err := Inject(s, []string{dir}, []string{"v.com/c=one"}); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(s.Process.Env, " "); got != "A=1 DEVICE=assigned B=2" {
		t.Errorf("environment %s", got)
	}
	if len(s.Linux.Devices) != 1 || slices.ContainsFunc(s.Linux.Resources.Devices, func(d specs.LinuxDeviceCgroup) bool { return d.Allow && d.Access != "" }) {
		t.Errorf("devices %+v, rules %+v", s.Linux.Devices, s.Linux.Resources)
	}
	// Without directories no device is known, rather than left out (containerd#12674).
	if err := Inject(s, nil, []string{"v.com/c=one"}); !errors.Is(err, fault.NotFound) {
		t.Errorf("without directories: %v", err)
	}
}
