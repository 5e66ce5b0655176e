package config

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/oci"
)

// node is an /etc/crius in a temporary directory.
type node struct {
	t    *testing.T
	file string
	dir  string
}

func newNode(t *testing.T) node {
	t.Helper()
	etc := t.TempDir()
	n := node{t: t, file: filepath.Join(etc, "crius.toml"), dir: filepath.Join(etc, "crius.toml.d")}
	if err := os.Mkdir(n.dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return n
}

func (n node) write(path, text string) {
	n.t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		n.t.Fatal(err)
	}
}

func (n node) dropIn(name, text string) { n.t.Helper(); n.write(filepath.Join(n.dir, name), text) }

func (n node) load(args ...string) (*Loaded, error) {
	n.t.Helper()
	set := pflag.NewFlagSet("test", pflag.ContinueOnError)
	flags := AddFlags(set)
	if err := set.Parse(args); err != nil {
		n.t.Fatal(err)
	}
	return Load(Sources{File: n.file, Dir: n.dir, Flags: flags})
}

func (n node) mustLoad(args ...string) *Loaded {
	n.t.Helper()
	loaded, err := n.load(args...)
	if err != nil {
		n.t.Fatal(err)
	}
	return loaded
}

func equal(t *testing.T, what string, got, want any) {
	t.Helper()
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%s is %#v, want %#v", what, got, want)
	}
}

func TestEmptyConfigurationMeansDefaults(t *testing.T) {
	loaded, err := Load(Sources{File: "/nonexistent/crius.toml", Dir: "/nonexistent/crius.toml.d"})
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "configuration", loaded.Config, Default())
	equal(t, "origin", loaded.Origin("api.listen"), "default")
}

func TestLaterSourcesWin(t *testing.T) {
	n := newNode(t)
	n.write(n.file, `
root = "/srv/crius"
log_level = "debug"
[api]
listen = "/run/file.sock"
socket_mode = 0o600
[network]
timeout = "10s"
plugin_dirs = ["/a", "/b"]
[pod]
read_only = true
`)
	n.dropIn("20-later.toml", "[network]\ntimeout = \"30s\"\nplugin_dirs = [\"/c\"]")
	n.dropIn("10-sooner.toml", "[network]\ntimeout = \"20s\"\n[api]\nlisten = \"/run/dropin.sock\"")
	n.dropIn("30-editor.toml~", "this is not TOML")
	n.dropIn(".31-hidden.toml", "this is not TOML")
	if err := os.Mkdir(filepath.Join(n.dir, "32-dir.toml"), 0o700); err != nil {
		t.Fatal(err)
	}

	loaded := n.mustLoad("--log-level=warn", "--pod-shm-size", "0x1000")
	c := loaded.Config
	equal(t, "root", c.Root, "/srv/crius")
	equal(t, "listen", c.API.Listen, "/run/dropin.sock")
	equal(t, "socket mode", c.API.SocketMode, fs.FileMode(0o600))
	equal(t, "time-out", c.Network.Timeout, 30*time.Second)
	equal(t, "plugin directories", c.Network.PluginDirs, []string{"/c"})
	equal(t, "log level", c.LogLevel, "warn")
	equal(t, "shm size", c.Pod.ShmSize, int64(0x1000))
	equal(t, "read only", c.Pod.ReadOnly, true)
	equal(t, "untouched key", c.Image, Default().Image)

	for key, want := range map[string]string{
		"root":                "file " + n.file + ":2",
		"api.listen":          "drop-in " + n.dir + "/10-sooner.toml:4",
		"network.timeout":     "drop-in " + n.dir + "/20-later.toml:2",
		"log_level":           "flag --log-level",
		"pod.shm_size":        "flag --pod-shm-size",
		"api.socket_mode":     "file " + n.file + ":6",
		"network.plugin_dirs": "drop-in " + n.dir + "/20-later.toml:3",
		"run_root":            "default",
	} {
		equal(t, "origin of "+key, loaded.Origin(key), want)
	}
}

