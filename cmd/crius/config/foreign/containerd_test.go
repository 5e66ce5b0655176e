package foreign

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crius-run/crius/internal/fault"
)

func TestContainerdValues(t *testing.T) {
	const cri = "[plugins.'io.containerd.grpc.v1.cri'"
	for _, c := range []struct {
		text string
		want map[string]string
	}{
		{cri + "]\nenable_unprivileged_ports = true", map[string]string{"pod.unprivileged_ports": "true", "pod.unprivileged_ping": "false"}},
		{cri + "]\nenable_unprivileged_icmp = true", map[string]string{"pod.unprivileged_ports": "false", "pod.unprivileged_ping": "true"}},
		{cri + "]\nsystemd_cgroup = true", map[string]string{"runtime.cgroup_driver": `"systemd"`}},
		{cri + "]\ndisable_apparmor = true", map[string]string{"pod.apparmor_profile": `""`}},
		{cri + "]\nignore_image_defined_volumes = true", map[string]string{"image.volumes": `"ignore"`}},
		{cri + "]\nstream_server_address = '::'\nstream_server_port = '10010'", map[string]string{"api.stream_address": `"[::]:10010"`}},
		{cri + "]\nstream_server_address = '::'\nstream_server_port = '10010'\nenable_tls_streaming = true", map[string]string{"api.stream_address": `"127.0.0.1:10010"`}},
		{cri + "]\nenable_tls_streaming = true\n" + cri + ".x509_key_pair_streaming]\ntls_cert_file = '/c'\ntls_key_file = '/k'",
			map[string]string{"api.stream_tls_cert_file": `"/c"`, "api.stream_tls_key_file": `"/k"`}},
		{cri + ".cni]\nbin_dir = '/b'\nip_pref = 'ipv6'", map[string]string{"network.plugin_dirs": `["/b"]`, "network.primary_ip": `"ipv6"`}},
		{cri + ".containerd]\ndefault_runtime_name = 'x'\n" + cri + ".containerd.runtimes.x]\nruntime_type = 'io.containerd.runc.v2'\n" + cri + ".containerd.runtimes.x.options]\nSystemdCgroup = true",
			map[string]string{"runtime.default_handler": `"x"`, "runtime.cgroup_driver": `"systemd"`, "runtime.handlers.x.path": `"runc"`}},
		{cri + ".containerd.runtimes.g]\nruntime_type = 'io.containerd.runsc.v1'", map[string]string{"runtime.handlers.g.type": `"oci"`, "runtime.handlers.g.path": `"runsc"`}},
		{cri + ".containerd.runtimes.s]\nruntime_type = '/opt/shim'\n" + cri + ".containerd.runtimes.s.options]\nTypeUrl = 'u'\nOn = true\nOff = false\nEmpty = ''",
			map[string]string{"runtime.handlers.s.type": `"shim"`, "runtime.handlers.s.path": `"/opt/shim"`, "runtime.handlers.s.options": `["--On=true", "--TypeUrl=u"]`}},
		{cri + ".containerd.runtimes.b]\nruntime_type = 'io.containerd.runc.v2'\nbase_runtime_spec = '/b'\ncgroup_writable = true\nprivileged_without_host_devices_all_devices_allowed = true",
			map[string]string{"runtime.handlers.b.base_runtime_spec": `"/b"`, "runtime.handlers.b.cgroup_writable": "true",
				"runtime.handlers.b.privileged_without_host_devices_all_devices_allowed": "true"}},
		{cri + ".registry]\nconfig_path = '/etc/containerd/certs.d:/etc/docker/certs.d'", map[string]string{"image.hosts_dirs": `["/etc/containerd/certs.d", "/etc/docker/certs.d"]`}},
		{"[grpc]\ngid = 100\nmax_recv_message_size = 5", map[string]string{"api.socket_group": `"100"`, "api.max_message_size": "5"}},
		{"[plugins.'io.containerd.server.v1.grpc']\naddress = '/run/c.sock'\nuid = 0\ngid = 100\nmax_recv_message_size = 5", map[string]string{"api.socket_group": `"100"`, "api.max_message_size": "5"}},
		{"[plugins.'io.containerd.server.v1.metrics']\naddress = '127.0.0.1:1338'", map[string]string{"metrics.address": `"127.0.0.1:1338"`}},
		{"[plugins.'io.containerd.tracing.processor.v1.otlp']\nendpoint = 'h:4317'\ninsecure = true\n[plugins.'io.containerd.internal.v1.tracing']\nsampling_ratio = 0.5",
			map[string]string{"tracing.endpoint": `"http://h:4317"`, "tracing.protocol": `"http/protobuf"`, "tracing.sampling_rate_per_million": "500000"}},
		{"[plugins.'io.containerd.tracing.processor.v1.otlp']\nendpoint = 'h:4317'\nprotocol = 'grpc'", map[string]string{"tracing.endpoint": `"https://h:4317"`, "tracing.protocol": `"grpc"`}},
		{"[plugins.'io.containerd.cri.v1.images'.pinned_images]\nsandbox = 'p'\nmine = 'm'", map[string]string{"image.pinned_images": `["m"]`}},
		{"[plugins.'io.containerd.transfer.v1.local']\nmax_concurrent_downloads = 9", map[string]string{"image.parallel_layers": "9"}},
		{cri + "]\nmax_concurrent_downloads = 3\n[plugins.'io.containerd.transfer.v1.local']\nmax_concurrent_downloads = 9", map[string]string{"image.parallel_layers": "9"}},
		{cri + "]\nmax_concurrent_downloads = 7\n[plugins.'io.containerd.transfer.v1.local']\nmax_concurrent_downloads = 3", map[string]string{"image.parallel_layers": "7"}},
		{cri + ".registry]\nconfig_path = '/a'\n[plugins.'io.containerd.transfer.v1.local']\nconfig_path = ''", map[string]string{"image.hosts_dirs": `["/a"]`}},
		{"[plugins.'io.containerd.transfer.v1.local']\nconfig_path = '/b'", map[string]string{"image.hosts_dirs": `["/b"]`}},
		{"[plugins.'io.containerd.service.v1.tasks-service']\nblockio_config_file = '/b.yaml'\nrdt_config_file = '/r.yaml'",
			map[string]string{"runtime.blockio_config_file": `"/b.yaml"`, "runtime.rdt_config_file": `"/r.yaml"`}},
		{"[plugins.'io.containerd.nri.v1.nri']\ndisable = true", map[string]string{"nri.enable": "false"}},
	} {
		wantSettings(t, containerdOf(t, "version = 2\n"+c.text), c.want)
	}
	wantSettings(t, containerdOf(t, "version = 3\n"), map[string]string{
		"pod.unprivileged_ports":     "true",
		"pod.unprivileged_ping":      "true",
		"runtime.cgroup_driver":      `"cgroupfs"`,
		"runtime.handlers.runc.type": "",
	})
}

