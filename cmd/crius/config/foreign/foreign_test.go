package foreign

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
)

// etc writes files below a new directory.
func etc(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func crioOf(t *testing.T, files map[string]string) *Import {
	t.Helper()
	imp, err := CRIO(etc(t, files))
	if err != nil {
		t.Fatal(err)
	}
	return imp
}

func containerdOf(t *testing.T, text string) *Import {
	t.Helper()
	imp, err := Containerd(filepath.Join(etc(t, map[string]string{"c.toml": text}), "c.toml"))
	if err != nil {
		t.Fatal(err)
	}
	return imp
}

// setting returns the imported value of a key, as TOML, "" if there is none.
func setting(imp *Import, key string) string {
	for _, s := range imp.Settings {
		if s.Key == key {
			return Format(s.Value)
		}
	}
	return ""
}

func wantSettings(t *testing.T, imp *Import, want map[string]string) {
	t.Helper()
	for key, value := range want {
		if got := setting(imp, key); got != value {
			t.Errorf("%s is %s, want %s", key, got, value)
		}
	}
}

func remarked(imp *Import, key string) bool {
	return slices.ContainsFunc(imp.Remarks, func(r Remark) bool { return r.Key == key })
}

// CRI-O reads every file in and below crio.conf.d in lexical order, and a table of a
// runtime replaces an earlier one.
func TestCrioMergesAsCrioDoes(t *testing.T) {
	imp := crioOf(t, map[string]string{
		"crio.conf": "[crio]\nstorage_option = ['a', 'b']\n[crio.runtime]\nread_only = true\npids_limit = 5\ndefault_env = ['A=1']\n" +
			"[crio.runtime.runtimes.x]\nruntime_path = '/old'\nprivileged_without_host_devices = true\n",
		"crio.conf.d/20-later":      "[crio]\nstorage_option = ['b', 'c']\n[crio.runtime]\npids_limit = 7\n[crio.runtime.runtimes.x]\nruntime_path = '/new'\n",
		"crio.conf.d/10/sooner.bak": "[crio.runtime]\npids_limit = 6\ndefault_env = ['B=1']\n",
	})
	wantSettings(t, imp, map[string]string{
		"image.options":           `["a", "b", "c"]`,
		"pod.read_only":           "true",
		"pod.pids_limit":          "7",
		"pod.default_env":         `["B=1"]`,
		"runtime.handlers.x.path": `"/new"`,
		"runtime.handlers.x.privileged_without_host_devices": "",
	})
	for i, name := range []string{"crio.conf", "sooner.bak", "20-later"} {
		if filepath.Base(imp.Files[i]) != name {
			t.Errorf("files are read as %v", imp.Files)
		}
	}
}

// OpenShift writes this file for workload partitioning.
func TestCrioWorkloads(t *testing.T) {
	imp := crioOf(t, map[string]string{"crio.conf.d/01-workload-partitioning": "[crio.runtime.workloads.management]\n" +
		"activation_annotation = 'target.workload.openshift.io/management'\nannotation_prefix = 'resources.workload.openshift.io'\n" +
		"allowed_annotations = ['io.kubernetes.cri-o.Devices']\n" +
		"resources = { \"cpushares\" = 0, \"cpuset\" = \"0-1,52-53\", \"cpulimit\" = 500 }\n"})
	wantSettings(t, imp, map[string]string{
		"runtime.workloads.management.activation_annotation": `"target.workload.openshift.io/management"`,
		"runtime.workloads.management.annotation_prefix":     `"resources.workload.openshift.io"`,
		"runtime.workloads.management.allowed_annotations":   `["io.kubernetes.cri-o.Devices", "io.kubernetes.cri-o.Devices*", "io.kubernetes.cri-o.Devices*/*"]`,
		"runtime.workloads.management.resources.cpushares":   "",
		"runtime.workloads.management.resources.cpuset":      `"0-1,52-53"`,
		"runtime.workloads.management.resources.cpulimit":    "500",
	})
	if len(imp.Remarks) > 0 {
		t.Errorf("remarks: %+v", imp.Remarks)
	}
}

// OpenShift's Node Tuning Operator writes this file for a PerformanceProfile.
func TestCrioPerformanceProfile(t *testing.T) {
	imp := crioOf(t, map[string]string{
		"crio.conf": "[crio.runtime]\ndefault_runtime = 'crun'\n[crio.runtime.runtimes.crun]\nruntime_path = '/usr/bin/crun'\n",
		"crio.conf.d/99-runtimes.conf": "[crio.runtime]\ninfra_ctr_cpuset = '0-1'\nshared_cpuset = '2-3'\n" +
			"[crio.runtime.runtimes.high-performance]\ninherit_default_runtime = true\nexec_cpu_affinity = 'first'\n" +
			"allowed_annotations = ['cpu-quota.crio.io', 'cpu-shared.crio.io']\n",
	})
	wantSettings(t, imp, map[string]string{
		"pod.infra_cpuset":                                    `"0-1"`,
		"tuning.shared_cpuset":                                `"2-3"`,
		"runtime.handlers.high-performance.path":              `"/usr/bin/crun"`,
		"runtime.handlers.high-performance.exec_cpu_affinity": `"first"`,
		"runtime.handlers.high-performance.allowed_annotations": `["cpu-quota.crio.io", "cpu-quota.crio.io*", "cpu-quota.crio.io*/*", ` +
			`"cpu-shared.crio.io", "cpu-shared.crio.io*", "cpu-shared.crio.io*/*"]`,
	})
	if len(imp.Remarks) > 0 {
		t.Errorf("remarks: %+v", imp.Remarks)
	}
}

func TestCrioValues(t *testing.T) {
	for _, c := range []struct {
		text string
		want map[string]string
	}{
		{"[crio.runtime]\ndefault_mounts_file = '/etc/mounts'", map[string]string{"pod.mounts_files": `["/etc/mounts"]`}},
		{"[crio.runtime]\ndefault_mounts_file = ''", map[string]string{"pod.mounts_files": `["/etc/containers/mounts.conf", "/usr/share/containers/mounts.conf"]`}},
		{"[crio.api]\nlisten = '/run/crio/crio.sock'", map[string]string{"api.crio_socket": `"/var/run/crio/crio.sock"`, "api.listen": ""}},
		{"[crio.api]\nlisten = '/run/other.sock'", map[string]string{"api.crio_socket": "", "api.listen": `"/run/other.sock"`}},
		{"[crio.api]\nstream_port = '10010'", map[string]string{"api.stream_address": `"127.0.0.1:10010"`}},
		{"[crio.api]\nstream_address = '::'", map[string]string{"api.stream_address": `"[::]:0"`}},
		{"[crio.api]\nstream_tls_cert = '/c'\nstream_tls_key = '/k'", map[string]string{"api.stream_tls_cert_file": "", "api.stream_tls_key_file": ""}},
		{"[crio.api]\nstream_enable_tls = true\nstream_tls_cert = '/c'\nstream_tls_key = '/k'\nstream_tls_ca = '/a'",
			map[string]string{"api.stream_tls_cert_file": `"/c"`, "api.stream_tls_key_file": `"/k"`, "api.stream_tls_client_ca_file": `"/a"`}},
		{"[crio.api]\nstream_idle_timeout = '30m'", map[string]string{"api.stream_idle_timeout": `"30m"`}},
		{"[crio.api]\ngrpc_max_send_msg_size = 7\ngrpc_max_recv_msg_size = 9", map[string]string{"api.max_message_size": "9"}},
		{"[crio.api]\ngrpc_max_send_msg_size = 0\ngrpc_max_recv_msg_size = 9", map[string]string{"api.max_message_size": "83886080"}},
		{"[crio.runtime]\ninfra_ctr_cpuset = '0-1,52-53'\n[crio.runtime.runtimes.fast]\nexec_cpu_affinity = 'first'",
			map[string]string{"pod.infra_cpuset": `"0-1,52-53"`, "runtime.handlers.fast.exec_cpu_affinity": `"first"`}},
		{"[crio.runtime]\nshared_cpuset = '2-3'\nirqbalance_config_file = '/etc/default/irqbalance'",
			map[string]string{"tuning.shared_cpuset": `"2-3"`, "tuning.irqbalance_config_files": `["/etc/default/irqbalance"]`}},
		{"[crio.runtime]\nirqbalance_config_file = '/etc/sysconfig/irqbalance'", map[string]string{"tuning.irqbalance_config_files": `["/etc/sysconfig/irqbalance", "/etc/default/irqbalance"]`}},
		{"[crio.runtime]\nirqbalance_config_file = ''", map[string]string{"tuning.irqbalance_config_files": `[]`}},
		{"[crio.runtime]\nblockio_config_file = '/b.yaml'\nblockio_reload = true\nrdt_config_file = '/r.yaml'",
			map[string]string{"runtime.blockio_config_file": `"/b.yaml"`, "runtime.rdt_config_file": `"/r.yaml"`}},
		{"[crio.runtime]\npids_limit = -1", map[string]string{"pod.pids_limit": "0"}},
		{"[crio.runtime]\nlog_level = 'trace'", map[string]string{"log_level": `"debug"`}},
		{"[crio.runtime]\nlog_level = 'panic'", map[string]string{"log_level": `"error"`}},
		{"[crio.runtime]\napparmor_profile = 'unconfined'", map[string]string{"pod.apparmor_profile": `""`}},
		{"[crio.runtime]\napparmor_profile = 'mine'", map[string]string{"pod.apparmor_profile": `"mine"`}},
		{"[crio.runtime]\nlog_to_journald = true", map[string]string{"runtime.container_log_journal": `"/run/systemd/journal/socket"`}},
		{"[crio.runtime]\nlog_to_journald = false", map[string]string{"runtime.container_log_journal": `""`}},
		{"[crio.runtime]\ndisable_hostport_mapping = true", map[string]string{"network.host_ports": `"cni"`}},
		{"[crio.runtime]\ncgroup_manager = 'cgroupfs'", map[string]string{"runtime.cgroup_driver": `"cgroupfs"`}},
		{"[crio.runtime]\ndefault_capabilities = ['CAP_kill', 'net_raw']", map[string]string{"pod.default_capabilities": `["KILL", "NET_RAW"]`}},
		{"[crio.runtime]\ndefault_capabilities = []", map[string]string{"pod.default_capabilities": `[]`}},
		{"[crio.runtime]\ndefault_sysctls = ['net.ipv4.ping_group_range = 0   2147483647']",
			map[string]string{"pod.default_sysctls": `["net.ipv4.ping_group_range=0   2147483647"]`}},
		{"[crio.runtime.runtimes.runc]", map[string]string{"runtime.default_handler": `"runc"`, "runtime.handlers.runc.type": `"oci"`}},
		{"[crio.runtime.runtimes.runc]\n[crio.runtime.runtimes.crun]", map[string]string{"runtime.default_handler": `"crun"`}},
		{"[crio.image]\npull_progress_timeout = '10s'", map[string]string{"image.progress_timeout": `"10s"`}},
		{"[crio.runtime]\nseparate_pull_cgroup = 'pod'", map[string]string{"image.pull_cgroup": `"pod"`}},
		{"[crio.image]\nseparate_pull_cgroup = '/node.slice/node-pulls.slice'", map[string]string{"image.pull_cgroup": `"node-pulls.slice"`}},
		{"[crio.image]\npull_progress_timeout = 10000000000", map[string]string{"image.progress_timeout": `"10s"`}},
		{"[crio.network]\nplugin_dirs = ['/a']\nplugin_dir = '/b'", map[string]string{"network.plugin_dirs": `["/a", "/b"]`}},
		{"[crio.metrics]\nmetrics_port = 1\nmetrics_cert = '/c'", map[string]string{"metrics.address": "", "metrics.tls_cert_file": ""}},
		{"[crio.metrics]\nenable_metrics = true", map[string]string{"metrics.address": `"127.0.0.1:9090"`}},
		{"[crio.metrics]\nenable_metrics = true\nmetrics_host = '::1'\nmetrics_port = 1\nmetrics_cert = '/c'",
			map[string]string{"metrics.address": `"[::1]:1"`, "metrics.tls_cert_file": `"/c"`}},
		{"[crio.tracing]\ntracing_endpoint = 'x:1'", map[string]string{"tracing.endpoint": ""}},
		{"[crio.tracing]\nenable_tracing = true\ntracing_endpoint = 'x:1'\ntracing_sampling_rate_per_million = 3",
			map[string]string{"tracing.endpoint": `"http://x:1"`, "tracing.sampling_rate_per_million": "3"}},
		{"[crio.nri]\nnri_disable_connections = true", map[string]string{"nri.connections": "false"}},
	} {
		wantSettings(t, crioOf(t, map[string]string{"crio.conf": c.text}), c.want)
	}
}

func TestCrioRuntimes(t *testing.T) {
	imp := crioOf(t, map[string]string{"crio.conf": `
[crio.runtime]
default_runtime = "main"
[crio.runtime.runtimes.main]
runtime_path = "/main"
runtime_type = "vm"
runtime_config_path = "/main.toml"
[crio.runtime.runtimes.heir]
runtime_path = "/own"
inherit_default_runtime = true
container_min_memory = "1.5 GB"
container_create_timeout = 90
seccomp_profile = "/s.json"
[crio.runtime.runtimes.heir.default_annotations]
b = "2"
a = "1"
[crio.runtime.runtimes.pod]
runtime_type = "pod"
runtime_config_path = "/ignored"
`})
	wantSettings(t, imp, map[string]string{
		"runtime.handlers.heir.path":                `"/main"`,
		"runtime.handlers.heir.type":                `"shim"`,
		"runtime.handlers.heir.options":             `["--ConfigPath=/main.toml"]`,
		"runtime.handlers.heir.min_memory":          "1610612736",
		"runtime.handlers.heir.create_timeout":      `"1m30s"`,
		"runtime.handlers.heir.seccomp_profile":     `"/s.json"`,
		"runtime.handlers.heir.default_annotations": `["a=1", "b=2"]`,
		"runtime.handlers.pod.type":                 `"oci"`,
		"runtime.handlers.pod.options":              "",
	})
	for _, key := range []string{"crio.runtime.runtimes.pod.runtime_type", "crio.runtime.runtimes.pod.runtime_config_path"} {
		if !remarked(imp, key) {
			t.Errorf("nothing is said of %s", key)
		}
	}
}

// A key without a counterpart is reported with its place, unless it is switched off.
// What restricts a node is not lost without somebody's knowledge. The values that forbid nothing are
// no reason to ask.
func TestKeysThatRestrictAreLostOnlyIfAccepted(t *testing.T) {
	lost := func(text string) (keys []string) {
		for _, r := range crioOf(t, map[string]string{"crio.conf": text}).Lost([]string{"crio.runtime.gid_mappings"}) {
			keys = append(keys, r.Key)
		}
		return keys
	}
	for text, want := range map[string][]string{
		"[crio.runtime]\nprivileged_seccomp_profile = '/p.json'\nuid_mappings = '0:1:2'\ngid_mappings = '0:1:2'": {"crio.runtime.privileged_seccomp_profile", "crio.runtime.uid_mappings"},
		"[crio.runtime]\nprivileged_seccomp_profile = ''\nuid_mappings = ''\nno_pivot = true":                    nil,
		"[crio.image]\noci_artifact_mount_support = false":                                                       {"crio.image.oci_artifact_mount_support"},
		"[crio.nri.default_validator]\nnri_validator_reject_everything = true":                                   {"crio.nri.default_validator.nri_validator_reject_everything"},
		"[crio.nri.new]\nallow_mutations = true":                                                                 {"crio.nri.new.allow_mutations"},
		"[crio.nri]\nunknown = true":                                                                             nil,
	} {
		if got := lost(text); !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", text, got, want)
		}
	}
	imp := containerdOf(t, "version = 3\n[plugins.'io.containerd.image-verifier.v1.sigstore']\npolicy = '/p'\n[plugins.'io.containerd.cri.v1.runtime']\nunset_seccomp_profile = '/p'")
	if got := imp.Lost(nil); len(got) != 2 {
		t.Errorf("containerd: %+v", got)
	}
}

