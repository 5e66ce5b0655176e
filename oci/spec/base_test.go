package spec

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
)

// someBase is most of what `ctr oci spec` prints, edited by an operator.
const someBase = `{
	"ociVersion": "1.1.0",
	"process": {
		"user": {"uid": 7, "gid": 7},
		"args": ["/bin/evil"],
		"env": ["PATH=/base/bin", "COLOR=red", "SIZE=large", "HOSTNAME=base"],
		"cwd": "/base",
		"capabilities": {"bounding": ["CAP_SYS_ADMIN"], "effective": ["CAP_SYS_ADMIN"]},
		"rlimits": [{"type": "RLIMIT_NOFILE", "hard": 1024, "soft": 1024}, {"type": "RLIMIT_CORE", "hard": 0, "soft": 0}],
		"noNewPrivileges": true,
		"ioPriority": {"class": "IOPRIO_CLASS_IDLE", "priority": 3}
	},
	"root": {"path": "/base"},
	"hostname": "base",
	"mounts": [
		{"destination": "/proc", "type": "tmpfs", "source": "base"},
		{"destination": "/run", "type": "tmpfs", "source": "tmpfs"},
		{"destination": "/etc/hosts", "type": "bind", "source": "/base/hosts", "options": ["ro"]},
		{"destination": "/opt/tools/bin", "type": "bind", "source": "/base/bin", "options": ["rbind", "ro"]},
		{"destination": "/opt/tools", "type": "tmpfs", "source": "base"}
	],
	"hooks": {"poststop": [{"path": "/base/hook"}]},
	"linux": {
		"namespaces": [{"type": "network", "path": "/proc/1/ns/net"}],
		"resources": {"devices": [{"allow": true, "access": "rwm"}], "unified": {"memory.high": "1000", "cpu.weight": "77"}},
		"maskedPaths": ["/base"],
		"intelRdt": {"closID": "gold"}
	}
}`

func same(t *testing.T, what string, got, want any) {
	t.Helper()
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%s: got %+v, want %+v", what, got, want)
	}
}

func withBase(t *testing.T, in Input) *specs.Spec {
	t.Helper()
	b, err := ParseBase([]byte(someBase))
	if err != nil {
		t.Fatal(err)
	}
	in.Defaults.Base = b
	s, err := Container(in)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// Settings of the request, the image, the configuration or crius itself are
// unchanged; the rest is the base's.
func TestBase(t *testing.T) {
	in := typical()
	in.Request.Container.Mounts = append(in.Request.Container.Mounts, &cri.Mount{ContainerPath: "/etc/hosts", HostPath: "/kubelet/hosts"})
	in.Defaults.Ulimits = []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Hard: 9, Soft: 8}}
	plain, err := Container(in)
	if err != nil {
		t.Fatal(err)
	}
	s := withBase(t, in)

	for _, v := range []string{"COLOR=green", "SIZE=large"} {
		if !slices.Contains(s.Process.Env, v) {
			t.Errorf("%s is not in the environment %q", v, s.Process.Env)
		}
	}
	if slices.Contains(s.Process.Env, "COLOR=red") || slices.Contains(s.Process.Env, "HOSTNAME=base") {
		t.Errorf("environment: %q", s.Process.Env)
	}
	same(t, "rlimits", s.Process.Rlimits, []specs.POSIXRlimit{{Type: "RLIMIT_CORE"}, {Type: "RLIMIT_NOFILE", Hard: 9, Soft: 8}})
	same(t, "I/O priority", s.Process.IOPriority, &specs.LinuxIOPriority{Class: specs.IOPRIO_CLASS_IDLE, Priority: 3})
	same(t, "hooks", s.Hooks, &specs.Hooks{Poststop: []specs.Hook{{Path: "/base/hook"}}})
	same(t, "RDT", s.Linux.IntelRdt, &specs.LinuxIntelRdt{ClosID: "gold"})
	same(t, "cgroup files", s.Linux.Resources.Unified["memory.high"], "1000")

	added := slices.DeleteFunc(slices.Clone(s.Mounts), func(m specs.Mount) bool {
		return slices.ContainsFunc(plain.Mounts, func(p specs.Mount) bool { return p.Destination == m.Destination && p.Source == m.Source })
	})
	same(t, "additional mounts, the parent first", added, []specs.Mount{
		{Destination: "/opt/tools", Type: "tmpfs", Source: "base"},
		{Destination: "/opt/tools/bin", Type: "bind", Source: "/base/bin", Options: []string{"rbind", "ro"}},
	})
	same(t, "number of mounts", len(s.Mounts), len(plain.Mounts)+2)

	// Everything else is as without a base.
	s.Process.Env, s.Process.Rlimits, s.Process.IOPriority = plain.Process.Env, plain.Process.Rlimits, nil
	s.Mounts, s.Hooks, s.Linux.IntelRdt, s.Linux.Resources.Unified = plain.Mounts, nil, nil, plain.Linux.Resources.Unified
	same(t, "the rest", s, plain)
}

// The infra container runs under crius's own rules.
func TestInfraContainerHasNoBase(t *testing.T) {
	in := typical()
	plain, err := Sandbox(in, []string{"/pause"})
	if err != nil {
		t.Fatal(err)
	}
	if in.Defaults.Base, err = ParseBase([]byte(someBase)); err != nil {
		t.Fatal(err)
	}
	s, err := Sandbox(in, []string{"/pause"})
	if err != nil {
		t.Fatal(err)
	}
	same(t, "spec", s, plain)
}

func TestLoadBase(t *testing.T) {
	dir := t.TempDir()
	for name, content := range map[string]string{"list": "[]", "cut": someBase[:200], "empty": "", "limits": `{"process": {"rlimits": 7}}`} {
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := LoadBase(file); !errors.Is(err, fault.Precondition) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, path := range []string{filepath.Join(dir, "none"), dir, "/dev/zero"} {
		if _, err := LoadBase(path); !errors.Is(err, fault.Precondition) {
			t.Errorf("%s: %v", path, err)
		}
	}
	file := filepath.Join(dir, "good")
	if err := os.WriteFile(file, []byte(someBase), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := LoadBase(file); err != nil {
		t.Error(err)
	}
}

// FuzzParseBase: a base that parses yields a spec and leaves the confinement of
// the container alone.
func FuzzParseBase(f *testing.F) {
	f.Add([]byte(someBase))
	f.Add([]byte(`{"process": null, "linux": {"resources": null}, "mounts": [{}]}`))
	plain, err := Container(typical())
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		b, err := ParseBase(text)
		if err != nil {
			return
		}
		in := typical()
		in.Defaults.Base = b
		s, err := Container(in)
		if err != nil {
			return // for example a NUL byte in the environment
		}
		same(t, "capabilities", s.Process.Capabilities, plain.Process.Capabilities)
		same(t, "namespaces", s.Linux.Namespaces, plain.Linux.Namespaces)
		same(t, "masked paths", s.Linux.MaskedPaths, plain.Linux.MaskedPaths)
		same(t, "seccomp", s.Linux.Seccomp, plain.Linux.Seccomp)
		same(t, "device rules", s.Linux.Resources.Devices, plain.Linux.Resources.Devices)
	})
}
