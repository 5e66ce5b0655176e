package annotation

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
)

// allAsked are all implemented annotations, in the form in which a handler
// allows them.
var allAsked = []string{"shm-size.crio.io", "devices.crio.io", "umask.crio.io", "unified-cgroup.crio.io", "cgroup2-mount-hierarchy-rw.crio.io", "disable-fips.crio.io", "link-logs.crio.io", "seccomp-profile.crio.io"}

func TestReadAsked(t *testing.T) {
	t.Parallel()
	devices := []string{"/dev/fuse", "/dev/net/tun"}
	for _, c := range []struct {
		key, value string
		says       func(Asked) any
		want       any
	}{
		{"shm-size.crio.io", "128Mi", func(a Asked) any { return a.ShmSize }, int64(128 << 20)},
		{"io.kubernetes.cri-o.ShmSize", " 2G ", func(a Asked) any { return a.ShmSize }, int64(2e9)},
		{"shm-size.crio.io", "65536", func(a Asked) any { return a.ShmSize }, int64(65536)},
		{"umask.crio.io", "027", func(a Asked) any { return *a.Umask }, uint32(0o27)},
		{"io.kubernetes.cri-o.umask", "7777", func(a Asked) any { return *a.Umask }, uint32(0o777)},
		{"devices.crio.io", "/dev/fuse, /dev/net/tun:/dev/tun:r,", func(a Asked) any {
			return len(a.Devices) == 2 && a.Devices[0].HostPath == "/dev/fuse" && a.Devices[1].ContainerPath == "/dev/tun" && a.Devices[1].Permissions == "r"
		}, true},
		{"cgroup2-mount-hierarchy-rw.crio.io", "true", func(a Asked) any { return a.WritableCgroups }, true},
		{"io.kubernetes.cri-o.cgroup2-mount-hierarchy-rw", "false", func(a Asked) any { return a.WritableCgroups }, false},
		{"link-logs.crio.io", "my-logs", func(a Asked) any { return a.LogVolume }, "my-logs"},
		{"io.kubernetes.cri-o.LinkLogs", "logs", func(a Asked) any { return a.LogVolume }, "logs"},
		{"disable-fips.crio.io", "true", func(a Asked) any { return a.DisableFIPS }, true},
		{"io.kubernetes.cri-o.DisableFIPS", "true", func(a Asked) any { return a.DisableFIPS }, true},
		{"unified-cgroup.crio.io/app", "memory.high=1000000;memory.min=MTAwMDA=", func(a Asked) any { return a.unified["app"]["memory.high"] + a.unified["app"]["memory.min"] }, "100000010000"},
		{"unified-cgroup.crio.io.app", "memory.high=1", func(a Asked) any { return a.unified["app"]["memory.high"] }, "1"},
		{"io.kubernetes.cri-o.UnifiedCgroup.app", "memory.high=1", func(a Asked) any { return a.unified["app"]["memory.high"] }, "1"},
		{"seccomp-profile.crio.io/app", " quay.io/crio/seccomp:v2", func(a Asked) any { return a.SeccompProfile("app") + "," + a.SeccompProfile("other") }, "quay.io/crio/seccomp:v2,"},
		{"seccomp-profile.kubernetes.cri-o.io/app", "a:1", func(a Asked) any { return a.SeccompProfile("app") }, "a:1"},
		{"seccomp-profile.kubernetes.cri-o.io/POD", "a:1", func(a Asked) any { return a.SeccompProfile("app") }, "a:1"},
		{"seccomp-profile.kubernetes.cri-o.io", "a:1", func(a Asked) any { return a.SeccompProfile("app") + a.Ignored[0] }, "seccomp-profile.kubernetes.cri-o.io"},
		{"io.kubernetes.cri-o.ContainerType", "sandbox", func(a Asked) any { return len(a.Ignored) }, 0},
		{"example.com/devices.crio.io", "x", func(a Asked) any { return len(a.Ignored) }, 0},
	} {
		a, err := Read(map[string]string{c.key: c.value}, Rules{Allowed: allAsked, Devices: devices})
		if err != nil {
			t.Errorf("%s=%s: %v", c.key, c.value, err)
			continue
		}
		if got := c.says(a); got != c.want {
			t.Errorf("%s=%s: %v, want %v", c.key, c.value, got, c.want)
		}
	}
}

// The profile of a container takes precedence over the pod's, even an empty
// one, which means none.
func TestSeccompProfileOfContainer(t *testing.T) {
	t.Parallel()
	a, err := Read(map[string]string{
		"seccomp-profile.crio.io/POD": "pod:1", "seccomp-profile.crio.io/app": "app:1", "seccomp-profile.crio.io/free": "",
	}, Rules{Allowed: []string{"seccomp-profile.kubernetes.cri-o.io"}})
	if err != nil {
		t.Fatal(err)
	}
	for container, want := range map[string]string{"app": "app:1", "free": "", "other": "pod:1"} {
		if got := a.SeccompProfile(container); got != want {
			t.Errorf("%s has %q, want %q", container, got, want)
		}
	}
}

