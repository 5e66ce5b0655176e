package oci

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
)

// The process is found wherever it stands, and what follows it is not read.
func TestReadProcess(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write := func(text string) {
		if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want := &specs.Process{Args: []string{"a", `b"}`}, Env: []string{"A=" + strings.Repeat("x", 5000)}, Cwd: "/"}
	if err := writeSpec(dir, &specs.Spec{Version: "1.0", Process: want, Linux: &specs.Linux{}}); err != nil {
		t.Fatal(err)
	}
	if got, err := readProcess[specs.Process](dir); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("of a bundle as we write it: %v, %v", got, err)
	}
	for _, text := range []string{
		`{"process": {"terminal": true}, "linux": broken`,
		`{"linux": {"process": {"terminal": false}, "list": [1, {"process": 2}]}, "process": {"terminal": true}}`,
	} {
		write(text)
		if got, err := readProcess[struct{ Terminal bool }](dir); err != nil || !got.Terminal {
			t.Errorf("%s: %v, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "{", `{}`, `{"linux": {"process": {}}}`, `{"linux": }`, `{"process": 3}`, `{"process": {"terminal"`, `[]`} {
		write(text)
		if got, err := readProcess[specs.Process](dir); err == nil || !strings.Contains(err.Error(), "config.json") {
			t.Errorf("%q: %v, %v", text, got, err)
		} else if text == "" && !errors.Is(err, io.EOF) {
			t.Errorf("of an empty file: %v", err)
		}
	}
	for what, make := range map[string]func(config string) error{
		"named pipe":     func(p string) error { return unix.Mkfifo(p, 0o600) },
		"link":           func(p string) error { return os.Symlink("/dev/zero", p) },
		"file of 10 TiB": func(p string) error { return errors.Join(os.WriteFile(p, nil, 0o600), os.Truncate(p, 10<<40)) },
	} {
		dir := t.TempDir()
		if err := make(filepath.Join(dir, "config.json")); err != nil {
			t.Fatal(err)
		}
		_, one := readProcess[specs.Process](dir)
		_, all := ReadSpec[specs.Spec](dir)
		if !errors.Is(one, fault.Invalid) || !errors.Is(all, fault.Invalid) {
			t.Errorf("of a %s: %v, and of all: %v", what, one, all)
		}
	}
	if _, err := readProcess[specs.Process](t.TempDir()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without a bundle: %v", err)
	}
}

// Nothing is written that cannot be read back, however JSON encodes it.
func TestBundleIsNeverLongerThanWhatIsRead(t *testing.T) {
	t.Parallel()
	value := func(c string) string { return "A=" + strings.Repeat(c, 100_000) }
	for name, c := range map[string]struct {
		spec *specs.Spec
		ok   bool
	}{
		"6 MiB of text":               {&specs.Spec{Process: &specs.Process{Env: slices.Repeat([]string{value("x")}, 62)}}, true},
		"6 MiB of characters of HTML": {&specs.Spec{Process: &specs.Process{Env: slices.Repeat([]string{value("<")}, 62)}}, true},
		"2 MiB of control characters": {&specs.Spec{Process: &specs.Process{Env: slices.Repeat([]string{value("\x01")}, 20)}}, true},
		"6 MiB of control characters": {&specs.Spec{Process: &specs.Process{Env: slices.Repeat([]string{value("\x01")}, 62)}}, false},
		"arguments":                   {&specs.Spec{Process: &specs.Process{Args: slices.Repeat([]string{value("\x01")}, 62)}}, false},
		"annotations":                 {&specs.Spec{Annotations: map[string]string{"a": strings.Repeat("x", maxSpec)}}, false},
		"mounts":                      {&specs.Spec{Mounts: slices.Repeat([]specs.Mount{{Destination: value("x"), Source: value("y")}}, 90)}, false},
		"devices":                     {&specs.Spec{Linux: &specs.Linux{Devices: slices.Repeat([]specs.LinuxDevice{{Path: value("x")}}, 200)}}, false},
	} {
		dir := t.TempDir()
		err := writeSpec(dir, c.spec)
		if (err == nil) != c.ok || err != nil && !errors.Is(err, fault.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
		got, err := ReadSpec[specs.Spec](dir)
		if (err == nil) != c.ok {
			t.Errorf("%s, read back: %v", name, err)
		}
		if c.ok && !reflect.DeepEqual(got, c.spec) {
			t.Errorf("%s: changed by being written and read", name)
		}
	}
}

func TestBundleOfAnExitedContainerKeepsWhatIsRead(t *testing.T) {
	t.Parallel()
	spec := func(change func(*specs.Spec)) *specs.Spec {
		s := &specs.Spec{
			Process:     &specs.Process{Args: []string{"/program", "x"}, Env: []string{"PATH=/bin", "A=1"}, Cwd: "/srv"},
			Mounts:      []specs.Mount{{Destination: "/d", Source: "/s"}},
			Annotations: map[string]string{"k": "v"},
			Linux: &specs.Linux{
				CgroupsPath: "/c", Namespaces: []specs.LinuxNamespace{{Type: specs.NetworkNamespace, Path: "/n"}},
				Devices: []specs.LinuxDevice{{Path: "/dev/d"}}, MaskedPaths: []string{"/m"}, Seccomp: &specs.LinuxSeccomp{},
			},
		}
		change(s)
		return s
	}
	as := func(*specs.Spec) {}
	command := func(s *specs.Spec) {
		s.Process.Args = []string{"/program", strings.Repeat("x", 1<<20)}
		s.Process.Env = append(s.Process.Env, "B="+strings.Repeat("y", 1<<20))
	}
	noCommand := func(s *specs.Spec) { s.Process.Args, s.Process.Env = []string{"/program"}, []string{"PATH=/bin"} }
	noLists := func(s *specs.Spec) {
		s.Mounts, s.Linux.Devices, s.Linux.MaskedPaths, s.Linux.Seccomp = nil, nil, nil, nil
	}
	hooked := func(s *specs.Spec) { command(s); s.Hooks = &specs.Hooks{Poststop: []specs.Hook{{Path: "/hook"}}} }
	for name, c := range map[string]struct{ change, want func(*specs.Spec) }{
		"small":               {as, as},
		"long command":        {command, noCommand},
		"with poststop hooks": {hooked, hooked},
		"services as variables": {func(s *specs.Spec) {
			for i := range 6 * 600 {
				s.Process.Env = append(s.Process.Env, fmt.Sprintf("SERVICE_%d_PORT_80_TCP_ADDR=tcp://10.0.0.1:80/%040d", i, i))
			}
		}, noCommand},
		"many mounts": {func(s *specs.Spec) { s.Mounts = slices.Repeat(s.Mounts, 10_000) }, func(s *specs.Spec) {
			noCommand(s)
			noLists(s)
		}},
		"long annotation and name of the program": {func(s *specs.Spec) {
			s.Annotations["long"] = strings.Repeat("\x01", 1<<20)
			s.Process.Args[0] = strings.Repeat("é", 64<<10)
		}, func(s *specs.Spec) {
			noCommand(s)
			noLists(s)
			s.Annotations, s.Process.Env, s.Process.Args[0] = nil, nil, strings.Repeat("é", 128)
		}},
	} {
		dir := t.TempDir()
		if err := writeSpec(dir, spec(c.change)); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := ShortenSpec(dir); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		if got, err := ReadSpec[specs.Spec](dir); err != nil || !reflect.DeepEqual(got, spec(c.want)) {
			t.Errorf("%s: got %+v, %v", name, got, err)
		}
	}
	if err := ShortenSpec(t.TempDir()); err != nil {
		t.Errorf("without a bundle: %v", err)
	}
}

// Earlier versions wrote six bytes for each of a request's 16 MiB.
func TestBundlesOfEarlierVersionsAreShortened(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	text := `{"process": {"args": ["/program"], "env": ["A=` + strings.Repeat(`\u0001`, 94_000_000/6) + `"]}}`
	if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := ShortenSpec(dir); err != nil {
		t.Fatal(err)
	}
	if spec, err := ReadSpec[specs.Spec](dir); err != nil || spec.Process.Args[0] != "/program" || len(spec.Process.Env) != 0 {
		t.Errorf("got %+v, %v", spec, err)
	}
}

// Freeing space needs no free space.
func TestBundleIsShortenedOnAFullDisk(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=2m,mode=700"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	if err := writeSpec(dir, &specs.Spec{Process: &specs.Process{Args: []string{"/program"}, Env: []string{"A=" + strings.Repeat("x", 1<<20)}}, Hostname: "h"}); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "rest"), make([]byte, 2<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("the disk is not full: %v", err)
	}
	if err := ShortenSpec(dir); err != nil {
		t.Fatal(err)
	}
	if spec, err := ReadSpec[specs.Spec](dir); err != nil || spec.Hostname != "h" || len(spec.Process.Env) != 0 {
		t.Errorf("got %+v, %v", spec, err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 2 {
		t.Errorf("left %v, %v", left, err)
	}
}

func TestSpecSizeIsThatOfItsTexts(t *testing.T) {
	t.Parallel()
	spec := &specs.Spec{
		Process:     &specs.Process{Args: []string{"a\x01\"", "<\\>"}, Env: []string{"A=é\t\x7f", "B=" + strings.Repeat("x", 10_000)}},
		Mounts:      []specs.Mount{{Destination: "/d", Source: "/s", Type: "bind", Options: []string{"ro", "rbind"}}},
		Annotations: map[string]string{"k": "v\n"},
	}
	text, err := encode(spec)
	if err != nil {
		t.Fatal(err)
	}
	const names = 300 // of the fields
	if size := SpecSize(spec); size > len(text) || size < len(text)-names {
		t.Errorf("%d of %d bytes", size, len(text))
	}
}

// Everything that the request, the image, CDI, plugins and the node put into a
// spec is checked where it is written.
func TestFinalSpecIsOneThatTheKernelTakes(t *testing.T) {
	t.Parallel()
	long := "/" + strings.Repeat("x", unix.PathMax)
	for words, s := range map[string]*specs.Spec{
		`"BIG" has`:                       {Process: &specs.Process{Env: []string{"BIG=" + strings.Repeat("x", 1<<20)}}},
		`"LATIN" is not`:                  {Process: &specs.Process{Env: []string{"LATIN=\xe9"}}},
		"argument 1":                      {Process: &specs.Process{Args: []string{"a", strings.Repeat("x", 1<<20)}}},
		"working directory":               {Process: &specs.Process{Cwd: long}},
		"mount path":                      {Mounts: []specs.Mount{{Destination: "/ok", Source: long}}},
		"masked path":                     {Linux: &specs.Linux{MaskedPaths: []string{long}}},
		"read-only path":                  {Linux: &specs.Linux{ReadonlyPaths: []string{long}}},
		"device path":                     {Linux: &specs.Linux{Devices: []specs.LinuxDevice{{Path: long}}}},
		"process.args[1] ":                {Process: &specs.Process{Args: []string{"cat", "/\xe9"}}},
		"process.cwd ":                    {Process: &specs.Process{Cwd: "/\xe9"}},
		"root.path ":                      {Root: &specs.Root{Path: "/\xe9"}},
		"hostname ":                       {Hostname: "\xe9"},
		"mounts[1].source ":               {Mounts: []specs.Mount{{Source: "/\u00e9\ufffd\\ufffd"}, {Source: "/\xe9"}}},
		`annotations["a"] `:               {Annotations: map[string]string{"a": "\xe9"}},
		`annotations["\xe9"] `:            {Annotations: map[string]string{"\xe9": "a"}},
		"linux.devices[0].path ":          {Linux: &specs.Linux{Devices: []specs.LinuxDevice{{Path: "/dev/\xe9"}}}},
		"hooks.createRuntime[0].args[0] ": {Hooks: &specs.Hooks{CreateRuntime: []specs.Hook{{Args: []string{"\xe9"}}}}},
		"linux.resources.unified[\"memory.high\"]": {Linux: &specs.Linux{Resources: &specs.LinuxResources{Unified: map[string]string{"memory.high": "\xe9"}}}},
	} {
		err := errors.Join(checkProcess(s.Process), checkPaths(s), checkText(s))
		if !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), words) || len(err.Error()) > 300 {
			t.Errorf("%s: %.400v", words, err)
		}
	}
}

// A reader of the process alone gets what a reader of the whole bundle gets,
// however the document is written.
func FuzzReadProcess(f *testing.F) {
	for _, text := range []string{
		`{"process":{"args":["a","b\"}"],"cwd":"/","user":{"uid":7}},"linux":{}}`, `{"linux":{"process":{"cwd":"/x"}},"process":null}`,
		`{"process":{"terminal":1}}`, `{"process":{"cwd":"\ud800"}`, `[{"process":{}}]`, `{"process"`, "null", "",
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "config.json"), text, 0o600); err != nil {
			t.Fatal(err)
		}
		_, partErr := readProcess[specs.Process](dir)
		whole, err := ReadSpec[specs.Spec](dir)
		if err != nil || whole.Process == nil {
			return
		}
		if bytes.Count(text, []byte(`"process"`)) == 1 && partErr != nil {
			t.Errorf("%s: %v", text, partErr)
		}
		if err := writeSpec(dir, whole); err != nil {
			t.Fatal(err)
		}
		process, err := readProcess[specs.Process](dir)
		want, _ := json.Marshal(whole.Process)
		if got, _ := json.Marshal(process); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: process %s, want %s, %v", text, got, want, err)
		}
	})
}