func TestHandlersMergeKeyByKey(t *testing.T) {
	n := newNode(t)
	n.write(n.file, `
[runtime]
default_handler = "fast"
[runtime.handlers.runc]
path = "/opt/runc"
allowed_annotations = ["a", "b"]
[runtime.handlers.fast]
`)
	n.dropIn("10.toml", `
runtime.handlers.runc.create_timeout = "30s"
runtime.handlers.fast = { path = "crun", privileged_without_host_devices = true }
`)
	n.dropIn("20.toml", "[runtime.handlers.runc]\nallowed_annotations = []")

	want := map[string]oci.Handler{
		"crun": oci.DefaultHandlerConfig("crun"),
		"runc": oci.DefaultHandlerConfig("runc"),
		"fast": oci.DefaultHandlerConfig("fast"),
	}
	runc, fast := want["runc"], want["fast"]
	runc.Path, runc.CreateTimeout, runc.AllowedAnnotations = "/opt/runc", 30*time.Second, []string{}
	fast.Path, fast.PrivilegedWithoutHostDevices = "crun", true
	want["runc"], want["fast"] = runc, fast

	loaded := n.mustLoad()
	equal(t, "handlers", loaded.Config.Runtime.Handlers, want)
	equal(t, "origin", loaded.Origin("runtime.handlers.runc.create_timeout"), "drop-in "+n.dir+"/10.toml:2")
	equal(t, "origin in an inline table", loaded.Origin("runtime.handlers.fast.path"), "drop-in "+n.dir+"/10.toml:3")
	equal(t, "origin of a default", loaded.Origin("runtime.handlers.fast.type"), "default")
}

// TestUnknownKeys covers containerd#11918, where an old configuration was silently ignored.
func TestUnknownKeys(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{"lisen = 1", "FILE:1: lisen: unknown key; did you mean api.listen?"},
		{"[api]\n\nlisen = '/x'", "FILE:3: api.lisen: unknown key; did you mean api.listen?"},
		{"[api]\nSocket-Mode = 1", "FILE:2: api.Socket-Mode: unknown key; did you mean api.socket_mode?"},
		{"[apy]\nlisten = '/x'", "FILE:1: apy: unknown key; did you mean api?"},
		{"cgroup_driver = 'systemd'", "FILE:1: cgroup_driver: unknown key; did you mean runtime.cgroup_driver?"},
		{"[runtime.handlers.kata]\nroot_dir = '/x'", "FILE:2: runtime.handlers.kata.root_dir: unknown key; did you mean runtime.handlers.kata.root?"},
		{"[runtime]\npath = '/x'", "FILE:2: runtime.path: unknown key; did you mean runtime.handlers.NAME.path?"},
		{"[image]\ndefault_transport = 'docker://'", "FILE:2: image.default_transport: unknown key; it was removed and never had an effect: delete the line"},
		{"[plugins.'io.containerd.grpc.v1.cri']\nx = 1", "FILE: plugins: unknown key; `crius config --default` lists all keys"},
		{"'state dir' = '/x'", "FILE:1: \"state dir\": unknown key; `crius config --default` lists all keys"},
		{"[pod]\nstate_dir = '/x'\nrun_dir = '/x'", "FILE:2: pod.state_dir: unknown key; `crius config --default` lists all keys"},
	} {
		n := newNode(t)
		n.write(n.file, c.text)
		_, err := n.load()
		if err == nil {
			t.Errorf("%q is accepted", c.text)
			continue
		}
		first, _, _ := strings.Cut(strings.ReplaceAll(err.Error(), n.file, "FILE"), "\n")
		equal(t, c.text, first, c.want)
		if !errors.Is(err, fault.Invalid) {
			t.Errorf("%q: %v is no fault.Invalid", c.text, err)
		}
	}
}