func TestAskedRefusesMalformedAnnotations(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		key, value string
		kind       error
	}{
		{"shm-size.crio.io", "", fault.Invalid},
		{"shm-size.crio.io", "0", fault.Invalid},
		{"shm-size.crio.io", "-1Mi", fault.Invalid},
		{"shm-size.crio.io", "1.5Gi", fault.Invalid},
		{"shm-size.crio.io", "1Mk", fault.Invalid},
		{"shm-size.crio.io", "9999999999999Ti", fault.Invalid},
		{"umask.crio.io", "8", fault.Invalid},
		{"umask.crio.io", "00022", fault.Invalid},
		{"devices.crio.io", "fuse", fault.Invalid},
		{"devices.crio.io", "/dev/fuse:/dev/fuse:x", fault.Invalid},
		{"devices.crio.io", "/dev/fuse,/dev/sda", fault.Denied},
		{"devices.crio.io", "/dev/fuse/../sda", fault.Denied},
		{"cgroup2-mount-hierarchy-rw.crio.io", "please", fault.Invalid},
		{"unified-cgroup.crio.io/app", "memory.high", fault.Invalid},
		{"disable-fips.crio.io", "", fault.Invalid},
		{"link-logs.crio.io", "", fault.Invalid},
		{"link-logs.crio.io", "../../../etc", fault.Invalid},
		{"link-logs.crio.io", "a\nb", fault.Invalid},
		{"link-logs.crio.io", strings.Repeat("a", 64), fault.Invalid},
	} {
		_, err := Read(map[string]string{c.key: c.value}, Rules{Allowed: allAsked, Devices: []string{"/dev/fuse"}})
		if !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.key) {
			t.Errorf("%s=%s: %v, want %v", c.key, c.value, err, c.kind)
		}
	}
}

// An annotation that the handler does not allow has no effect, whatever its
// value, and is reported.
func TestAskedWithoutEffect(t *testing.T) {
	t.Parallel()
	annotations := map[string]string{
		"shm-size.crio.io":                "nonsense",
		"io.kubernetes.cri-o.Devices":     "/dev/sda",
		"userns-mode.crio.io":             "auto",
		"io.kubernetes.cri-o.userns-mode": "auto",
		"seccomp-profile.crio.io/app":     "unconfined",

		"seccomp-profile.kubernetes.cri-o.io":     "quay.io/crio/seccomp:v2",
		"seccomp-profile.kubernetes.cri-o.io/POD": "quay.io/crio/seccomp:v2",
		"seccomp-profile.kubernetes.cri-o.io/app": "quay.io/crio/seccomp:v2",
		"umask.crio.io/app":                       "0",
		"unified-cgroup.crio.io":                  "a.b=c",
		"io.kubernetes.cri-o.LinkLogs":            "logs",
		"cpu-load-balancing.crio.io":              "disable",
		"io.kubernetes.cri-o.SandboxID":           "x",
		"kubernetes.io/config.source":             "api",
		"io.katacontainers.config.runtime":        "x",
	}
	all := slices.Sorted(maps.Keys(annotations))
	want := slices.DeleteFunc(slices.Clone(all), func(key string) bool {
		return slices.Contains([]string{"io.kubernetes.cri-o.SandboxID", "kubernetes.io/config.source", "io.katacontainers.config.runtime"}, key)
	})
	for _, allowed := range [][]string{nil, {"io.kubernetes.cri-o.S*", "devices"}} {
		a, err := Read(annotations, Rules{Allowed: allowed})
		if err != nil || !slices.Equal(a.Ignored, want) {
			t.Errorf("allowed %q: ignored %q, %v; want %q", allowed, a.Ignored, err, want)
		}
	}
	// A key in either spelling allows both.
	for _, key := range []string{"shm-size.crio.io", "io.kubernetes.cri-o.ShmSize"} {
		for _, allowed := range []string{"shm-size.crio.io", "io.kubernetes.cri-o.ShmSize"} {
			a, err := Read(map[string]string{key: "1Mi"}, Rules{Allowed: []string{allowed}})
			if err != nil || a.ShmSize != 1<<20 {
				t.Errorf("%s, allowed by %s: %+v, %v", key, allowed, a, err)
			}
		}
		for _, pattern := range []string{"*", "*.crio.io", "shm-*", "io.kubernetes.cri-o.*", "shm-siz[e].crio.io"} {
			a, err := Read(map[string]string{key: "1Mi"}, Rules{Allowed: []string{pattern}})
			if err != nil || a.ShmSize != 0 || len(a.Ignored) != 1 {
				t.Errorf("%s acts by the pattern %s: %+v, %v", key, pattern, a, err)
			}
		}
	}
}

func TestAskedFilesOverrideTheRequest(t *testing.T) {
	t.Parallel()
	request := &cri.LinuxContainerResources{CpuShares: 7, Unified: map[string]string{"memory.high": "1", "memory.low": "2"}}
	a, err := Read(map[string]string{"unified-cgroup.crio.io/app": "memory.high=3"}, Rules{Allowed: allAsked})
	if err != nil {
		t.Fatal(err)
	}
	got := a.Resources("app", request)
	if got.CpuShares != 7 || got.Unified["memory.high"] != "3" || got.Unified["memory.low"] != "2" {
		t.Errorf("%v", got)
	}
	if request.Unified["memory.high"] != "1" || a.Resources("other", request) != request {
		t.Error("the request, or another container's, has changed")
	}
	if got := a.Resources("app", nil); got.Unified["memory.high"] != "3" {
		t.Errorf("without a request: %v", got)
	}
}