// The names are those that CRI-O reads; the ones of NRI itself are not.
func TestCrioValidator(t *testing.T) {
	imp := crioOf(t, map[string]string{"crio.conf": "[crio.nri.default_validator]\nnri_enable_default_validator = true\n" +
		"nri_validator_reject_oci_hook_adjustment = true\nnri_validator_required_plugins = ['audit']"})
	wantSettings(t, imp, map[string]string{
		"nri.validator.enable": "true", "nri.validator.reject_oci_hook_adjustment": "true", "nri.validator.required_plugins": `["audit"]`,
	})
	wantSettings(t, crioOf(t, nil), map[string]string{"image.short_name_mode": `"enforcing"`})
	wantSettings(t, crioOf(t, map[string]string{"crio.conf": "[crio.image]\nshort_name_mode = 'disabled'"}), map[string]string{"image.short_name_mode": `"disabled"`})
}

// What CRI-O does for an annotation that a runtime or a workload allows, and crius does not, is said.
func TestCrioAnnotationsWithoutEffectAreNamed(t *testing.T) {
	imp := crioOf(t, map[string]string{"crio.conf": "[crio.runtime.runtimes.r]\nallowed_annotations = ['io.kubernetes.cri-o.userns-mode', 'io.kubernetes.cri-o.Devices']\n" +
		"[crio.runtime.workloads.w]\nactivation_annotation = 'w'\nallowed_annotations = ['seccomp-notifier']"})
	var got []string
	for _, r := range imp.Remarks {
		got = append(got, r.Key+" "+r.Value)
	}
	want := []string{`crio.runtime.runtimes.r.allowed_annotations "io.kubernetes.cri-o.userns-mode"`, `crio.runtime.workloads.w.allowed_annotations "seccomp-notifier-action.crio.io"`}
	if !slices.Equal(got, want) {
		t.Errorf("remarks on %q, want %q", got, want)
	}
}

