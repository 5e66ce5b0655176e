package config

import (
	"fmt"
	"path"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/nri"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/oci/annotation"
	"github.com/crius-run/crius/oci/pullcgroup"
	"github.com/crius-run/crius/oci/spec"
	"github.com/crius-run/crius/oci/tuning"
	"github.com/crius-run/crius/server"
	"github.com/crius-run/crius/server/otlp"
	"github.com/crius-run/crius/server/tlsfile"
	"github.com/crius-run/crius/storage"
)

// maxSocketPath is what fits into sockaddr_un beside its final NUL: unix(7).
const maxSocketPath = 107

// choices are the values of keys that allow only some.
func choices(model string) []string {
	switch model {
	case "log_level":
		return []string{"debug", "info", "warn", "error"}
	case "api.tls_min_version":
		return []string{tlsfile.Version12, tlsfile.Version13}
	case "log_format":
		return []string{"text", "json"}
	case "runtime.cgroup_driver":
		return []string{"systemd", "cgroupfs"}
	case "image.volumes":
		return []string{"mkdir", "bind", "ignore"}
	case "network.primary_ip":
		return []string{"ipv4", "ipv6", "cni"}
	case "network.host_ports":
		return []string{"auto", "crius", "cni"}
	case "runtime.handlers.NAME.type":
		return []string{"oci", "shim"}
	case "metrics.included_pod_metrics":
		return append(server.PodMetricKinds(), server.AllPodMetrics)
	}
	return nil
}

// wanted says what a key's value must be, beyond its type; empty: nothing.
func wanted(model string) string {
	switch model {
	case "root", "run_root", "api.listen", "pod.namespaces_dir", "network.conf_dir", "network.plugin_dirs", "image.hosts_dirs", "image.additional_artifact_stores",
		"runtime.hooks_dir", "pod.mounts_files", "tuning.irqbalance_config_files", "nri.socket", "nri.plugin_dir", "nri.plugin_config_dir":
		return anAbsolutePath
	case "pod.seccomp_profile", "runtime.monitor", "runtime.crio_handlers_dir", "runtime.container_log_journal", "runtime.blockio_config_file", "runtime.rdt_config_file", "runtime.handlers.NAME.root",
		"runtime.handlers.NAME.seccomp_profile", "runtime.handlers.NAME.base_runtime_spec", "runtime.handlers.NAME.monitor_cgroup", "runtime.handlers.NAME.cni_conf_dir", "runtime.handlers.NAME.features",
		"api.crio_socket", "image.root", "image.run_root", "image.imagestore", "image.registries_conf", "image.signature_policy",
		"image.signature_policy_dir", "image.auth_file", "image.namespaced_auth_dir", "image.decryption_keys_path", "image.temporary_dir", "tracing.ca_file":
		return anAbsolutePathOrNone
	case "tracing.endpoint":
		return aCollectorOrNone
	case "runtime.backported_cves":
		return aCVE
	case "runtime.handlers.NAME.path":
		return aProgram
	case "runtime.handlers.NAME.default_annotations":
		return aKeyAndValue
	case "runtime.handlers.NAME.allowed_annotations", "runtime.handlers.NAME.allowed_container_annotations", "runtime.workloads.NAME.allowed_annotations":
		return aKeyOrPattern
	case "runtime.handlers.NAME.options":
		return aFlag
	case "runtime.handlers.NAME.exec_cpu_affinity":
		return firstOrNone
	case "api.max_message_size", "pod.shm_size", "image.parallel_layers",
		"network.timeout", "runtime.handlers.NAME.create_timeout", "nri.registration_timeout", "nri.request_timeout":
		return aboveZero
	}
	return ""
}

// What wanted answers, in the words of the error.
const (
	anAbsolutePath       = "an absolute path"
	anAbsolutePathOrNone = "an absolute path or an empty string"
	aCollectorOrNone     = "http://HOST:PORT, https://HOST:PORT or an empty string"
	aProgram             = "an absolute path or a bare name to search in PATH"
	aCVE                 = "a CVE, such as CVE-2024-21626"
	aKeyAndValue         = "of the form KEY=VALUE"
	aKeyOrPattern        = "an annotation key or a pattern of *, ? and [...], with every bracket closed"
	aFlag                = "a flag of the form --name=value that crius does not set itself"
	firstOrNone          = "first or an empty string"
	aboveZero            = "more than 0"
)

var cveNumber = regexp.MustCompile(`^CVE-\d{4}-\d{4,}$`)

// validator collects what is wrong with the values of a configuration.
type validator struct {
	origin   map[string]origin
	problems []error
}

// validate checks what the type of an option cannot say.
func (l *Loaded) validate() []error {
	v := &validator{origin: l.origin}
	for _, s := range sections(&l.Config) {
		for _, k := range s.Keys {
			v.key(k)
		}
	}
	v.together(&l.Config)
	return v.problems
}