// Images that containerd has verified before it pulled them are verified by crius.
func TestContainerdVerifiers(t *testing.T) {
	const plugin = "[plugins.'io.containerd.image-verifier.v1.bindir']"
	dir := t.TempDir()
	text := func(more string) string {
		return more + "version = 3\n" + plugin + fmt.Sprintf("\nbin_dir = %q\nper_verifier_timeout = '3s'\n", dir)
	}
	empty := containerdOf(t, text(""))
	wantSettings(t, empty, map[string]string{"image.verifiers_dir": ""})
	if len(empty.Unused) != 1 || !strings.Contains(empty.Unused[0], "bin_dir: there are no programs in it") {
		t.Errorf("a directory without programs: %q", empty.Unused)
	}
	if err := os.WriteFile(filepath.Join(dir, "cosign"), nil, 0o755); err != nil {
		t.Fatal(err)
	}
	wantSettings(t, containerdOf(t, text("")), map[string]string{
		"image.verifiers_dir": fmt.Sprintf("%q", dir), "image.verifiers_at_pull_only": "true", "image.verifier_timeout": `"3s"`, "nri.enable": "",
	})
	wantSettings(t, containerdOf(t, text("")+"max_verifiers = 0\n"), map[string]string{"image.verifiers_dir": ""})
	wantSettings(t, containerdOf(t, text("disabled_plugins = ['io.containerd.image-verifier.v1.bindir', 'io.containerd.nri.v1.nri']\n")),
		map[string]string{"image.verifiers_dir": "", "nri.enable": "false"})
}