func TestCrioRemarks(t *testing.T) {
	imp := crioOf(t, map[string]string{"crio.conf": "[crio.runtime]\nno_pivot = true\nadd_inheritable_capabilities = false\nconmon = '/c'\ninvented = 'x'\n" +
		"[crio.runtime.workloads.w]\nactivation_annotation = 'a'\n[crio.runtime.workloads.w.resources]\nmemory = 5\n"})
	for key, place := range map[string]string{
		"crio.runtime.no_pivot": "crio.conf:2", "crio.runtime.invented": "crio.conf:5",
		"crio.runtime.workloads.w.resources.memory": "crio.conf:9",
	} {
		if !slices.ContainsFunc(imp.Remarks, func(r Remark) bool { return r.Key == key && strings.HasSuffix(r.Place, place) && r.Text != "" }) {
			t.Errorf("%s at %s is not in %+v", key, place, imp.Remarks)
		}
	}
	if len(imp.Remarks) != 3 || !slices.Equal(imp.Unused, []string{"crio.runtime.add_inheritable_capabilities"}) || !slices.Equal(imp.Builtin, []string{"crio.runtime.conmon"}) {
		t.Errorf("remarks %+v, unused %v, builtin %v", imp.Remarks, imp.Unused, imp.Builtin)
	}
}