func TestWrongTypes(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{"root = 1", "FILE:1: root: must be of type string, got 1"},
		{"root = ['/x']", "FILE:1: root: must be of type string, got a list"},
		{"root = 1979-05-27", "FILE:1: root: must be of type string, got a date or time"},
		{"root = { a = 1 }", "FILE:1: root: must be of type string, got a table"},
		{"[[root]]", "FILE:1: root: must be of type string, got an array of tables"},
		{"api = '/x'", `FILE:1: api: must be a table ([api]), got the string "/x"`},
		{"[[api]]\nlisten='/x'", `FILE:1: api: must be a table ([api]), got an array of tables`},
		{"runtime.handlers = ['runc']", `FILE:1: runtime.handlers: must be a table ([runtime.handlers]), got a list`},
		{"[runtime.handlers]\nrunc = '/x'", `FILE:2: runtime.handlers.runc: must be a table ([runtime.handlers.runc]), got the string "/x"`},
		{"[pod]\nread_only = 'yes'", `FILE:2: pod.read_only: must be of type boolean, got the string "yes"`},
		{"[pod]\npids_limit = 1.5", `FILE:2: pod.pids_limit: must be of type integer, got 1.5`},
		{"[api]\nmax_message_size = '16M'", `FILE:2: api.max_message_size: must be of type integer, got the string "16M"`},
		{"[network]\ntimeout = 5", `FILE:2: network.timeout: must be a duration in quotes such as "5m" or "1m30s", got 5`},
		{"[network]\ntimeout = '5 minutes'", `FILE:2: network.timeout: must be a duration such as "5m" or "1m30s", got "5 minutes"`},
		{"[network]\nplugin_dirs = '/x'", `FILE:2: network.plugin_dirs: must be a list of strings, got the string "/x"`},
		{"[network]\nplugin_dirs = ['/x', 1]", `FILE:2: network.plugin_dirs: list items must be strings, got 1`},
		{"[api]\nsocket_mode = 660", `FILE:2: api.socket_mode: must be permission bits such as 0o660 (octal numbers begin with 0o), got 660`},
		{"[api]\nsocket_mode = -1", `FILE:2: api.socket_mode: must be permission bits such as 0o660 (octal numbers begin with 0o), got -1`},
		{"[api]\nsocket_mode = 'rw-rw----'", `FILE:2: api.socket_mode: must be permission bits such as 0o660, got "rw-rw----"`},
		{"[api]\nsocket_mode = true", `FILE:2: api.socket_mode: must be permission bits such as 0o660, got true`},
		{"root = \"\\u001b[2J\"\n[api]\nsocket_mode = 9.5", `FILE:3: api.socket_mode: must be permission bits such as 0o660, got 9.5`},
		{"root = '/x'\nroot = '/y'", `FILE:2: Key 'root' has already been defined.`},
		{"root = ", `FILE:1: expected value but found '\n' instead`},
	} {
		n := newNode(t)
		n.write(n.file, c.text+"\n")
		_, err := n.load()
		if err == nil {
			t.Errorf("%q is accepted", c.text)
			continue
		}
		first, _, _ := strings.Cut(strings.ReplaceAll(err.Error(), n.file, "FILE"), "\n")
		equal(t, c.text, first, c.want)
	}
}

func TestModesAndDurations(t *testing.T) {
	for text, want := range map[string]fs.FileMode{
		`0o660`: 0o660, `"0660"`: 0o660, `"660"`: 0o660, `"0o600"`: 0o600, `0`: 0, `0o777`: 0o777,
	} {
		n := newNode(t)
		n.write(n.file, "api.socket_mode = "+text)
		equal(t, text, n.mustLoad().Config.API.SocketMode, want)
	}
	for text, want := range map[string]time.Duration{
		"5m": 5 * time.Minute, "1m30s": 90 * time.Second, "0": 0, "1h": time.Hour, "250ms": 250 * time.Millisecond,
	} {
		n := newNode(t)
		n.write(n.file, "image.pull_timeout = '"+text+"'")
		equal(t, text, n.mustLoad().Config.Image.PullTimeout, want)
	}
}

func TestAllProblemsAtOnce(t *testing.T) {
	n := newNode(t)
	n.write(n.file, "[api]\nlistn = 1\n[network]\ntimeout = 5\n[runtime]\ncgroup_driver = 'cgroupv2'\ndefault_handler = 'kata'\n")
	n.dropIn("10.toml", "root = 'var/lib'\n")
	n.dropIn("20.toml", "[")
	_, err := n.load("--run-root=run")
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		t.Fatalf("%v is not a list", err)
	}
	var got []string
	for _, problem := range joined.Unwrap() {
		got = append(got, strings.ReplaceAll(strings.ReplaceAll(problem.Error(), n.dir, "DIR"), n.file, "FILE"))
	}
	equal(t, "problems", got, []string{
		"FILE:2: api.listn: unknown key; did you mean api.listen?",
		`FILE:4: network.timeout: must be a duration in quotes such as "5m" or "1m30s", got 5`,
		"DIR/20.toml:1: unexpected end of table name (table names cannot be empty)",
		`DIR/10.toml:1: root: must be an absolute path, got "var/lib"`,
		`--run-root: run_root: must be an absolute path, got "run"`,
		`FILE:6: runtime.cgroup_driver: must be one of systemd, cgroupfs, got "cgroupv2"`,
		`FILE:7: runtime.default_handler: unknown handler "kata": add [runtime.handlers.kata] or choose one of crun, runc`,
	})
}