// containerd prints two processors by default, with one directory of keys.
func TestContainerdDecryptsImages(t *testing.T) {
	t.Parallel()
	const keys = "args = ['--decryption-keys-path', '/k']\n"
	imp := containerdOf(t, "version = 3\n[stream_processors.'io.containerd.ocicrypt.decoder.v1.tar']\n"+keys+
		"[stream_processors.'io.containerd.ocicrypt.decoder.v1.tar.gzip']\n"+keys+"[stream_processors.mine]\n"+keys+
		"[stream_processors.'io.containerd.ocicrypt.decoder.v1.z']\nargs = ['--decryption-keys-path', '/other']\n")
	wantSettings(t, imp, map[string]string{"image.decryption_keys_path": `"/k"`})
	if len(imp.Remarks) != 2 || imp.Remarks[1].Key != "stream_processors.mine" {
		t.Errorf("remarks: %+v", imp.Remarks)
	}
}

// Since version 3, the CRI plugin's old table has only the keys of streams.
func TestContainerdIgnoresKeysOfVersion2_containerd_10132(t *testing.T) {
	t.Parallel()
	const cri = "[plugins.'io.containerd.grpc.v1.cri'"
	imp := containerdOf(t, "version = 3\n"+cri+"]\nenable_selinux = true\nstream_idle_timeout = '1h'\n"+cri+".registry]\nconfig_path = '/a'\n")
	wantSettings(t, imp, map[string]string{"pod.selinux": "false", "image.hosts_dirs": "", "api.stream_idle_timeout": `"1h"`})
	for _, key := range []string{"enable_selinux", "registry.config_path"} {
		if !remarked(imp, `plugins."io.containerd.grpc.v1.cri".`+key) {
			t.Errorf("nothing is said of %s", key)
		}
	}
}

func TestContainerdRemarks(t *testing.T) {
	const cri = "[plugins.'io.containerd.grpc.v1.cri'"
	imp := containerdOf(t, "version = 2\n"+cri+"]\nenable_tls_streaming = true\n"+
		cri+".containerd]\nsnapshotter = 'stargz'\n"+
		cri+".containerd.untrusted_workload_runtime]\nruntime_type = 'io.containerd.kata.v2'\n"+
		cri+".containerd.runtimes.r]\nruntime_type = 'io.containerd.runc.v2'\nsandboxer = 'x'\n"+
		cri+".containerd.runtimes.r.options]\nNoNewKeyring = true\n"+
		cri+".registry.mirrors.'docker.io']\nendpoint = ['https://m']\n"+
		cri+".registry.configs.'r'.auth]\npassword = 'hunter2'\n"+
		"[proxy_plugins.stargz]\ntype = 'snapshot'\naddress = '/run/s'\n")
	const at = `plugins."io.containerd.grpc.v1.cri".`
	for _, key := range []string{
		at + "enable_tls_streaming", at + "containerd.snapshotter", at + "containerd.untrusted_workload_runtime",
		at + "containerd.runtimes.r.sandboxer", at + "containerd.runtimes.r.options.NoNewKeyring", at + "registry.mirrors", at + "registry.configs", "proxy_plugins",
	} {
		if !remarked(imp, key) {
			t.Errorf("nothing is said of %s", key)
		}
	}
	for _, r := range imp.Remarks {
		if strings.Contains(r.Value, "hunter2") {
			t.Errorf("a password is shown: %+v", r)
		}
	}
}

