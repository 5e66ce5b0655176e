package config

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/crius-run/crius/cmd/crius/config/foreign"
	"github.com/crius-run/crius/oci"
)

// lostKeys are the keys that restrict and have no counterpart.
func lostKeys(imp *foreign.Import) (keys []string) {
	for _, r := range imp.Lost(nil) {
		keys = append(keys, r.Key)
	}
	return keys
}

// converted writes the file of an import and loads it as the server does.
func converted(t *testing.T, imp *foreign.Import, err error) (*Loaded, string) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	if err := WriteImport(&b, imp, lostKeys(imp)); err != nil {
		t.Fatal(err)
	}
	n := newNode(t)
	n.write(n.file, b.String())
	loaded, err := n.load()
	if err != nil {
		t.Fatalf("%v in\n%s", err, b.String())
	}
	return loaded, b.String()
}

func fromCrio(t *testing.T, dir string) (*Loaded, string) {
	t.Helper()
	imp, err := foreign.CRIO(dir)
	return converted(t, imp, err)
}

func fromContainerd(t *testing.T, file string) (*Loaded, string) {
	t.Helper()
	imp, err := foreign.Containerd(file)
	return converted(t, imp, err)
}

// handler returns the default handler with changes.
func handler(name string, change func(*oci.Handler)) oci.Handler {
	h := oci.DefaultHandlerConfig(name)
	change(&h)
	return h
}

func TestImportOfCrioDefaults(t *testing.T) {
	loaded, text := fromCrio(t, "testdata/crio-defaults")
	c := loaded.Config
	equal(t, "facade", c.API.CrioSocket, "/var/run/crio/crio.sock")
	equal(t, "capabilities", c.Pod.DefaultCapabilities, Default().Pod.DefaultCapabilities)
	equal(t, "pids limit", c.Pod.PidsLimit, int64(0))
	equal(t, "cgroup driver", c.Runtime.CgroupDriver, "systemd")
	equal(t, "default handler", c.Runtime.DefaultHandler, "crun")
	equal(t, "message size", c.API.MaxMessageSize, 80<<20)
	equal(t, "credentials of namespaces", c.Image.NamespacedAuthDir, "/etc/crio/auth")
	equal(t, "signature policies", c.Image.SignaturePolicyDir, "/etc/crio/policies")
	equal(t, "keys of images", c.Image.DecryptionKeysPath, "/etc/crio/keys/")
	equal(t, "AppArmor profile", c.Pod.AppArmorProfile, "crius-default")
	equal(t, "metrics", c.Metrics.Address, "")
	equal(t, "tracing", c.Tracing.Endpoint, "")
	equal(t, "handler", c.Runtime.Handlers["crun"], handler("crun", func(h *oci.Handler) {
		h.Path, h.MinMemory = "/usr/libexec/crio/crun", 12<<20
	}))
	equal(t, "criu", c.Runtime.Criu, "criu")
	if strings.Contains(text, "unknown to crius") {
		t.Errorf("CRI-O's own keys are called unknown in\n%s", text)
	}
	if n := strings.Count(text, "crio.conf:"); n < 50 {
		t.Errorf("only %d lines of the file are named", n)
	}
	// CRI-O without any file means the same.
	nothing, _ := fromCrio(t, t.TempDir())
	for _, key := range Differences(loaded, nothing) {
		switch {
		case strings.HasPrefix(key, "runtime.handlers.crun."):
		case slices.Contains([]string{"image.progress_timeout", "network.plugin_dirs", "metrics.included_pod_metrics", "image.root", "image.run_root",
			"pod.namespaces_dir", "network.conf_dir", "network.ready_grace_period"}, key):
		default:
			t.Errorf("%s depends on whether CRI-O's default is written out", key)
		}
	}
}

func TestImportOfCrioInstallers(t *testing.T) {
	loaded, text := fromCrio(t, "testdata/crio-installers")
	c := loaded.Config.Runtime
	equal(t, "default handler", c.DefaultHandler, "nvidia")
	trace := []string{"io.containers.trace-syscall", "io.containers.trace-syscall*", "io.containers.trace-syscall*/*"}
	for name, want := range map[string]func(*oci.Handler){
		"crun": func(h *oci.Handler) {
			h.Path, h.AllowedAnnotations, h.AllowedContainerAnnotations = "/usr/libexec/crio/crun", trace, trace
		},
		"runc": func(h *oci.Handler) { h.Path = "/usr/libexec/crio/runc" },
		"nvidia": func(h *oci.Handler) {
			h.Path, h.AllowedAnnotations, h.AllowedContainerAnnotations = "/usr/bin/nvidia-container-runtime", trace, trace
		},
		"nvidia-cdi": func(h *oci.Handler) { h.Path = "/usr/bin/nvidia-container-runtime.cdi" },
		"kata-qemu":  kata("qemu"),
		"kata-clh":   kata("clh"),
	} {
		equal(t, name, c.Handlers[name], handler(name, want))
	}
	if !strings.Contains(text, "crio.runtime.runtimes.kata-clh.runtime_pull_image = true\n# (testdata/crio-installers/crio.conf.d/99-kata-deploy:15)\n") {
		t.Errorf("nothing is said of runtime_pull_image in\n%s", text)
	}
}

