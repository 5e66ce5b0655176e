package foreign

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// crioKeyNames are the keys of crio.conf(5), by table.
var crioKeyNames = map[string]string{
	"crio": "root runroot storage_driver storage_option log_dir version_file version_file_persist imagestore internal_wipe " +
		"internal_repair clean_shutdown_file",
	"crio.api": "listen stream_address stream_port stream_enable_tls stream_idle_timeout stream_tls_cert stream_tls_key " +
		"stream_tls_ca tls_min_version tls_cipher_suites grpc_max_send_msg_size grpc_max_recv_msg_size",
	"crio.runtime": "default_runtime default_ulimits no_pivot decryption_keys_path additional_artifact_stores conmon conmon_cgroup " +
		"conmon_env default_env min_injected_gomaxprocs selinux seccomp_profile privileged_seccomp_profile apparmor_profile " +
		"blockio_config_file blockio_reload cdi_spec_dirs irqbalance_config_file irqbalance_config_restore_file rdt_config_file " +
		"cgroup_manager default_capabilities add_inheritable_capabilities default_sysctls allowed_devices additional_devices " +
		"hooks_dir default_mounts default_mounts_file pids_limit log_filter log_level log_size_max log_to_journald " +
		"container_exits_dir container_attach_socket_dir bind_mount_prefix read_only uid_mappings minimum_mappable_uid " +
		"gid_mappings minimum_mappable_gid ctr_stop_timeout drop_infra_ctr infra_ctr_cpuset shared_cpuset namespaces_dir " +
		"pinns_path absent_mount_sources_to_reject device_ownership_from_security_context enable_criu_support " +
		"enable_pod_events hostnetwork_disable_selinux disable_hostport_mapping timezone",
	"crio.runtime.runtimes.NAME": "runtime_path runtime_root runtime_type inherit_default_runtime runtime_config_path " +
		"privileged_without_host_devices allowed_annotations container_min_memory platform_runtime_paths no_sync_log " +
		"default_annotations stream_websockets seccomp_profile container_create_timeout",
	"crio.runtime.workloads.NAME":           "activation_annotation annotation_prefix allowed_annotations",
	"crio.runtime.workloads.NAME.resources": "cpushares cpuquota cpuperiod cpuset cpulimit",
	"crio.checkpoint":                       "container_level",
	"crio.image": "default_transport global_auth_file pause_image pause_image_auth_file pause_command pinned_images " +
		"signature_policy signature_policy_dir image_volumes big_files_temporary_dir separate_pull_cgroup " +
		"auto_reload_registries pull_progress_timeout oci_artifact_mount_support short_name_mode",
	"crio.network": "cni_default_network network_dir plugin_dirs cni_status_grace_period",
	"crio.metrics": "enable_metrics metrics_collectors metrics_host metrics_port metrics_socket metrics_cert metrics_key",
	"crio.tracing": "enable_tracing tracing_endpoint tracing_sampling_rate_per_million",
	"crio.stats":   "stats_collection_period collection_period included_pod_metrics",
	"crio.nri": "enable_nri nri_listen nri_plugin_dir nri_plugin_config_dir nri_disable_connections " +
		"nri_plugin_registration_timeout nri_plugin_request_timeout",
	"crio.nri.default_validator": "nri_enable_default_validator nri_validator_reject_oci_hook_adjustment " +
		"nri_validator_reject_runtime_default_seccomp_adjustment nri_validator_reject_unconfined_seccomp_adjustment " +
		"nri_validator_reject_custom_seccomp_adjustment nri_validator_reject_namespace_adjustment " +
		"nri_validator_reject_sysctl_adjustment nri_validator_required_plugins nri_validator_tolerate_missing_plugins_annotation",
	"crio.checkpoint_restore": "container_level_enabled",
}

