package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/crius-run/crius/cmd/crius/config"
	"github.com/crius-run/crius/internal/logx"
	"github.com/crius-run/crius/network"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/pod"
	"github.com/crius-run/crius/server"
	"github.com/crius-run/crius/storage"
)

// A reload applies exactly the options that are declared live: their consumers have the new
// value, and no consumer gets a new value of any other option.
func TestReloadAppliesLiveOptionsAlone(t *testing.T) {
	t.Parallel()
	for _, section := range config.Schema() {
		for _, key := range section.Keys {
			t.Run(key.Path, func(t *testing.T) {
				t.Parallel()
				newReloading(t).change(key)
			})
		}
	}
}

// reloading is a server's configuration with the consumers of live options.
type reloading struct {
	t     *testing.T
	file  string
	dir   string // has files that options name
	table *oci.Table
	given oci.Config // last configuration that the table was given
	live  noted
	*settings
}

// noted are the live options that the consumers have been given.
type noted struct {
	audit, auditFile string
	image            storage.Config
	pod              pod.Options
	network          network.Config
	idle             time.Duration
	most, mostEach   int
}

type (
	notingImages struct{ *noted }
	notingEngine struct{ *noted }
)

func (n *noted) Set(level, file string)       { n.audit, n.auditFile = level, file }
func (n *noted) Configure(cfg network.Config) { n.network = cfg }

func (n *noted) Bound(idle time.Duration, most, mostEach int) {
	n.idle, n.most, n.mostEach = idle, most, mostEach
}

func (n notingImages) Prepare(cfg storage.Config) (func(), error) {
	return func() { n.image = cfg }, nil
}

func (n notingEngine) Prepare(_ context.Context, cfg pod.Options) (func(), error) {
	return func() { n.pod = cfg }, nil
}

// Reload notes the configuration and passes it to the table.
func (r *reloading) Reload(cfg oci.Config) error {
	r.given = cfg
	return r.table.Reload(cfg)
}

func newReloading(t *testing.T) *reloading {
	t.Helper()
	r := &reloading{t: t, file: write(t, "crius.toml", ""), dir: t.TempDir()}
	r.write("crius-conmon", "")
	r.write("crius-conmon-shim", "")
	r.write("features.json", `{"ociVersionMin": "1.0.0", "ociVersionMax": "1.2.0"}`)
	r.write("spec.json", "{}")
	r.write("seccomp.json", `{"defaultAction": "SCMP_ACT_ALLOW"}`)
	r.write("crio/10-own.conf", "[crio.runtime.runtimes.installed]\nruntime_path = '/opt/installed'\n")
	r.settings = &settings{
		load:  func() (*config.Loaded, error) { return config.Load(config.Sources{File: r.file}) },
		level: new(slog.LevelVar),
	}
	r.configure("")
	var err error
	if r.inForce, err = r.load(); err != nil {
		t.Fatal(err)
	}
	r.follow(t.Context(), &consumers{records: &r.live, images: notingImages{&r.live}, engine: notingEngine{&r.live}, network: &r.live, sessions: &r.live})
	r.given = r.inForce.Config.Runtime
	if r.table, err = oci.NewTable(r.given, r.dir); err != nil {
		t.Fatal(err)
	}
	return r
}

// write creates an executable file.
func (r *reloading) write(name, text string) {
	r.t.Helper()
	path := filepath.Join(r.dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		r.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o700); err != nil {
		r.t.Fatal(err)
	}
}

// configure writes the configuration file with an additional setting.
func (r *reloading) configure(setting string) {
	r.t.Helper()
	text := fmt.Sprintf("runtime.workloads.own.activation_annotation = 'own'\n%s\n", setting)
	if !strings.HasPrefix(setting, "runtime.monitor =") {
		text += fmt.Sprintf("runtime.monitor = %q\n", filepath.Join(r.dir, "crius-conmon"))
	}
	if strings.Contains(setting, "activation_annotation") {
		_, text, _ = strings.Cut(text, "\n")
	}
	if err := os.WriteFile(r.file, []byte(text), 0o600); err != nil {
		r.t.Fatal(err)
	}
}