func kata(hypervisor string) func(*oci.Handler) {
	return func(h *oci.Handler) {
		h.Type, h.Path, h.PrivilegedWithoutHostDevices = "shim", "/opt/kata/bin/containerd-shim-kata-v2", true
		h.Options = []string{"--ConfigPath=/opt/kata/share/defaults/kata-containers/configuration-" + hypervisor + ".toml"}
		h.AllowedAnnotations = []string{"io.katacontainers.*"}
		h.AllowedContainerAnnotations = h.AllowedAnnotations
	}
}

func TestImportOfContainerdVersion2(t *testing.T) {
	loaded, text := fromContainerd(t, "testdata/containerd/v2.toml")
	c := loaded.Config
	equal(t, "capabilities", len(c.Pod.DefaultCapabilities), 14)
	equal(t, "unprivileged ports", c.Pod.UnprivilegedPorts, false)
	equal(t, "unprivileged ping", c.Pod.UnprivilegedPing, false)
	equal(t, "cgroup driver", c.Runtime.CgroupDriver, "cgroupfs")
	equal(t, "handler", c.Runtime.Handlers["runc"], oci.DefaultHandlerConfig("runc"))
	equal(t, "plugins", c.Network.PluginDirs, []string{"/opt/cni/bin"})
	equal(t, "volumes of images", c.Image.Volumes, "bind")
	equal(t, "NRI", c.NRI.Enable, false)
	equal(t, "facade", c.API.CrioSocket, "/var/run/crio/crio.sock")
	if strings.Contains(text, "# No equivalent in crius") {
		t.Errorf("the defaults have keys without counterpart:\n%s", text)
	}
}

func TestImportOfContainerdWithInstallers(t *testing.T) {
	loaded, text := fromContainerd(t, "testdata/containerd/v3.toml")
	c := loaded.Config
	equal(t, "unprivileged ports", c.Pod.UnprivilegedPorts, true)
	equal(t, "unprivileged ping", c.Pod.UnprivilegedPing, true)
	equal(t, "cgroup driver", c.Runtime.CgroupDriver, "systemd")
	equal(t, "default handler", c.Runtime.DefaultHandler, "nvidia")
	equal(t, "runc", c.Runtime.Handlers["runc"], oci.DefaultHandlerConfig("runc"))
	equal(t, "nvidia", c.Runtime.Handlers["nvidia"], handler("nvidia", func(h *oci.Handler) { h.Path = "/usr/bin/nvidia-container-runtime" }))
	equal(t, "kata-qemu", c.Runtime.Handlers["kata-qemu"], handler("kata-qemu", func(h *oci.Handler) {
		kata("qemu")(h)
		h.AllowedContainerAnnotations = nil
	}))
	equal(t, "kata-fc", c.Runtime.Handlers["kata-fc"], handler("kata-fc", func(h *oci.Handler) { h.Type, h.Path = "shim", "containerd-shim-kata-fc-v2" }))
	equal(t, "remarks", strings.Count(text, "\n#\n"), 0)
	equal(t, "criu", c.Runtime.Criu, "criu") // enable_criu
}

// Values that crius refuses become remarks, and so do settings that depend on them.
func TestImportDropsWhatCriusRefuses(t *testing.T) {
	dir := t.TempDir()
	err := os.WriteFile(filepath.Join(dir, "crio.conf"), []byte("[crio.network]\nnetwork_dir = 'net.d'\n[crio.runtime]\ndefault_runtime = 'not_a_label'\n[crio.runtime.runtimes.not_a_label]\nruntime_path = \"/x\\u007f\"\n"), 0o600)
	if err != nil {
		t.Fatal(err)
	}
	loaded, text := fromCrio(t, dir)
	equal(t, "network", loaded.Config.Network.ConfDir, Default().Network.ConfDir)
	equal(t, "default handler", loaded.Config.Runtime.DefaultHandler, "runc")
	if _, there := loaded.Config.Runtime.Handlers["not_a_label"]; there {
		t.Error("a handler whose name is refused is there")
	}
	for _, want := range []string{"must be an absolute path", "not a valid RuntimeClass handler", "unknown handler"} {
		if !strings.Contains(strings.ReplaceAll(text, "\n#   ", " "), want) {
			t.Errorf("%q is not in\n%s", want, text)
		}
	}
	if strings.ContainsRune(text, '\x7f') {
		t.Error("a control character reaches the terminal")
	}
}

