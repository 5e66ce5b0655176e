package foreign

import (
	"path/filepath"
	"testing"
)

// Configurations from public reports of CRI-O (test/reports.md).
func TestCrioReports(t *testing.T) {
	t.Parallel()
	for report, c := range map[string]struct {
		files map[string]string
		want  map[string]string
	}{
		"crio_2952_obsolete_key_of_another_type": {map[string]string{"crio.conf": "[crio.api]\nhost_ip = []\n"}, map[string]string{"runtime.default_handler": `"crun"`}},
		"crio_8626_default_runtime_of_the_package": {
			map[string]string{"crio.conf.d/10-crio.conf": "[crio.runtime]\ndefault_runtime = 'runc'\n[crio.runtime.runtimes.crun]\nruntime_path = '/usr/libexec/crio/crun'\nruntime_root = '/run/crun'\n" +
				"[crio.runtime.runtimes.runc]\nruntime_path = '/usr/libexec/crio/runc'\nmonitor_path = '/usr/libexec/crio/conmon'\n"},
			map[string]string{"runtime.default_handler": `"runc"`, "runtime.handlers.runc.path": `"/usr/libexec/crio/runc"`, "runtime.handlers.crun.path": `"/usr/libexec/crio/crun"`},
		},
		"crio_6188_workload_without_resources": {
			map[string]string{"crio.conf": "[crio.runtime.workloads.management]\nactivation_annotation = 'target.workload.openshift.io/management'\nannotation_prefix = 'resources.workload.openshift.io'\n"},
			map[string]string{"runtime.workloads.management.annotation_prefix": `"resources.workload.openshift.io"`},
		},
		"crio_3123_order_of_drop_ins": {
			map[string]string{"crio.conf": "[crio.runtime]\npids_limit = 5\n", "crio.conf.d/00-default": "[crio.runtime]\npids_limit = 6\n", "crio.conf.d/01-my": "[crio.runtime]\npids_limit = 7\n"},
			map[string]string{"pod.pids_limit": "7"},
		},
		"nvidia_container_toolkit_1829_directory_that_crio_does_not_read": {
			map[string]string{"crio.conf": "[crio.runtime]\npids_limit = 5\n", "conf.d/99-nvidia.conf": "[crio.runtime]\npids_limit = 9\n"}, map[string]string{"pod.pids_limit": "5"},
		},
		"crio_3772_handler_of_an_installer_alone": {
			map[string]string{"crio.conf.d/99-kata": "[crio.runtime.runtimes.kata]\nruntime_path = '/opt/kata/bin/containerd-shim-kata-v2'\nruntime_type = 'vm'\n"},
			map[string]string{"runtime.default_handler": `"crun"`, "runtime.handlers.kata.type": `"shim"`},
		},
		"harbor_helm_2249_short_names_as_before_1_34": {
			map[string]string{"crio.conf": "[crio.image]\nshort_name_mode = 'disabled'\n"}, map[string]string{"image.short_name_mode": `"disabled"`},
		},
		"gpu_operator_1796_hook_in_place_of_a_handler": {
			map[string]string{"crio.conf.d/99-nvidia.toml": "[crio]\n[crio.runtime]\nhooks_dir = ['/run/containers/oci/hooks.d', '/usr/share/containers/oci/hooks.d']\n"},
			map[string]string{"runtime.hooks_dir": `["/run/containers/oci/hooks.d", "/usr/share/containers/oci/hooks.d"]`, "runtime.default_handler": `"crun"`},
		},
		"gpu_operator_984_crun_of_the_package_is_in_no_path": {
			map[string]string{"crio.conf.d/10-crio.conf": "[crio.runtime.runtimes.crun]\nruntime_path = '/usr/libexec/crio/crun'\n",
				"crio.conf.d/99-nvidia.conf": "[crio.runtime.runtimes.nvidia]\nruntime_path = '/usr/local/nvidia/toolkit/nvidia-container-runtime'\n"},
			map[string]string{"runtime.default_handler": `"crun"`, "runtime.handlers.crun.path": `"/usr/libexec/crio/crun"`, "runtime.handlers.nvidia.path": `"/usr/local/nvidia/toolkit/nvidia-container-runtime"`},
		},
		"crio_8765_no_limit_for_pulls_without_progress": {map[string]string{"crio.conf": "[crio.image]\npull_progress_timeout = '0s'\n"}, map[string]string{"image.progress_timeout": `"0s"`}},
		"crio_8754_handler_that_inherits_the_default_one": {
			map[string]string{"crio.conf.d/99-runtimes.conf": "[crio.runtime]\ndefault_runtime = 'crun'\n[crio.runtime.runtimes.crun]\nruntime_path = '/usr/bin/crun'\n" +
				"[crio.runtime.runtimes.high-performance]\ninherit_default_runtime = true\n"},
			map[string]string{"runtime.handlers.high-performance.path": `"/usr/bin/crun"`},
		},
		"kata_containers_9537_pull_in_the_guest": {
			map[string]string{"crio.conf.d/99-kata-deploy": "[crio.runtime.runtimes.kata-qemu]\nruntime_path = '/usr/local/bin/containerd-shim-kata-qemu-v2'\nruntime_type = 'vm'\n" +
				"runtime_config_path = '/opt/kata/c.toml'\nprivileged_without_host_devices = true\nruntime_pull_image = true\n"},
			map[string]string{"runtime.handlers.kata-qemu.type": `"shim"`, "runtime.handlers.kata-qemu.options": `["--ConfigPath=/opt/kata/c.toml"]`, "runtime.handlers.kata-qemu.privileged_without_host_devices": "true"},
		},
		"crio_6862_patterns_of_pinned_images": {
			map[string]string{"crio.conf": "[crio.image]\npinned_images = ['quay.io/pause:4.4', 'acme.io/k8s/*', '*pause*']\n"},
			map[string]string{"image.pinned_images": `["quay.io/pause:4.4", "acme.io/k8s/*", "*pause*"]`},
		},
	} {
		t.Run(report, func(t *testing.T) { wantSettings(t, crioOf(t, c.files), c.want) })
	}
}