// key checks one value by itself.
func (v *validator) key(k Key) {
	number := int64(1)
	var texts []string
	switch value := k.value.Interface().(type) {
	case time.Duration:
		number = int64(value)
	case int64:
		number = value
	case int:
		number = int64(value)
	case string:
		texts = []string{value}
	case []string:
		texts = value
		v.require(!slices.Contains(value, ""), k.Path, "an item of the list is empty: remove it")
	}
	v.require(number >= 0, k.Path, "must be 0 or more, got %s", k.TOML())
	v.require(number > 0 || wanted(k.model) != aboveZero, k.Path, "must be %s, got %s", wanted(k.model), k.TOML())
	for _, text := range texts {
		v.text(k, text)
	}
}

func (v *validator) text(k Key, text string) {
	if allowed := choices(k.model); allowed != nil {
		v.require(slices.Contains(allowed, text), k.Path, "must be one of %s, got %s", strings.Join(allowed, ", "), quote(text))
	}
	ok := true
	switch wanted(k.model) {
	case anAbsolutePath:
		ok = filepath.IsAbs(text)
	case anAbsolutePathOrNone:
		ok = text == "" || filepath.IsAbs(text)
	case aCollectorOrNone:
		_, _, ok = otlp.SplitEndpoint(text)
		ok = ok || text == ""
	case aProgram:
		ok = filepath.IsAbs(text) || text != "" && !strings.Contains(text, "/")
	case aCVE:
		ok = cveNumber.MatchString(text)
	case aKeyAndValue:
		ok = strings.IndexByte(text, '=') > 0
	case aKeyOrPattern:
		_, err := path.Match(text, "")
		ok = err == nil
	case firstOrNone:
		ok = text == "" || text == oci.FirstCPU
	case aFlag:
		name, _, _ := strings.Cut(strings.TrimLeft(text, "-"), "=")
		ok = strings.HasPrefix(text, "-") && name != "" && !slices.Contains([]string{"root", "systemd-cgroup"}, name)
	}
	v.require(ok, k.Path, "must be %s, got %s", wanted(k.model), quote(text))
	v.require(!strings.ContainsRune(text, 0), k.Path, "must not contain NUL bytes, got %s", quote(text))
}

// together checks values that depend on each other, and names.
func (v *validator) together(c *Config) {
	v.require(filepath.Clean(c.Root) != filepath.Clean(c.RunRoot), "run_root",
		"must differ from root: a reboot may empty run_root, but root must survive it")
	v.apart(c)
	for _, socket := range []struct{ key, path string }{
		{"api.listen", c.API.Listen}, {"api.crio_socket", c.API.CrioSocket}, {"nri.socket", c.NRI.Socket},
		{"runtime.container_log_journal", c.Runtime.LogJournal},
	} {
		v.require(len(socket.path) <= maxSocketPath, socket.key,
			"path is %d bytes long, but a unix socket path can have at most %d: choose a shorter one", len(socket.path), maxSocketPath)
	}
	if dir := filepath.Dir(c.NRI.Socket); len(c.NRI.Socket) <= maxSocketPath {
		v.require(len(dir) <= nri.MaxSocketDir, "nri.socket",
			"path of the directory is %d bytes long, but can have at most %d: choose a shorter one", len(dir), nri.MaxSocketDir)
	}
	v.require(c.API.CrioSocket == "" || filepath.Clean(c.API.CrioSocket) != filepath.Clean(c.API.Listen), "api.crio_socket",
		"must differ from api.listen")
	v.require(c.Tracing.SamplingRate <= otlp.PerMillion, "tracing.sampling_rate_per_million",
		"must be at most %d, got %d", otlp.PerMillion, c.Tracing.SamplingRate)
	v.require(len(c.Network.PluginDirs) > 0, "network.plugin_dirs", "must list at least one directory")

	v.logLimit(c.Runtime)
	v.require(c.Image.PullConnections <= storage.MaxPullConnections, "image.pull_connections",
		"must be at most %d, got %d", storage.MaxPullConnections, c.Image.PullConnections)
	v.require(c.Image.WritableSize == 0 || c.Image.WritableSize >= 1<<20, "image.writable_layer_size",
		"must be 0, for no limit, or at least %d, so that containers can start, got %d", 1<<20, c.Image.WritableSize)
	v.require(c.Image.WritableInodes == 0 || c.Image.WritableInodes >= 100, "image.writable_layer_inodes",
		"must be 0, for no limit, or at least 100, so that containers can start, got %d", c.Image.WritableInodes)
	v.parsed(c)
	v.workloads(c.Runtime.Workloads)

	// A RuntimeClass handler is a DNS label (RFC 1123).
	label := regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)
	handlers := names(reflect.ValueOf(c.Runtime.Handlers))
	for _, name := range handlers {
		v.require(label.MatchString(name), join("runtime.handlers", name),
			"not a valid RuntimeClass handler: use at most 63 lowercase letters, digits and dashes")
	}
	name := c.Runtime.DefaultHandler
	v.require(slices.Contains(handlers, name), "runtime.default_handler",
		"unknown handler %s: add [%s] or choose one of %s", quote(name), join("runtime.handlers", name), strings.Join(handlers, ", "))
}

