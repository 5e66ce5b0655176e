package kubelet

import (
	"os"
	"path/filepath"
	"testing"
)

func TestSettings(t *testing.T) {
	root := t.TempDir()
	write := func(path, text string) {
		t.Helper()
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	check := func(endpoint, driver Setting, stats bool) {
		t.Helper()
		if e, d, s := Endpoint(root), CgroupDriver(root), StatsFromCRI(root); e != endpoint || d != driver || s != stats {
			t.Errorf("%+v, %+v, %v; want %+v, %+v, %v", e, d, s, endpoint, driver, stats)
		}
	}
	check(Setting{}, Setting{}, false)

	write(configFile, "kind: KubeletConfiguration\ncgroupDriver: systemd # as the runtime\ncontainerRuntimeEndpoint: \"unix:///run/a.sock\"\n"+
		"featureGates:\n  PodAndContainerStatsFromCRI: true\n#cgroupDriver: cgroupfs\n")
	check(Setting{"unix:///run/a.sock", configFile}, Setting{"systemd", configFile}, true)

	write(configFile, "kind: KubeletConfiguration\ncgroupDriver: systemd\ncontainerRuntimeEndpoint: unix:///run/a.sock\nfeatureGates: {X: true, PodAndContainerStatsFromCRI: true}\n")
	check(Setting{"unix:///run/a.sock", configFile}, Setting{"systemd", configFile}, true)
	write(configFile, "kind: KubeletConfiguration\ncgroupDriver: systemd\ncontainerRuntimeEndpoint: unix:///run/a.sock\nfeatureGates:\n# PodAndContainerStatsFromCRI: true\n")
	check(Setting{"unix:///run/a.sock", configFile}, Setting{"systemd", configFile}, false)

	// A flag wins, as it does in the kubelet.
	write(flagFiles[0], `KUBELET_KUBEADM_ARGS="--container-runtime-endpoint=unix:///run/b.sock --pod-infra-container-image=x"`)
	write(flagFiles[2], "KUBELET_EXTRA_ARGS=--cgroup-driver=cgroupfs\n")
	write(configFile, "featureGates:\n  PodAndContainerStatsFromCRI: false\n")
	check(Setting{"unix:///run/b.sock", flagFiles[0]}, Setting{"cgroupfs", flagFiles[2]}, false)

	// Files of the directory override the configuration file; the last one wins.
	write(flagFiles[2], "KUBELET_EXTRA_ARGS=\"--config-dir=/etc/kubelet.d --v=2\"\n")
	write("/etc/kubelet.d/10-a.conf", "kind: KubeletConfiguration\ncgroupDriver: cgroupfs\nfeatureGates:\n  PodAndContainerStatsFromCRI: true\n")
	check(Setting{"unix:///run/b.sock", flagFiles[0]}, Setting{"cgroupfs", "/etc/kubelet.d/10-a.conf"}, true)
	write("/etc/kubelet.d/20-b.conf", "cgroupDriver: systemd\nfeatureGates:\n  PodAndContainerStatsFromCRI: false\n")
	write("/etc/kubelet.d/30-c.conf.bak", "cgroupDriver: no\n")
	write("/etc/kubelet.d/40-d.yaml", "cgroupDriver: no\n")
	check(Setting{"unix:///run/b.sock", flagFiles[0]}, Setting{"systemd", "/etc/kubelet.d/20-b.conf"}, false)
	write("/etc/kubelet.d/25/c.conf", "cgroupDriver: cgroupfs\n")
	check(Setting{"unix:///run/b.sock", flagFiles[0]}, Setting{"cgroupfs", "/etc/kubelet.d/25/c.conf"}, false)
}