func TestBrokenContainerdConfigurations(t *testing.T) {
	for text, want := range map[string]string{
		"":                              "version 1 is not supported: migrate the file with containerd config migrate",
		"version = 1":                   "version 1 is not supported",
		"version = 5":                   "c.toml:1: version: must be a version from 2 to 4, got 5",
		"version = 'x'":                 "c.toml:1: version: must be a number",
		"version = 2\nimports = 'x'":    "c.toml:2: imports: must be a list of strings",
		"version = 2\nimports = ['[*']": "c.toml:2: imports: ",
		"version = 2\n[x":               "c.toml:2: ",
		"version = 2\n[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.x]\nruntime_path = ''": "is missing: containerd refuses this runtime",
		"version = 2\n[debug]\nformat = 'xml'":                                                        `c.toml:3: debug.format: must be "text" or "json"`,
		"version = 2\n[plugins.'io.containerd.cri.v1.runtime'.cni]\nbin_dirs = 'x'":                   "c.toml:3: ",
	} {
		_, err := Containerd(filepath.Join(etc(t, map[string]string{"c.toml": text}), "c.toml"))
		if !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

// Mirrors and unverified registries of the CRI plugin's own tables are given as lines of registries.conf.
func TestContainerdRegistriesAreGivenAsLines(t *testing.T) {
	t.Parallel()
	const at = `plugins."io.containerd.grpc.v1.cri".registry.`
	imp := containerdOf(t, "version = 2\n["+at+"mirrors.\"docker.io\"]\nendpoint = ['https://m.example.com', 'http://cache:5000/v2/', 'https://harbor/v2/hub.docker.com', 'https://art/api/docker/x/v2']\n"+
		"["+at+"mirrors.'local:5000']\nendpoint = ['http://local:5000']\n["+at+"mirrors.'*']\nendpoint = ['http://spegel:30020']\n"+
		"["+at+"configs.'r.example.com'.tls]\ninsecure_skip_verify = true\n["+at+"configs.'s.example.com'.auth]\npassword = 'secret'\n")
	said := map[string]string{}
	for _, r := range imp.Remarks {
		_, said[r.Key], _ = strings.Cut(r.Text, "\n")
	}
	for key, want := range map[string]string{
		"mirrors": "[[registry]]\nlocation = \"docker.io\"\n[[registry.mirror]]\nlocation = \"m.example.com\"\n[[registry.mirror]]\nlocation = \"cache:5000\"\ninsecure = true\n[[registry.mirror]]\nlocation = \"harbor/hub.docker.com\"" +
			"\n[[registry]]\nlocation = \"local:5000\"\ninsecure = true" +
			"\n" + `for "*", all other registries, write the endpoints ["http://spegel:30020"] into DIR/_default/hosts.toml, and DIR into image.hosts_dirs` +
			"\n" + `"https://art/api/docker/x/v2" of docker.io cannot be a mirror for crius, which asks for /v2 right after the host`,
		"configs": "[[registry]]\nlocation = \"r.example.com\"\ninsecure = true",
	} {
		if got := said[at+key]; got != want {
			t.Errorf("%s:\n%s\nwant\n%s", key, got, want)
		}
	}
	for _, r := range imp.Remarks {
		if strings.Contains(r.Text+r.Value, "secret") {
			t.Errorf("%+v has a password", r)
		}
	}
}

// Before 2.0 containerd had a first shim, whose program is not among the options.
func TestContainerdFirstShim(t *testing.T) {
	t.Parallel()
	const table, v1 = "version = 2\n[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.x]\nruntime_type = ", "'io.containerd.runtime.v1.linux'\n"
	for text, want := range map[string]string{
		v1:                                    `"runc"`,
		v1 + "runtime_engine = '/r/nvidia'\n": `"/r/nvidia"`,
		v1 + "[plugins." + strings.TrimSpace(v1) + "]\nruntime = 'crun'\n": `"crun"`,
	} {
		imp := containerdOf(t, table+text)
		wantSettings(t, imp, map[string]string{"runtime.handlers.x.type": `"oci"`, "runtime.handlers.x.path": want, "runtime.cgroup_driver": `"cgroupfs"`})
	}
	imp := containerdOf(t, table+"'io.containerd.runc.v2'\nruntime_engine = '/r/nvidia'\n")
	wantSettings(t, imp, map[string]string{"runtime.handlers.x.path": `"runc"`})
	if !remarked(imp, `plugins."io.containerd.grpc.v1.cri".containerd.runtimes.x.runtime_engine`) {
		t.Errorf("runtime_engine is lost: %+v", imp.Remarks)
	}
}