// change reloads a configuration in which only the key has another value, and checks
// whether that took effect.
func (r *reloading) change(key config.Key) {
	r.t.Helper()
	path := strings.NewReplacer("handlers.NAME", "handlers.runc", "workloads.NAME", "workloads.own").Replace(key.Path)
	before := r.inForce
	was := r.applied()
	r.configure(path + " = " + r.another(key))
	wanted, err := r.load()
	if err != nil {
		r.t.Fatalf("give it another example in this test: %v", err)
	}
	result, err := r.apply(r.t.Context(), wanted, r)
	if err != nil {
		r.t.Fatal(err)
	}
	if key.Live() == (key.WhyRestart() != "") {
		r.t.Errorf("said to be live: %t, and to need a restart because %q", key.Live(), key.WhyRestart())
	}
	if key.Live() {
		if !slices.Contains(result.Changed, path) || len(result.Later) > 0 {
			r.t.Errorf("said to be live, but the reload says %+v", result)
		}
		if reflect.DeepEqual(r.applied(), was) || !r.reached(path, wanted.Config) {
			r.t.Error("said to be live, but the new value has not reached its consumer")
		}
		return
	}
	if len(result.Changed) > 0 || !slices.Equal(result.Later, []string{path}) {
		r.t.Errorf("said to need a restart, but the reload says %+v", result)
	}
	if !reflect.DeepEqual(r.applied(), was) || !reflect.DeepEqual(r.given, before.Config.Runtime) || !reflect.DeepEqual(r.loaded().Config, before.Config) {
		r.t.Error("said to need a restart, but the reload has applied it")
	}
}

// applied returns the values that the consumers of live options have.
func (r *reloading) applied() []any {
	all := []any{r.level.Level(), r.table.Default(), r.live, r.given, r.loaded().Config.Metrics}
	for _, name := range r.table.Names() {
		all = append(all, name, r.handler(name))
	}
	return all
}

func (r *reloading) handler(name string) oci.Handler {
	runtime, err := r.table.Get(name)
	if err != nil {
		r.t.Fatal(err)
	}
	return runtime.Handler()
}

// reached reports whether the consumer of a live option has the wanted value.
func (r *reloading) reached(path string, wanted config.Config) bool {
	section, name := path[:strings.LastIndexByte(path, '.')+1], path[strings.LastIndexByte(path, '.')+1:]
	want := func(has, wanted any) bool { return reflect.DeepEqual(option(has, name), option(wanted, name)) }
	switch section {
	case "":
		level, err := logx.Level(wanted.LogLevel)
		return err == nil && r.level.Level() == level
	case "api.":
		has := server.Config{Audit: r.live.audit, AuditFile: r.live.auditFile, StreamIdleTimeout: r.live.idle, StreamMaxSessions: r.live.most, StreamMaxSessionsEach: r.live.mostEach}
		return want(has, wanted.API)
	case "metrics.":
		return want(r.loaded().Config.Metrics, wanted.Metrics)
	case "image.":
		return want(r.live.image, wanted.Image) && (name != "volumes" || r.live.pod.ImageVolumes == wanted.Image.Volumes)
	case "network.":
		return want(r.live.network, wanted.Network)
	case "pod.":
		return want(r.live.pod.Config, wanted.Pod)
	case "runtime.workloads.own.", "runtime.workloads.own.resources.":
		return reflect.DeepEqual(r.live.pod.Workloads, wanted.Runtime.Workloads)
	case "runtime.handlers.runc.":
		return want(r.handler("runc"), wanted.Runtime.Handlers["runc"])
	}
	switch path {
	case "runtime.hooks_dir":
		return slices.Equal(r.live.pod.HookDirs, wanted.Runtime.HooksDir)
	case "runtime.blockio_config_file":
		return r.live.pod.Classes.BlockIOFile == wanted.Runtime.BlockIOFile
	case "runtime.default_handler":
		return r.table.Default() == wanted.Runtime.DefaultHandler
	case "runtime.crio_handlers_dir":
		return slices.Contains(r.table.Names(), "installed")
	}
	return section == "runtime." && want(r.given, wanted.Runtime)
}

// option returns the value of the option of this name in a table; nil: it has none.
func option(table any, name string) any {
	has := reflect.ValueOf(table)
	for i := range has.NumField() {
		if has.Type().Field(i).Tag.Get("toml") == name {
			return has.Field(i).Interface()
		}
	}
	return nil
}