func TestNamedSourcesMustExist(t *testing.T) {
	n := newNode(t)
	for what, s := range map[string]Sources{
		"file":                {File: n.file, FileNamed: true},
		"directory":           {Dir: n.dir + "x", DirNamed: true},
		"directory is a file": {Dir: os.Args[0]},
		"file is a directory": {File: n.dir},
	} {
		if _, err := Load(s); err == nil {
			t.Errorf("%s: no error", what)
		}
	}
	n.dropIn("10.toml", "")
	if err := os.Remove(filepath.Join(n.dir, "10.toml")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("gone", filepath.Join(n.dir, "10.toml")); err != nil {
		t.Fatal(err)
	}
	if _, err := n.load(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a drop-in that points nowhere: %v", err)
	}
}

func TestDefaultsAreNotShared(t *testing.T) {
	n := newNode(t)
	n.write(n.file, "[network]\nplugin_dirs = ['/mine']\n[runtime.handlers.runc]\npath = '/mine'")
	n.mustLoad()
	equal(t, "default plugin directories", Default().Network.PluginDirs[0], "/opt/cni/bin")
	equal(t, "default handler", Default().Runtime.Handlers["runc"].Path, "runc")
}

// FuzzLoad checks that any file is either refused with a fault.Invalid or gives a
// configuration that can be written and read back unchanged.
func FuzzLoad(f *testing.F) {
	for _, seed := range []string{
		"", "root = '/x'", "[api]\nlisten = \"/a\\u0007\"", "a.b.c = 1", "[runtime.handlers.'x y']\npath = 'z'",
		"[runtime.handlers.k8s]\nallowed_annotations = ['a', \"\\\"\"]", "[[runtime]]", "runtime = { handlers = { x = {} } }",
		"\"\" = 1", "[pod]\nshm_size = 9223372036854775807", "network.timeout = '1h2m3.5s'", "pod.default_env = ['A=\\n']",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		n := newNode(t)
		n.write(n.file, text)
		first, err := n.load()
		if err != nil {
			if !errors.Is(err, fault.Invalid) {
				t.Fatalf("%q: %v is no fault.Invalid", text, err)
			}
			return
		}
		var written strings.Builder
		if err := first.Write(&written); err != nil {
			t.Fatal(err)
		}
		n.write(n.file, written.String())
		second, err := n.load()
		if err != nil {
			t.Fatalf("%q was written as %q: %v", text, written.String(), err)
		}
		if !reflect.DeepEqual(normal(first.Config), normal(second.Config)) {
			t.Fatalf("%q was written as %q and read as %+v", text, written.String(), second.Config)
		}
	})
}

// normal formats a configuration so that an empty list equals none.
func normal(c Config) string {
	var b strings.Builder
	for k := range c.keys() {
		b.WriteString(k.Path + "=" + k.TOML() + "\n")
	}
	return b.String()
}

// A server that reloads must not wait for the other end of a pipe, nor read a device to its end.
func TestOnlyRegularFilesAreRead(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	pipe := filepath.Join(dir, "pipe.toml")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	large := filepath.Join(t.TempDir(), "large.toml")
	if err := errors.Join(os.WriteFile(large, nil, 0o600), os.Truncate(large, maxFile+1)); err != nil {
		t.Fatal(err)
	}
	for _, s := range []Sources{{File: pipe}, {Dir: dir}, {File: "/dev/zero"}, {File: large}} {
		if _, err := Load(s); !errors.Is(err, fault.Invalid) {
			t.Errorf("%+v: %v", s, err)
		}
	}
}