// Every key of crius in the rules exists.
func TestImportRulesNameOptionsThatExist(t *testing.T) {
	known := map[string]bool{}
	for _, s := range Schema() {
		for _, k := range s.Keys {
			known[k.Path] = true
		}
	}
	crio, err := foreign.CRIO(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	containerd, err := foreign.Containerd("testdata/containerd/v3.toml")
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range slices.Concat(crio.Targets, containerd.Targets) {
		if !known[key] {
			t.Errorf("no option is called %s", key)
		}
	}
	if len(crio.Targets) < 60 || len(containerd.Targets) < 30 {
		t.Errorf("only %d and %d keys are mapped", len(crio.Targets), len(containerd.Targets))
	}
}

// For any file of CRI-O, either an error is reported or crius accepts the result.
func FuzzImport(f *testing.F) {
	for _, seed := range []string{
		"[crio.runtime]\ndefault_runtime = 'a.b'\n[crio.runtime.runtimes.'a.b']\nruntime_type = 'vm'\nruntime_config_path = ''",
		"[crio.runtime]\ndefault_env = ['\\u0000']\nnamespaces_dir = '/var/lib/crius/pods/x'",
		"[crio.metrics]\nenable_metrics = true\nmetrics_host = '\"\\n'\n[crio.tracing]\nenable_tracing = true\ntracing_endpoint = 'http://'",
		"[crio]\nroot = \"/a\\nb\"\n[[crio.x]]\na = 1979-05-27\n[crio.image]\nimage_volumes = 'maybe'",
		"crio = 1", "[crio.runtime]\nruntimes = 1", "[crio.runtime.runtimes.x.runtime_path]\n", "[crio.api]\nlisten = 'x'\n[crio.runtime.runtimes.\"\"]",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "crio.conf"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		imp, err := foreign.CRIO(dir)
		if err != nil {
			return
		}
		converted(t, imp, nil)
	})
}

// Installers' drop-ins for CRI-O are read unchanged. crius's own files override them, and
// errors in them are only reported.
func TestCrioHandlersDir(t *testing.T) {
	installers, err := filepath.Abs("testdata/crio-installers/crio.conf.d")
	if err != nil {
		t.Fatal(err)
	}
	broken := t.TempDir()
	if err := os.WriteFile(filepath.Join(broken, "10-crun.conf"), []byte("[crio.runtime"), 0o600); err != nil {
		t.Fatal(err)
	}
	load := func(dir, more string) *Loaded {
		t.Helper()
		file := filepath.Join(t.TempDir(), "crius.toml")
		if err := os.WriteFile(file, fmt.Appendf(nil, "[runtime]\ncrio_handlers_dir = %q\n%s", dir, more), 0o600); err != nil {
			t.Fatal(err)
		}
		loaded, err := Load(Sources{File: file})
		if err != nil {
			t.Fatal(err)
		}
		return loaded
	}
	loaded := load(installers, "[runtime.handlers.nvidia]\npath = \"/opt/nvidia\"\n")
	c := loaded.Config.Runtime
	equal(t, "default handler", c.DefaultHandler, "nvidia")
	equal(t, "path", c.Handlers["nvidia"].Path, "/opt/nvidia")
	equal(t, "kata", c.Handlers["kata-clh"], handler("kata-clh", kata("clh")))
	equal(t, "root", loaded.Config.Root, Default().Root)
	if origin := loaded.Origin("runtime.handlers.kata-clh.type"); !strings.Contains(origin, "99-kata-deploy") {
		t.Errorf("the type is from %q", origin)
	}
	if text := strings.Join(loaded.Ignored, "\n"); !strings.Contains(text, "99-kata-deploy:15: crio.runtime.runtimes.kata-clh.runtime_pull_image: ") {
		t.Errorf("ignored: %s", text)
	}
	if !slices.Contains(loaded.Files, filepath.Join(installers, "99-kata-deploy")) {
		t.Errorf("files %q", loaded.Files)
	}
	equal(t, "default handler of crius.toml", load(installers, "default_handler = \"runc\"\n").Config.Runtime.DefaultHandler, "runc")

	if missing := load(filepath.Join(broken, "none"), ""); len(missing.Ignored) > 0 {
		t.Errorf("without a directory: %q", missing.Ignored)
	}
	loaded = load(broken, "")
	equal(t, "handlers", loaded.Config.Runtime.Handlers, Default().Runtime.Handlers)
	if len(loaded.Ignored) != 1 || !strings.Contains(loaded.Ignored[0], "10-crun.conf:1") {
		t.Errorf("broken: %q", loaded.Ignored)
	}
}

// A restriction that has no counterpart keeps the import from writing anything, until an operator
// accepts its loss by name.
func TestImportFailsIfARestrictionIsLost(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "crio.conf"), []byte("[crio.runtime]\nprivileged_seccomp_profile = '/p.json'\npids_limit = -5\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	write := func(accepted ...string) (string, error) {
		imp, err := foreign.CRIO(dir)
		if err != nil {
			t.Fatal(err)
		}
		var b strings.Builder
		err = WriteImport(&b, imp, accepted)
		return b.String(), err
	}
	const key = "crio.runtime.privileged_seccomp_profile"
	text, err := write()
	if err == nil || text != "" || !strings.Contains(err.Error(), "crio.conf:2") || !strings.Contains(err.Error(), "repeat the command with --accept "+key) {
		t.Errorf("%v, %q", err, text)
	}
	if text, err = write(key); err != nil || !strings.Contains(text, key+` = "/p.json"`) {
		t.Errorf("accepted: %v, %q", err, text)
	}
	if text, err = write(key, "crio.runtime.typo"); err == nil || text != "" {
		t.Errorf("nothing of that name is lost: %v, %q", err, text)
	}
}