// crioOtherNames are keys that are missing in the manual page: those of older versions, of
// installers, and undocumented ones.
var crioOtherNames = map[string]string{
	"crio":     "file_locking file_locking_path",
	"crio.api": "host_ip",
	"crio.runtime": "seccomp_use_default_when_empty separate_pull_cgroup manage_ns_lifecycle " +
		"manage_network_ns_lifecycle",
	"crio.runtime.runtimes.NAME":  "monitor_path monitor_cgroup monitor_exec_cgroup monitor_env runtime_pull_image exec_cpu_affinity",
	"crio.runtime.workloads.NAME": "disallowed_annotations",
	"crio.image":                  "namespaced_auth_dir insecure_registries registries",
	"crio.network":                "plugin_dir",
}

func namesOf(tables map[string]string) (keys []string) {
	for table, names := range tables {
		for _, name := range strings.Fields(names) {
			keys = append(keys, table+"."+name)
		}
	}
	slices.Sort(keys)
	return keys
}

func TestEveryKeyOfCrioHasOneRule(t *testing.T) {
	documented := namesOf(crioKeyNames)
	if len(documented) < 127 {
		t.Errorf("only %d keys are listed", len(documented))
	}
	wanted := append(slices.Clone(documented), namesOf(crioOtherNames)...)
	slices.Sort(wanted)
	var have []string
	for _, r := range crioRules {
		have = append(have, r.key)
	}
	slices.Sort(have)
	if !slices.Equal(wanted, have) {
		for _, key := range wanted {
			if !slices.Contains(have, key) {
				t.Errorf("%s has no rule", key)
			}
		}
		for i, key := range have {
			if !slices.Contains(wanted, key) {
				t.Errorf("%s is not a key of CRI-O", key)
			}
			if i > 0 && have[i-1] == key {
				t.Errorf("%s has two rules", key)
			}
		}
	}
	// The file with all defaults contains each of them.
	files, err := below("../testdata/crio-defaults")
	if err != nil {
		t.Fatal(err)
	}
	top, _, err := crioFiles(files)
	if err != nil {
		t.Fatal(err)
	}
	var set []string
	newConversion(crio, top, crioRules).crioKeys(func(f found) { set = append(set, f.general) })
	slices.Sort(set)
	for _, key := range documented {
		if !slices.Contains(set, key) {
			t.Errorf("%s is not in the file of all defaults", key)
		}
	}
}

// keysIn returns the keys in a file of testdata/keys, without their versions.
func keysIn(t *testing.T, file string) (keys []string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata/keys", file))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if key, _, _ := strings.Cut(strings.TrimSpace(line), " "); key != "" && key != "#" {
			keys = append(keys, key)
		}
	}
	return keys
}

// Nothing that a version of the programs reads is unknown, as their sources say.
func TestEveryKeyThatIsReadHasARule(t *testing.T) {
	t.Parallel()
	covered := func(rules []rule, general string) bool {
		return slices.ContainsFunc(rules, func(r rule) bool { return r.key == general || strings.HasPrefix(general, r.key+".") })
	}
	crios, containerds := keysIn(t, "crio.txt"), keysIn(t, "containerd.txt")
	if len(crios) < 100 || len(containerds) < 190 {
		t.Errorf("only %d and %d keys are listed", len(crios), len(containerds))
	}
	for _, key := range crios {
		if general, _ := generalCRIO(strings.Split(key, ".")); !covered(crioRules, general) {
			t.Errorf("CRI-O's %s has no rule", key)
		}
	}
	for _, key := range containerds {
		path := strings.Split(key, ".")
		if before, rest, quoted := strings.Cut(key, `."`); quoted {
			id, after, _ := strings.Cut(rest, `".`)
			path = append([]string{before, id}, strings.Split(after, ".")...)
		}
		if general, _ := generalContainerd(path); !covered(containerdRules, general) {
			t.Errorf("containerd's %s has no rule", key)
		}
	}
}