func TestBrokenCrioConfigurations(t *testing.T) {
	for text, want := range map[string]string{
		"[crio.runtime]\npids_limit = 'x'":                            "crio.conf:2: crio.runtime.pids_limit: must be of type integer",
		"[crio.runtime]\npids_limit = ":                               "crio.conf:2: ",
		"[crio.runtime]\n\ndefault_env = 'x'":                         "crio.conf:3: crio.runtime.default_env: must be a list of strings",
		"[crio.runtime]\ndefault_env = [1]":                           "crio.conf:2: crio.runtime.default_env: list items must be strings",
		"[crio.runtime]\nlog_level = 'loud'":                          `crio.conf:2: crio.runtime.log_level: must be a log level, got "loud"`,
		"[crio.runtime]\ndefault_runtime = 1":                         "crio.conf:2: crio.runtime.default_runtime: must be of type string",
		"[crio.runtime.runtimes.x]\nruntime_type = 'y'":               `crio.conf:2: crio.runtime.runtimes.x.runtime_type: must be "oci", "vm" or "pod", got "y"`,
		"[crio.runtime.runtimes.x]\ncontainer_min_memory = '1 duck'":  `crio.conf:2: crio.runtime.runtimes.x.container_min_memory: must be a number of bytes such as "12MiB"`,
		"[crio.runtime.runtimes.x]\ninherit_default_runtime = 'si'":   "crio.conf:2: crio.runtime.runtimes.x.inherit_default_runtime: must be true or false",
		"[crio.image]\npull_progress_timeout = 'soon'":                "crio.conf:2: crio.image.pull_progress_timeout: must be a duration",
		"[crio.metrics]\nenable_metrics = true\nmetrics_port = '909'": "crio.conf:3: crio.metrics.metrics_port: must be of type integer",
		"[crio.nri]\nnri_disable_connections = 0":                     "crio.conf:2: crio.nri.nri_disable_connections: must be true or false",
	} {
		dir := etc(t, map[string]string{"crio.conf": text})
		_, err := CRIO(dir)
		if !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), filepath.Join(dir, want)) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