// Configurations from public reports of containerd.
func TestContainerdReports(t *testing.T) {
	t.Parallel()
	const (
		v2, v3  = "[plugins.'io.containerd.grpc.v1.cri'", "[plugins.'io.containerd.cri.v1.runtime'"
		imports = "version = 2\nimports = ['conf.d/*.toml']\n"
	)
	for report, c := range map[string]struct {
		files map[string]string
		want  map[string]string
	}{
		"containerd_12891_drop_in_of_a_newer_version": {
			map[string]string{
				"config.toml":       imports + v2 + "]\nmax_concurrent_downloads = 7\n" + v2 + ".containerd.runtimes.runc]\nruntime_type = 'io.containerd.runc.v2'\n" + v2 + ".containerd.runtimes.runc.options]\nSystemdCgroup = true\n",
				"conf.d/tools.toml": "version = 3\n" + v3 + ".containerd.runtimes.test]\nruntime_type = 'io.containerd.runc.v2'\n" + v3 + ".containerd.runtimes.test.options]\nBinaryName = '/t/runc'\n",
			},
			map[string]string{"image.parallel_layers": "7", "runtime.cgroup_driver": `"systemd"`, "runtime.handlers.runc.path": `"runc"`, "runtime.handlers.test.path": `"/t/runc"`},
		},
		"containerd_13939_one_runtime_in_files_of_two_versions": {
			map[string]string{
				"config.toml":       imports + v2 + ".containerd.runtimes.runc]\nruntime_type = 'io.containerd.runc.v2'\n" + v2 + ".containerd.runtimes.runc.options]\nSystemdCgroup = true\nBinaryName = '/old'\n",
				"conf.d/tools.toml": "version = 3\n" + v3 + ".containerd.runtimes.runc.options]\nBinaryName = '/new'\n",
			},
			map[string]string{"runtime.cgroup_driver": `"systemd"`, "runtime.handlers.runc.type": `"oci"`, "runtime.handlers.runc.path": `"/new"`},
		},
		"containerd_12101_runc_without_its_type": {
			map[string]string{"config.toml": "version = 3\n" + v3 + ".containerd.runtimes.runc.options]\nSystemdCgroup = true\n"},
			map[string]string{"runtime.cgroup_driver": `"systemd"`, "runtime.handlers.runc.type": `"oci"`, "runtime.handlers.runc.path": `"runc"`},
		},
		"containerd_7982_drop_in_adds_a_runtime": {
			map[string]string{
				"config.toml":     imports + v2 + ".containerd.runtimes.runc]\nruntime_type = 'io.containerd.runc.v2'\n" + v2 + ".containerd.runtimes.runc.options]\nSystemdCgroup = true\n",
				"conf.d/foo.toml": v2 + ".containerd.runtimes.foo]\nruntime_type = 'io.containerd.runc.v2'\n" + v2 + ".containerd.runtimes.foo.options]\nBinaryName = 'runfoo'\n",
			},
			map[string]string{"runtime.cgroup_driver": `"systemd"`, "runtime.handlers.foo.path": `"runfoo"`, "runtime.handlers.runc.path": `"runc"`},
		},
		"containerd_4574_cgroups_by_the_old_key": {
			map[string]string{"config.toml": "version = 2\n" + v2 + "]\nsystemd_cgroup = true\n"}, map[string]string{"runtime.cgroup_driver": `"systemd"`},
		},
		"containerd_4203_key_in_the_wrong_spelling": {
			map[string]string{"config.toml": "version = 2\n" + v2 + ".containerd.runtimes.runc.options]\nsystemd_cgroup = true\n"}, map[string]string{"runtime.cgroup_driver": `"cgroupfs"`},
		},
		"containerd_10132_keys_that_version_3_ignores": {
			map[string]string{"config.toml": "version = 3\n" + v2 + "]\nstream_server_port = '10010'\n" + v2 + ".containerd]\ndefault_runtime_name = 'kata'\n" + v2 + ".containerd.runtimes.kata]\nruntime_type = 'io.containerd.kata.v2'\n"},
			map[string]string{"runtime.default_handler": `"runc"`, "runtime.handlers.kata.type": "", "api.stream_address": `"127.0.0.1:10010"`},
		},
		"kata_containers_12936_drop_in_of_version_3_for_version_4": {
			map[string]string{
				"config.toml":             "version = 4\nimports = ['conf.d/*.toml']\n" + v3 + ".containerd]\ndefault_runtime_name = 'runc'\n" + v3 + ".containerd.runtimes.runc]\nruntime_type = 'io.containerd.runc.v2'\n",
				"conf.d/kata-deploy.toml": "version = 3\n" + v3 + ".containerd.runtimes.kata-qemu]\nruntime_type = 'io.containerd.kata-qemu.v2'\n",
			},
			map[string]string{"runtime.default_handler": `"runc"`, "runtime.handlers.runc.type": `"oci"`, "runtime.handlers.kata-qemu.type": `"shim"`},
		},
		"kata_containers_3229_only_the_runtimes_of_an_installer": {
			map[string]string{"config.toml": "version = 2\n" + v2 + ".containerd.runtimes.kata-qemu]\nruntime_type = 'io.containerd.kata-qemu.v2'\n"},
			map[string]string{"runtime.default_handler": `"runc"`, "runtime.handlers.kata-qemu.path": `"containerd-shim-kata-qemu-v2"`},
		},
		"containerd_6389_default_runtime_beside_an_import": {
			map[string]string{
				"config.toml":            imports + v2 + ".containerd]\ndefault_runtime_name = 'nvidia'\n" + v2 + ".containerd.runtimes.nvidia]\nruntime_type = 'io.containerd.runc.v2'\n" + v2 + ".containerd.runtimes.nvidia.options]\nBinaryName = '/usr/bin/nvidia-container-runtime'\n",
				"conf.d/registries.toml": "version = 2\n" + v2 + ".registry]\nconfig_path = '/etc/containerd/certs.d'\n",
			},
			map[string]string{"runtime.default_handler": `"nvidia"`, "runtime.handlers.nvidia.path": `"/usr/bin/nvidia-container-runtime"`, "image.hosts_dirs": `["/etc/containerd/certs.d"]`},
		},
		"containerd_12636_two_directories_of_hosts": {
			map[string]string{"config.toml": "version = 3\n[plugins.'io.containerd.cri.v1.images'.registry]\nconfig_path = '/etc/containerd/certs.d:/etc/docker/certs.d'\n"},
			map[string]string{"image.hosts_dirs": `["/etc/containerd/certs.d", "/etc/docker/certs.d"]`},
		},
		"containerd_11041_both_ways_of_mirrors": {
			map[string]string{"config.toml": "version = 3\n[plugins.'io.containerd.cri.v1.images'.registry]\nconfig_path = '/etc/containerd/certs.d'\n[plugins.'io.containerd.cri.v1.images'.registry.mirrors.'docker.io']\nendpoint = ['https://m']\n"},
			map[string]string{"image.hosts_dirs": `["/etc/containerd/certs.d"]`},
		},
	} {
		t.Run(report, func(t *testing.T) {
			imp, err := Containerd(filepath.Join(etc(t, c.files), "config.toml"))
			if err != nil {
				t.Fatal(err)
			}
			wantSettings(t, imp, c.want)
		})
	}
}