// A key that may restrict pods or clients, by what its name says, is carried over or its loss must be
// accepted. The others are here, with what they do.
func TestEveryKeyThatMayRestrictIsCarriedOverOrRefused(t *testing.T) {
	t.Parallel()
	names := regexp.MustCompile("seccomp|apparmor|selinux|capabilit|privileg|tls|auth|signature|verif|validat|reject|allow|mappa|mapping|read_only|pids|" +
		"short_name|registr|namespace|device|restrict|policy|decrypt|writable|criu|checkpoint|unpriv|disable|proc_mount|sandbox|untrusted|pull_image|uid|gid")
	harmless := map[string]string{
		"add_inheritable_capabilities": "grants", "insecure_registries": "grants; without it pulls fail", "container_level_enabled": "grants", "container_level": "grants",
		"enable_checkpoint_restore": "grants", "enable_experimental_restore_via_create": "grants", "sandboxer": "another protocol", "sandbox_mode": "another protocol",
		"selinux_category_range": "which of equally strict labels", "disable_cgroup": "grants", "enable_criu_support": "root of the node asks for checkpoints", "enable_criu": "the same",
		"pause_image_auth_file": "no such image", "tcp_tls_ca": "no such socket", "tcp_tls_cert": "no such socket", "tcp_tls_key": "no such socket", "tcp_tls_common_name": "no such socket",
		"uid": "of the socket, which is root's", "auths": "without them pulls fail", "registry.configs": "without them pulls fail", "registry.mirrors": "without them pulls fail",
		"registry.headers": "without them pulls fail", "auto_reload_registries": "always on", "key_model": "without it pulls fail",
		"disallowed_annotations": "CRI-O computes it", "gid": "of a socket that is not there", "disable_tcp_service": "no such socket", "sandbox_image": "no such image",
		"disable_hugetlb_controller": "grants", "restrict_oom_score_adj": "always so where it matters", "disable_snapshot_annotations": "how images are stored",
		"disable_pause_image_pull": "no such image", "runtime_pull_image": "kata-deploy sets it for every handler; the node verifies images",
	}
	for _, r := range slices.Concat(crioRules, containerdRules) {
		last := r.key[strings.LastIndexByte(r.key, '.')+1:]
		known := harmless[last] != "" || slices.ContainsFunc(slices.Collect(maps.Keys(harmless)), func(k string) bool { return strings.HasSuffix(r.key, "."+k) })
		if r.verdict == mapped || r.restricts || known || !names.MatchString(r.key) {
			continue
		}
		t.Errorf("%s is neither carried over nor refused: %v, %s", r.key, r.verdict, r.why)
	}
}

// Every rule has a target, or says what the lack of one means.
func TestRulesAreWhole(t *testing.T) {
	seen := map[string]bool{}
	for _, r := range slices.Concat(crioRules, containerdRules) {
		if seen[r.key] {
			t.Errorf("%s has two rules", r.key)
		}
		seen[r.key] = true
		switch r.verdict {
		case mapped:
			if r.to == "" || r.why != "" || r.off != nil || r.joint == (r.as != nil) {
				t.Errorf("%s is mapped by %+v", r.key, r)
			}
			if strings.Contains(r.key, anyName) != strings.Contains(r.to, anyName) {
				t.Errorf("%s is mapped to %s", r.key, r.to)
			}
		case builtin, refused:
			if r.to != "" || r.why == "" || r.as != nil || r.unset != nil {
				t.Errorf("%s is not mapped, and has %+v", r.key, r)
			}
		default:
			t.Errorf("%s has no verdict", r.key)
		}
		if strings.HasSuffix(r.why, ".") || strings.Contains(r.why, "  ") {
			t.Errorf("%s: %q is no phrase", r.key, r.why)
		}
	}
}

// CRI-O never waits for less than half a minute.
func TestCreateTimeoutIsAsCRIOReadsIt(t *testing.T) {
	t.Parallel()
	for seconds, want := range map[int64]string{0: "4m0s", 15: "30s", 30: "30s", 90: "1m30s"} {
		if got, err := createTimeout(seconds); err != nil || got != want {
			t.Errorf("%d: %v, %v, want %s", seconds, got, err, want)
		}
	}
	if _, err := createTimeout(int64(-1)); err == nil {
		t.Error("a negative number is accepted")
	}
}
