package annotation

import (
	"slices"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/oci/spec"
)

// Annotations of pods are either refused or yield something that a spec can
// hold.
func FuzzRead(f *testing.F) {
	for _, seed := range [][2]string{
		{"cpu.example.com/main", `{"cpushares": "20", "cpuset": "0-1"}`}, {"cpu.example.com/main", `{"cpulimit": 500}`},
		{"umask.crio.io", "0022"}, {"shm-size.crio.io", "64Mi"}, {"devices.crio.io", "/dev/fuse:/dev/fuse:rwm"},
		{"unified-cgroup.crio.io/main", "memory.high=1000;pids.max=7"}, {"link-logs.crio.io", "logs"}, {"disable-fips.crio.io", "true"},
		{"cpu-freq-governor.crio.io", "performance"}, {"cpu-c-states.crio.io", "max_latency:10"}, {"cpu-shared.crio.io/main", "enable"},
		{"containerd.io/snapshot/max-size", "10Gi"}, {"ulimits.crius.run/main", "nofile=1:2,core=-1"},
	} {
		f.Add(seed[0], seed[1])
	}
	rules := Rules{
		Allowed: append(slices.Clone(allTuning), "umask.crio.io", "shm-size.crio.io", "devices.crio.io", "unified-cgroup.crio.io", "link-logs.crio.io", "disable-fips.crio.io", "cgroup2-mount-hierarchy-rw.crio.io", LayerSizeKey, "ulimits.crius.run"),
		Devices: []string{"/dev/fuse"},
		Ulimits: []string{"nofile=100"},
		Workloads: map[string]Workload{
			"w": {Activation: "activate", Prefix: "cpu.example.com", Resources: CPU{Shares: 100}},
		},
	}
	f.Fuzz(func(t *testing.T, key, value string) {
		asked, err := Read(map[string]string{"activate": "", key: value}, rules)
		if err != nil {
			return
		}
		for _, d := range asked.Devices {
			if d.HostPath != "/dev/fuse" {
				t.Errorf("%q=%q gives %s", key, value, d.HostPath)
			}
		}
		if asked.ShmSize < 0 || strings.ContainsAny(asked.LogVolume, "/.") {
			t.Errorf("%q=%q: %+v", key, value, asked)
		}
		if strings.ContainsAny(asked.Tuning.Governor, "/. \n") || asked.Tuning.Latency != "n/a" && strings.Trim(asked.Tuning.Latency, "0123456789") != "" {
			t.Errorf("%q=%q: %+v", key, value, asked.Tuning)
		}
		if size := asked.LayerSize("main"); size != 0 && (size < leastLayer || size > largestLayer) {
			t.Errorf("%q=%q gives a layer of %d bytes", key, value, size)
		}
		for _, limit := range asked.Ulimits("main") {
			if limit.Type != "RLIMIT_NOFILE" || limit.Hard > 100 {
				t.Errorf("%q=%q gives %+v", key, value, limit)
			}
		}
		set := asked.Workload("main", &cri.LinuxContainerResources{})
		if _, err := spec.Resources(set, spec.Host{}); err != nil {
			t.Errorf("%q=%q is taken, and then refused: %v", key, value, err)
		}
		for file := range asked.Resources("main", nil).GetUnified() {
			if strings.Contains(file, "/") || strings.HasPrefix(file, "cgroup.") {
				t.Errorf("%q=%q writes %s", key, value, file)
			}
		}
	})
}