// logLimit checks what a monitor can compute with. A burst without a rate has no effect.
func (v *validator) logLimit(c oci.Config) {
	const least, most int64 = conmon.LeastLogBytes, conmon.MostLogBytes
	v.require(c.LogRate <= most, "runtime.container_log_rate", "must be at most %d, got %d", most, c.LogRate)
	v.require(c.LogRate == 0 || c.LogBurst >= least && c.LogBurst <= most, "runtime.container_log_burst",
		"must be from %d, so that a long line fits, to %d, got %d", least, most, c.LogBurst)
	v.require(c.LogMaxSize == 0 || c.LogMaxSize >= least && c.LogMaxSize <= most, "runtime.container_log_max_size",
		"must be 0, for no limit, or from %d, so that a long line fits, to %d, got %d", least, most, c.LogMaxSize)
}

// workloads checks the tables of workloads. Two that one annotation activates would
// leave it open in which of them a pod is.
func (v *validator) workloads(workloads map[string]annotation.Workload) {
	activates := map[string]string{}
	for _, name := range names(reflect.ValueOf(workloads)) {
		w, table := workloads[name], join("runtime.workloads", name)
		if w.Activation == "" {
			empty := w.Prefix == "" && len(w.Allowed) == 0 && w.Resources == annotation.CPU{}
			v.require(empty, table, "activation_annotation is missing: without it no pod is in the workload")
			continue
		}
		other, taken := activates[w.Activation]
		v.require(!taken, table+".activation_annotation", "is that of workload %s as well: a pod can be in one workload only", quote(other))
		activates[w.Activation] = name
		v.readable(table+".resources", w.Resources.Check())
	}
}

// readable notes why a value could not be parsed.
func (v *validator) readable(key string, err error) {
	v.require(err == nil, key, "%s", strings.TrimSuffix(fmt.Sprint(err), ": "+fault.Invalid.Error()))
}

// parsed checks the values that have a grammar, by those who read them.
func (v *validator) parsed(c *Config) {
	_, err := spec.ParseCapabilities(c.Pod.DefaultCapabilities)
	v.readable("pod.default_capabilities", err)
	_, err = spec.ParseSysctls(c.Pod.DefaultSysctls)
	v.readable("pod.default_sysctls", err)
	v.readable("api.tls_cipher_suites", c.API.TLS().Check())
	v.readable("image.pull_cgroup", pullcgroup.Config{Driver: c.Runtime.CgroupDriver, Parent: c.Image.PullCgroup}.Check())
	_, err = tuning.ParseSet(c.Tuning.SharedCPUs)
	v.readable("tuning.shared_cpuset", err)
	_, err = tuning.ParseSet(c.Pod.InfraCPUs)
	v.readable("pod.infra_cpuset", err)
	for _, text := range c.Pod.DefaultUlimits {
		_, err = spec.ParseUlimit(text)
		v.readable("pod.default_ulimits", err)
	}
	for _, text := range c.Pod.AdditionalDevices {
		_, err = spec.ParseDevice(text)
		v.readable("pod.additional_devices", err)
	}
}

// apart keeps what outlives pods and containers out of the directories of
// pods, containers and runtimes: an unknown name there is taken for debris, and
// a wipe removes them whole.
func (v *validator) apart(c *Config) {
	type place struct{ key, dir string }
	imagestore := c.Image.ImageStore
	if roots, err := storage.Roots(c.Image); err == nil { // else the store says what is wrong when it is opened
		imagestore = roots.Images // from storage.conf, perhaps
	}
	for _, p := range []place{
		{"image.root", c.Image.Root}, {"image.run_root", c.Image.RunRoot}, {"image.imagestore", imagestore},
		{"image.temporary_dir", c.Image.TemporaryDir}, {"pod.namespaces_dir", c.Pod.NamespacesDir},
	} {
		for _, root := range []place{{"root", c.Root}, {"run_root", c.RunRoot}} {
			for _, taken := range []string{"pods", "containers", "runtime"} {
				taken = filepath.Join(root.dir, taken)
				v.require(!strings.HasPrefix(filepath.Clean(p.dir)+"/", taken+"/"), p.key,
					"must be outside %s, which crius manages below %s and empties as pods and containers are removed, got %s", taken, root.key, quote(p.dir))
			}
		}
	}
}

// require notes a problem with a key unless its condition holds.
func (v *validator) require(ok bool, key, message string, args ...any) {
	if !ok {
		v.problems = append(v.problems, &Problem{Where: v.origin[key].place, Key: key, Text: fmt.Sprintf(message, args...)})
	}
}