func TestUnreadableConfigurations(t *testing.T) {
	dir := etc(t, map[string]string{"crio.conf.d/big": strings.Repeat("#", maxFile+1), "loop.toml": "version = 2\nimports = ['loop.toml', 'gone.toml']", "dir/x": ""})
	if err := unix.Mkfifo(filepath.Join(dir, "fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{"gone": "gone: it should be a file, as containerd config dump prints it", "loop.toml": "gone.toml: no such file", "dir": "not a regular file", "fifo": "not a regular file"} {
		if _, err := Containerd(filepath.Join(dir, path)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("containerd, %s: %v, want %q", path, err, want)
		}
	}
	if _, err := CRIO(filepath.Join(dir, "gone")); err == nil || !strings.Contains(err.Error(), "gone: it should be a directory with crio.conf") {
		t.Errorf("CRI-O, no directory: %v", err)
	}
	if _, err := CRIO(dir); err == nil || !strings.Contains(err.Error(), "larger than") {
		t.Errorf("CRI-O, large file: %v", err)
	}
	many := map[string]string{}
	for i := range maxFiles + 1 {
		many["crio.conf.d/"+strings.Repeat("x", i+1)[:min(i+1, 200)]+string(rune('a'+i%26))+string(rune('a'+i/26))] = ""
	}
	if _, err := CRIO(etc(t, many)); !errors.Is(err, fault.Invalid) {
		t.Errorf("CRI-O, many files: %v", err)
	}
}

func TestBytes(t *testing.T) {
	for text, want := range map[string]int64{"5": 5, "12MiB": 12 << 20, "500k": 500 << 10, "500KiB": 500 << 10, "1 GB": 1 << 30, "1.5k": 1536, "2t": 2 << 40} {
		if got, err := bytes(text); err != nil || got != want {
			t.Errorf("%q is %d (%v), want %d", text, got, err, want)
		}
	}
	for _, text := range []string{"", "k", "-1", "5 ducks", "1kk", "9999999999p", "1..2"} {
		if got, err := bytes(text); err == nil {
			t.Errorf("%q is %d", text, got)
		}
	}
}

func TestInsecureRegistriesComeWithTheirLines(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("mine.conf", "[crio.image]\ninsecure_registries = ['lab.example:5000', 'old.example']\n[crio.runtime.runtimes.mine]\nruntime_path = '/mine'\n[crio.runtime]\napparmor_profile = 'crio-default'\n")
	imp, err := CRIO(filepath.Join(dir, "mine.conf")) // a file as well as a directory
	if err != nil {
		t.Fatal(err)
	}
	if len(imp.Remarks) != 1 || imp.Remarks[0].Place != filepath.Join(dir, "mine.conf")+":2" ||
		!strings.Contains(imp.Remarks[0].Text, "[[registry]]\nlocation = \"lab.example:5000\"\ninsecure = true\n[[registry]]\nlocation = \"old.example\"") {
		t.Errorf("%+v", imp.Remarks)
	}
	for _, s := range imp.Settings {
		if want := "default of CRI-O"; s.Key == "runtime.handlers.mine.type" && s.From != want {
			t.Errorf("the type of a runtime without one comes from %s, want %s", s.From, want)
		}
	}
	if !slices.ContainsFunc(imp.Builtin, func(key string) bool { return strings.HasPrefix(key, "crio.runtime.apparmor_profile: ") }) {
		t.Errorf("no verdict on the profile: %q", imp.Builtin)
	}
}

// A node on which CRI-O makes no checkpoints makes none with crius; which of its keys says so depends on the version.
func TestCrioCheckpoints(t *testing.T) {
	t.Parallel()
	const level, later = "[crio.checkpoint_restore]\ncontainer_level_enabled = ", "[crio.checkpoint]\ncontainer_level = "
	for text, want := range map[string]struct{ criu, remark string }{
		"": {},
		"[crio.runtime]\nenable_criu_support = true\n":  {criu: `"criu"`},
		"[crio.runtime]\nenable_criu_support = false\n": {criu: `""`},
		level + "'none'\n":               {criu: `""`},
		level + "'checkpoint_only'\n":    {criu: `"criu"`},
		level + "'checkpoint_restore'\n": {criu: `"criu"`, remark: "crio.checkpoint_restore.container_level_enabled"},
		later + "'none'\n":               {criu: `""`},
		later + "'checkpoint_restore'\n": {criu: `"criu"`, remark: "crio.checkpoint.container_level"},
		"[crio.runtime]\nenable_criu_support = false\n" + level + "'checkpoint_only'\n": {criu: `""`},
		"[crio.runtime]\nenable_criu_support = true\n" + level + "'none'\n":             {criu: `""`},
	} {
		imp := crioOf(t, map[string]string{"crio.conf": text})
		wantSettings(t, imp, map[string]string{"runtime.criu": want.criu})
		if want.remark == "" && len(imp.Remarks) > 0 || want.remark != "" && !remarked(imp, want.remark) {
			t.Errorf("%q: remarks %+v", text, imp.Remarks)
		}
	}
}