// another returns a value of the key that is not its default.
func (r *reloading) another(key config.Key) string {
	file := func(name string) string { return strconv.Quote(filepath.Join(r.dir, name)) }
	examples := map[string]string{
		"api.runtime_version":                        `"1.2.3"`,
		"api.tls_cipher_suites":                      `["TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256"]`,
		"pod.additional_devices":                     `["/dev/fuse"]`,
		"pod.default_capabilities":                   `["KILL"]`,
		"pod.default_sysctls":                        `["net.ipv4.ip_forward=1"]`,
		"pod.allowed_ulimits":                        `["nofile=4096"]`,
		"pod.default_ulimits":                        `["nofile=1024:4096"]`,
		"pod.infra_cpuset":                           `"0-1"`,
		"runtime.backported_cves":                    `["CVE-2024-21626"]`,
		"runtime.container_log_max_size":             "65536",
		"runtime.crio_handlers_dir":                  file("crio"),
		"runtime.criu":                               `"/opt/criu/criu"`,
		"runtime.default_handler":                    `"crun"`,
		"runtime.handlers.NAME.base_runtime_spec":    file("spec.json"),
		"runtime.handlers.NAME.default_annotations":  `["a=b"]`,
		"runtime.handlers.NAME.exec_cpu_affinity":    `"first"`,
		"runtime.handlers.NAME.features":             file("features.json"),
		"runtime.handlers.NAME.options":              `["--debug"]`,
		"runtime.handlers.NAME.seccomp_profile":      file("seccomp.json"),
		"runtime.workloads.NAME.resources.cpuperiod": "1000",
		"runtime.workloads.NAME.resources.cpuset":    `"0"`,
		"runtime.workloads.NAME.resources.cpuquota":  "1000",
		"runtime.workloads.NAME.resources.cpushares": "2",
		"image.pull_cgroup":                          `"pulls.slice"`,
		"image.writable_layer_inodes":                "100",
		"image.writable_layer_size":                  "1048576",
		"tracing.endpoint":                           `"http://127.0.0.1:4317"`,
		"tuning.shared_cpuset":                       `"0-1"`,
	}
	if example, has := examples[key.Path]; has {
		return example
	}
	if choices := key.Choices(); choices != nil {
		i := slices.IndexFunc(choices, func(choice string) bool { return !strings.Contains(key.TOML(), choice) })
		if key.Type() == "string" {
			return strconv.Quote(choices[i])
		}
		return fmt.Sprintf("[%q]", choices[i])
	}
	switch key.Type() {
	case "boolean":
		return strconv.FormatBool(key.TOML() == "false")
	case "integer":
		n, err := strconv.ParseInt(key.TOML(), 10, 64)
		if err != nil {
			r.t.Fatal(err)
		}
		return strconv.FormatInt(n+1, 10)
	case "duration":
		return `"7s"`
	case "mode":
		return "0o640"
	case "list of strings":
		return `["/another"]`
	}
	return `"/another"`
}

// Flags outlast a reload, and so do drop-ins, whatever is changed in the main file. A file that
// cannot be read changes nothing.
func TestReloadKeepsTheOrderOfSources_crio_7586_crio_4694(t *testing.T) {
	t.Parallel()
	r := newReloading(t)
	set := pflag.NewFlagSet("test", pflag.ContinueOnError)
	flags := config.AddFlags(set)
	if err := set.Parse([]string{"--log-level", "error"}); err != nil {
		t.Fatal(err)
	}
	r.write("conf.d/10-handler.toml", "runtime.handlers.added.path = '/opt/added'\n")
	r.load = func() (*config.Loaded, error) {
		return config.Load(config.Sources{File: r.file, Dir: filepath.Join(r.dir, "conf.d"), Flags: flags})
	}
	reload := func() error {
		wanted, err := r.load()
		if err == nil {
			_, err = r.apply(r.t.Context(), wanted, r)
		}
		return err
	}
	for i, level := range []string{"warn", "debug"} {
		r.configure(fmt.Sprintf("log_level = %q\nruntime.handlers.main%d.path = '/opt/main'", level, i))
		if err := reload(); err != nil {
			t.Fatal(err)
		}
		names := r.table.Names()
		if r.level.Level() != slog.LevelError || !slices.Contains(names, "added") || !slices.Contains(names, fmt.Sprint("main", i)) {
			t.Errorf("%s: level %v, handlers %q", level, r.level.Level(), names)
		}
	}
	before := r.table.Names()
	r.write("conf.d/20-broken.toml", "log_level =")
	if err := reload(); err == nil || !slices.Equal(r.table.Names(), before) {
		t.Errorf("with a broken file: %v, handlers %q", err, r.table.Names())
	}
}

// readingEngine reads the settings while a reload prepares.
type readingEngine struct{ *settings }

func (e readingEngine) Prepare(context.Context, pod.Options) (func(), error) {
	e.loaded()
	return func() {}, nil
}

// Calls read the settings while a reload reads files and looks at the node; they do not wait for that.
func TestSettingsAreReadDuringReload(t *testing.T) {
	t.Parallel()
	r := newReloading(t)
	r.follow(t.Context(), &consumers{records: &r.live, images: notingImages{&r.live}, engine: readingEngine{r.settings}, network: &r.live, sessions: &r.live})
	r.configure("log_level = 'debug'")
	if _, err := r.reload(t.Context(), r.table); err != nil || r.loaded().Config.LogLevel != "debug" {
		t.Errorf("log level %q, %v", r.loaded().Config.LogLevel, err)
	}
}
