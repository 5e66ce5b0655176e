package config

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// An imagestore from storage.conf must be outside of crius's directories, like one from
// crius.toml.
func TestImagestoreOfStorageConf(t *testing.T) {
	conf := filepath.Join(t.TempDir(), "storage.conf")
	if err := os.WriteFile(conf, []byte("[storage]\ndriver = 'overlay'\nimagestore = '/var/lib/crius/containers/images'\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("CONTAINERS_STORAGE_CONF", conf)
	n := newNode(t)
	n.write(n.file, "")
	if _, err := n.load(); err == nil || !strings.Contains(err.Error(), "image.imagestore: must be outside /var/lib/crius/containers") {
		t.Errorf("of storage.conf: %v", err)
	}
	n.write(n.file, "image.root = '/srv/images'") // overrides storage.conf
	if _, err := n.load(); err != nil {
		t.Error(err)
	}
}

func TestValidate(t *testing.T) {
	socket := func(length int) string { return "/" + strings.Repeat("s", length-1) }
	for _, c := range []struct{ text, want string }{
		{"", ""},
		{"root = ''", `root: must be an absolute path, got ""`},
		{"run_root = '/var/lib/crius/'", "run_root: must differ from root"},
		{"image.root = '/var/lib/crius/containers/storage'", "image.root: must be outside /var/lib/crius/containers, which crius manages below root"},
		{"image.root = '/var/lib/crius//containers/'", "image.root: must be outside /var/lib/crius/containers"},
		{"root = '/srv/crius/'\nimage.root = '/srv/crius/pods/x'", "image.root: must be outside /srv/crius/pods, which crius manages below root"},
		{"image.run_root = '/run/crius/containers'", "image.run_root: must be outside /run/crius/containers, which crius manages below run_root"},
		{"image.imagestore = '/var/lib/crius/pods/images'", "image.imagestore: must be outside /var/lib/crius/pods, which crius manages below root"},
		{"runtime.container_log_journal = 'journald'", "runtime.container_log_journal: must be an absolute path or an empty string"},
		{"runtime.container_log_journal = '" + socket(107) + "'", ""},
		{"runtime.container_log_journal = '" + socket(108) + "'", "runtime.container_log_journal: path is 108 bytes long"},
		{"image.temporary_dir = '/run/crius/runtime/../pods/tmp'", "image.temporary_dir: must be outside /run/crius/pods"},
		{"pod.namespaces_dir = '/run/crius/runtime'", "pod.namespaces_dir: must be outside /run/crius/runtime"},
		{"image.root = '/var/lib/crius/images'\nimage.imagestore = '/var/lib/crius/imagestore'\nimage.run_root = '/run/crius/containers-storage'\nimage.temporary_dir = '/var/lib/crius/tmp/pods'\npod.namespaces_dir = '/run/crius'", ""},
		{"log_level = 'trace'", `log_level: must be one of debug, info, warn, error, got "trace"`},
		{"log_format = 'xml'", "log_format: must be one of text, json"},
		{"api.listen = '" + socket(107) + "'", ""},
		{"api.listen = '" + socket(108) + "'", "api.listen: path is 108 bytes long"},
		{"api.listen = 'unix:///run/crius.sock'", "api.listen: must be an absolute path"},
		{"api.listen = \"/run/\\u0000\"", "api.listen: must not contain NUL bytes"},
		{"api.crio_socket = '" + socket(107) + "'", ""},
		{"api.crio_socket = '" + socket(108) + "'", "api.crio_socket: path is 108 bytes long"},
		{"nri.socket = '/" + strings.Repeat("d", 98) + "/s'", "nri.socket: path of the directory is 99 bytes long, but can have at most 98"},
		{"api.crio_socket = 'crio.sock'", "api.crio_socket: must be an absolute path or an empty string"},
		{"api.crio_socket = '/run/crius//crius.sock'", "api.crio_socket: must differ from api.listen"},
		{"metrics.included_pod_metrics = ['all']", ""},
		{"metrics.included_pod_metrics = []", ""},
		{"metrics.included_pod_metrics = ['cpu', 'cpus']", "metrics.included_pod_metrics: must be one of cpu, memory, disk"},
		{"api.max_message_size = 0", "api.max_message_size: must be more than 0, got 0"},
		{"pod.namespaces_dir = 'run'", "pod.namespaces_dir: must be an absolute path"},
		{"pod.pids_limit = -1", "pod.pids_limit: must be 0 or more, got -1"},
		{"pod.shm_size = 0", "pod.shm_size: must be more than 0, got 0"},
		{"pod.seccomp_profile = 'x.json'", "pod.seccomp_profile: must be an absolute path"},
		{"pod.default_capabilities = ['NET_RAW', 'FLY']", `pod.default_capabilities: unknown capability "FLY"`},
		{"pod.default_sysctls = ['net.core.somaxconn']", "pod.default_sysctls: "},
		{"pod.default_ulimits = ['nofile=many']", "pod.default_ulimits: "},
		{"pod.allowed_ulimits = ['files=1']", "pod.allowed_ulimits: "},
		{"pod.additional_devices = ['fuse']", "pod.additional_devices: "},
		{"pod.default_env = ['A=1', '']", "pod.default_env: an item of the list is empty"},
		{"pod.infra_cpuset = '0-1,52-53'", ""},
		{"pod.infra_cpuset = 'all'", `pod.infra_cpuset: "all" is not a list of CPUs such as 0-3,7`},
		{"tuning.shared_cpuset = '3-1'", `tuning.shared_cpuset: "3-1" is not a list of CPUs`},
		{"tuning.irqbalance_config_files = []", ""},
		{"tuning.irqbalance_config_files = ['irqbalance']", "tuning.irqbalance_config_files: must be an absolute path"},
		{"pod.mounts_files = ['mounts.conf']", "pod.mounts_files: must be an absolute path"},
		{"image.pull_timeout = '-1s'", "image.pull_timeout: must be 0 or more, got \"-1s\""},
		{"image.parallel_layers = 0", "image.parallel_layers: must be more than 0, got 0"},
		{"image.pull_connections = 32", ""},
		{"image.unpack_parallel = 16", ""},
		{"image.unpack_parallel = 17", "image.unpack_parallel: must be at most 16, got 17"},
		{"image.pull_connections = 33", "image.pull_connections: must be at most 32, got 33"},
		{"image.pull_connections = -1", "image.pull_connections: must be 0 or more, got -1"},
		{"image.pull_timeout = '0'", ""},
		{"image.root = 'x'", "image.root: must be an absolute path"},
		{"image.run_root = 'x'", "image.run_root: must be an absolute path"},
		{"image.registries_conf = 'x'", "image.registries_conf: must be an absolute path"},
		{"image.signature_policy = 'x'", "image.signature_policy: must be an absolute path"},
		{"image.auth_file = 'x'", "image.auth_file: must be an absolute path"},
		{"image.temporary_dir = 'x'", "image.temporary_dir: must be an absolute path"},
		{"network.conf_dir = 'x'", "network.conf_dir: must be an absolute path"},
		{"network.plugin_dirs = ['/x', 'y']", `network.plugin_dirs: must be an absolute path, got "y"`},
		{"network.plugin_dirs = []", "network.plugin_dirs: must list at least one directory"},
		{"network.timeout = '0s'", `network.timeout: must be more than 0, got "0s"`},
		{"runtime.monitor = 'crius-conmon'", "runtime.monitor: must be an absolute path"},
		{"runtime.blockio_config_file = 'blockio.yaml'", "runtime.blockio_config_file: must be an absolute path or an empty string"},
		{"runtime.rdt_config_file = 'rdt.yaml'", "runtime.rdt_config_file: must be an absolute path or an empty string"},
		{"runtime.container_log_rate = -1", "runtime.container_log_rate: must be 0 or more, got -1"},
		{"runtime.container_log_rate = 1", ""},
		{"runtime.container_log_rate = 1099511627776", "runtime.container_log_rate: must be at most 1099511627775, got 1099511627776"},
		{"runtime.container_log_rate = 1\nruntime.container_log_burst = 65535", "runtime.container_log_burst: must be from 65536, so that a long line fits, to 1099511627775, got 65535"},
		{"runtime.container_log_rate = 1\nruntime.container_log_burst = 1099511627776", "runtime.container_log_burst: must be from 65536"},
		{"runtime.container_log_burst = 0", ""},
		{"image.writable_layer_size = 1048576", ""},
		{"image.writable_layer_size = 1048575", "image.writable_layer_size: must be 0, for no limit, or at least 1048576, so that containers can start, got 1048575"},
		{"image.writable_layer_inodes = 99", "image.writable_layer_inodes: must be 0, for no limit, or at least 100, so that containers can start, got 99"},
		{"runtime.container_log_max_size = 65536", ""},
		{"runtime.container_log_max_size = 65535", "runtime.container_log_max_size: must be 0, for no limit, or from 65536, so that a long line fits, to 1099511627775, got 65535"},
		{"runtime.cgroup_driver = 'systemd'\nimage.pull_cgroup = 'node-pulls.slice'", ""},
		{"runtime.cgroup_driver = 'cgroupfs'\nimage.pull_cgroup = '/pulls'", ""},
		{"image.pull_cgroup = 'pod'", ""},
		{"runtime.cgroup_driver = 'systemd'\nimage.pull_cgroup = '/pulls'", `image.pull_cgroup: must be a slice such as pulls.slice, pod or an empty string, since runtime.cgroup_driver is systemd, got "/pulls"`},
		{"runtime.cgroup_driver = 'cgroupfs'\nimage.pull_cgroup = 'pulls.slice'", "image.pull_cgroup: must be an absolute path below the cgroup mount such as /pulls, pod or an empty string, since runtime.cgroup_driver is cgroupfs"},
		{"runtime.cgroup_driver = ''", "runtime.cgroup_driver: must be one of systemd, cgroupfs"},
		{"runtime.default_handler = 'crun'", ""},
		{"runtime.default_handler = 'x'", `runtime.default_handler: unknown handler "x"`},
		{"[runtime.handlers.x]", ""},
		{"[runtime.handlers.x]\npath = '/opt/x'", ""},
		{"[runtime.handlers.x]\npath = 'opt/x'", "runtime.handlers.x.path: must be an absolute path or a bare name"},
		{"[runtime.handlers.x]\npath = ''", "runtime.handlers.x.path: must be an absolute path or a bare name"},
		{"[runtime.handlers.x]\nroot = 'x'", "runtime.handlers.x.root: must be an absolute path"},
		{"[runtime.handlers.x]\ncreate_timeout = '0s'", `runtime.handlers.x.create_timeout: must be more than 0, got "0s"`},
		{"[runtime.handlers.x]\ntype = 'vm'", "runtime.handlers.x.type: must be one of oci, shim"},
		{"[runtime.handlers.x]\nseccomp_profile = 'x'", "runtime.handlers.x.seccomp_profile: must be an absolute path"},
		{"[runtime.handlers.x]\ncni_conf_dir = 'x'", "runtime.handlers.x.cni_conf_dir: must be an absolute path"},
		{"[runtime.handlers.x]\nfeatures = 'x'", "runtime.handlers.x.features: must be an absolute path"},
		{"[runtime.handlers.x]\nmonitor_cgroup = 'x'", "runtime.handlers.x.monitor_cgroup: must be an absolute path"},
		{"[runtime.handlers.x]\nexec_cpu_affinity = 'first'", ""},
		{"[runtime.handlers.x]\nexec_cpu_affinity = 'last'", `runtime.handlers.x.exec_cpu_affinity: must be first or an empty string, got "last"`},
		{"[runtime.handlers.x]\nmin_memory = -1", "runtime.handlers.x.min_memory: must be 0 or more"},
		{"[runtime.handlers.x]\ndefault_annotations = ['a=b=c', 'd=']\noptions = ['--platform=kvm', '-debug']", ""},
		{"[runtime]\nbackported_cves = ['CVE-2024-21626', 'CVE-2025-31133']", ""},
		{"[runtime]\nbackported_cves = ['2024-21626']", `runtime.backported_cves: must be a CVE, such as CVE-2024-21626, got "2024-21626"`},
		{"[runtime.handlers.x]\ndefault_annotations = ['a']", `runtime.handlers.x.default_annotations: must be of the form KEY=VALUE, got "a"`},
		{"[runtime.handlers.x]\nallowed_annotations = ['a.b/c', 'io.katacontainers.*', '[a-c]?']\nallowed_container_annotations = ['x/*']", ""},
		{"[runtime.handlers.x]\nallowed_annotations = ['a[']", `runtime.handlers.x.allowed_annotations: must be an annotation key or a pattern of *, ? and [...], with every bracket closed, got "a["`},
		{"[runtime.handlers.x]\nallowed_container_annotations = ['a*[b']", "runtime.handlers.x.allowed_container_annotations: must be an annotation key or a pattern"},
		{"[runtime.handlers.x]\noptions = ['kvm']", "runtime.handlers.x.options: must be a flag"},
		{"[runtime.handlers.x]\noptions = ['--root=/x']", "that crius does not set itself"},
		{"[runtime.workloads.w]\nactivation_annotation = 'a'\nannotation_prefix = 'p'\nallowed_annotations = ['x*']\nresources = {cpushares = 2, cpuset = '0-1,3', cpuquota = 1000, cpuperiod = 1000, cpulimit = 1}", ""},
		{"[runtime.workloads.w]", ""},
		{"[runtime.workloads.w]\nannotation_prefix = 'p'", "runtime.workloads.w: activation_annotation is missing"},
		{"[runtime.workloads.w]\nactivation_annotation = 'a'\n[runtime.workloads.x]\nactivation_annotation = 'a'", `runtime.workloads.x.activation_annotation: is that of workload "w" as well`},
		{"[runtime.workloads.w]\nactivation_annotation = 'a'\nresources.cpuset = 'all'", `runtime.workloads.w.resources: cpuset "all" is not a list`},
		{"[runtime.workloads.w]\nactivation_annotation = 'a'\nresources.cpushares = 1", "runtime.workloads.w.resources: cpushares 1 is not between 2 and 262144"},
		{"[runtime.workloads.w]\nactivation_annotation = 'a'\nresources.cpuperiod = 1", "runtime.workloads.w.resources: cpu_period 1 is not between"},
		{"[runtime.workloads.w]\nactivation_annotation = 'a'\nresources.cpulimit = -1", "runtime.workloads.w.resources.cpulimit: must be 0 or more"},
		{"[runtime.workloads.w]\nactivation_annotation = 'a'\nallowed_annotations = ['[']", "runtime.workloads.w.allowed_annotations: must be an annotation key or a pattern"},
		{"[runtime.workloads.w]\nactivation_annotation = 'a'\nresources.memory = 1", "runtime.workloads.w.resources.memory: unknown key"},
		{"[runtime.handlers.Big]", "runtime.handlers.Big: not a valid RuntimeClass handler"},
		{"[runtime.handlers.'a b']", `runtime.handlers."a b": not a valid RuntimeClass handler`},
		{"[runtime.handlers.'']", `runtime.handlers."": not a valid RuntimeClass handler`},
		{"[runtime.handlers." + strings.Repeat("x", 64) + "]", "not a valid RuntimeClass handler"},
	} {
		n := newNode(t)
		n.write(n.file, c.text)
		_, err := n.load()
		switch {
		case c.want == "" && err != nil:
			t.Errorf("%q: %v", c.text, err)
		case c.want != "" && err == nil:
			t.Errorf("%q is accepted, want %q", c.text, c.want)
		case c.want != "" && !strings.Contains(err.Error(), c.want):
			t.Errorf("%q: %q, want %q", c.text, err, c.want)
		}
	}
}
