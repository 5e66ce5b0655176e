package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestInputHoldsOptionsAndFiles(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "a"), "content")
	path := filepath.Join(dir, "input.tar")
	if err := writeInput(path, options{Driver: "systemd", Handler: "crun", Focus: `a "b"`}, map[string]string{"guest": filepath.Join(dir, "a")}); err != nil {
		t.Fatal(err)
	}
	out := t.TempDir()
	if err := unpack(path, out); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"guest": "content", "options.json": `{"Driver":"systemd","Handler":"crun","Focus":"a \"b\""}`} {
		if got, err := os.ReadFile(filepath.Join(out, name)); err != nil || string(got) != want {
			t.Errorf("%s is %q, %v", name, got, err)
		}
	}
}

// A disk that was never written, and one that was written in part, do not count
// as results.
func TestResultsMustBeWhole(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "output.tar")
	write(t, path, strings.Repeat("\x00", 4096))
	if err := unpack(path, dir); err == nil {
		t.Error("an empty disk is taken for results")
	}
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	if err := w.WriteHeader(&tar.Header{Name: "out/report.json", Mode: 0o644, Size: 2000}); err != nil {
		t.Fatal(err)
	}
	w.Write(make([]byte, 1000))
	write(t, path, archive.String())
	if err := unpack(path, dir); err == nil || !strings.Contains(err.Error(), "cut off") {
		t.Errorf("a cut disk gives %v", err)
	}
}

const passed = `[{"SpecReports": [{"LeafNodeType": "It", "LeafNodeText": "runs", "State": "passed"}]}]`

func TestLeftoversFailTheNodeTest(t *testing.T) {
	for name, c := range map[string]struct {
		files map[string]string
		want  string // in the output, or in the error
	}{
		"clean":   {map[string]string{"report.json": passed, "left": "", "wrong": "", "crius.log": ""}, "x: 1 passed, 0 failed, 0 skipped"},
		"left":    {map[string]string{"report.json": passed, "left": "cgroup: /a\nfile: /b", "wrong": "", "crius.log": ""}, "cgroup: /a\n           file: /b"},
		"wrong":   {map[string]string{"report.json": passed, "left": "", "wrong": "mounting is denied: ", "crius.log": ""}, "FAILED:  what the guest looked at beside"},
		"unseen":  {map[string]string{"report.json": passed, "left": "", "crius.log": ""}, "wrong: no such file"},
		"crashed": {map[string]string{"report.json": passed, "left": "", "wrong": "", "crius.log": "goroutine 1 [running]:"}, "the server crashed"},
		"error":   {map[string]string{"report.json": passed, "left": "", "wrong": "", "crius.log": "", "error": "no service"}, "in the guest: no service"},
		"nothing": {nil, "report.json"},
	} {
		dir := t.TempDir()
		for file, text := range c.files {
			write(t, filepath.Join(dir, file), text)
		}
		var out strings.Builder
		r, err := judge(dir)
		if err != nil {
			out.WriteString(err.Error())
		} else {
			r.Print(&out, "x")
		}
		if !strings.Contains(out.String(), c.want) {
			t.Errorf("%s: %s", name, out.String())
		}
	}
}

// A machine boots the kernel beside its image, which is the newest kernel of
// the root file system.
func TestKernelIsKeptBesideTheImage(t *testing.T) {
	root := t.TempDir()
	if err := os.Mkdir(filepath.Join(root, "boot"), 0o755); err != nil {
		t.Fatal(err)
	}
	image := filepath.Join(t.TempDir(), "base.img")
	if err := keepKernel(root, image); err == nil || !strings.Contains(err.Error(), "there is no ") {
		t.Errorf("a root file system without a kernel: %v", err)
	}
	old := time.Now().Add(-time.Hour)
	for name, text := range map[string]string{"vmlinuz-1": "old", "initrd.img-1": "old", "vmlinuz-2": "kernel", "initrd.img-2": "initrd"} {
		path := filepath.Join(root, "boot", name)
		write(t, path, text)
		if text != "old" {
			continue
		}
		if err := os.Chtimes(path, old, old); err != nil {
			t.Fatal(err)
		}
	}
	if err := keepKernel(root, image); err != nil {
		t.Fatal(err)
	}
	argv, _ := amd64.argv(disks{base: image})
	for option, want := range map[string]string{"-kernel": "kernel", "-initrd": "initrd"} {
		at := slices.Index(argv, option)
		if got, err := os.ReadFile(argv[at+1]); err != nil || string(got) != want {
			t.Errorf("%s is %q, %v", option, got, err)
		}
	}
}

// Runs on both machines have different names, and separate logs.
func TestRunsHaveNamesOfTheirOwn(t *testing.T) {
	o := options{Driver: "systemd", Handler: "runc"}
	for mode, want := range map[string]string{"upgrade": "upgrade/systemd/runc", "install": "install/systemd/runc"} {
		b, o := bench{kind: "uml"}, o
		o.Mode = mode
		if got := b.name(o); got != want {
			t.Errorf("%s: %q, want %q", mode, got, want)
		}
	}
	for kind, want := range map[string][2]string{
		"uml":     {"systemd/runc", "/c/systemd-runc"},
		"qemu":    {"qemu/systemd/runc", "/c/qemu-systemd-runc"},
		"arm64":   {"arm64/systemd/runc", "/c/arm64-systemd-runc"},
		"selinux": {"selinux/systemd/runc", "/c/selinux-systemd-runc"},
	} {
		b := bench{kind: kind, cache: "/c"}
		if got := [2]string{b.name(o), b.dir(o)}; got != want {
			t.Errorf("%s: %q, want %q", kind, got, want)
		}
	}
}

// User-mode Linux boots with AppArmor; the machine with SELinux boots with
// SELinux instead, enforces from the first moment on, and has all files
// labelled at the end.
func TestMachineWithSELinux(t *testing.T) {
	b := bench{machine: machines["selinux"], suite: "trixie"}
	argv, _ := b.machine.argv(disks{base: "/base"})
	if !slices.Contains(argv, "security=selinux") || !slices.Contains(argv, "enforcing=1") || slices.Contains(argv, "security=apparmor") {
		t.Errorf("options of the kernel: %s", argv)
	}
	if argv, _ := machines["uml"].argv(disks{base: "/base"}); !slices.Contains(argv, "security=apparmor") {
		t.Errorf("options of the usual kernel: %s", argv)
	}
	r := b.recipe()
	if !strings.Contains(r.Files["/etc/selinux/config"], "SELINUX=enforcing") || len(r.Last) != 1 || !strings.Contains(r.Last[0], "setfiles") {
		t.Errorf("%+v", r)
	}
	if slices.Contains(r.Packages, "apparmor") || !slices.Contains(r.Packages, "selinux-policy-default") {
		t.Errorf("packages %v", r.Packages)
	}
}

// All parts of a machine are for one processor: its emulator, kernel and
// packages.
func TestMachineWithAnotherProcessor(t *testing.T) {
	for kind, want := range map[string][4]string{
		"qemu":  {"amd64", "qemu-system-x86_64", "linux-image-cloud-amd64", "console=ttyS0"},
		"arm64": {"arm64", "qemu-system-aarch64", "linux-image-cloud-arm64", "console=ttyAMA0"},
	} {
		b := bench{machine: machines[kind], suite: "trixie"}
		r := b.recipe()
		argv, _ := b.machine.argv(disks{base: "/base"})
		if r.Arch != want[0] || argv[0] != want[1] || !slices.Contains(r.Packages, want[2]) {
			t.Errorf("%s: %s of packages %v for %s", kind, argv[0], r.Packages, r.Arch)
		}
		if options := argv[slices.Index(argv, "-append")+1]; !strings.Contains(options, want[3]+" ") {
			t.Errorf("%s: options of the kernel: %s", kind, options)
		}
	}
}

// script is a machine that is a shell script.
type script struct {
	*uml
	text  string
	limit time.Duration
}

func (s script) argv(disks) (argv, env []string) { return []string{"sh", "-c", s.text}, nil }
func (s script) patience() time.Duration         { return s.limit }

func TestMachineThatEndsItself(t *testing.T) {
	dir := t.TempDir()
	if err := boot(t.Context(), script{text: "echo hello", limit: time.Minute}, dir, disks{}); err != nil {
		t.Error(err)
	}
	if log, err := os.ReadFile(filepath.Join(dir, "console.log")); err != nil || string(log) != "hello\n" {
		t.Errorf("the console's log is %q, %v", log, err)
	}
}

// A machine never hangs its caller, and leaves no process.
func TestMachineThatHangsOrPanics(t *testing.T) {
	for name, c := range map[string]struct {
		machine script
		want    error
	}{
		"panic": {script{text: "sleep 1000 & echo 'Kernel panic - not'; printf ' syncing: x'; wait", limit: time.Minute}, nil},
		"mark":  {script{text: "sleep 1000 & printf 'Kernel panic'; printf ' - not syncing: x'; wait", limit: time.Minute}, errPanic},
		"hang":  {script{text: "trap '' TERM INT; echo up; sleep 1000 & sleep 1000; sleep 1000", limit: 300 * time.Millisecond}, nil},
	} {
		if name == "panic" { // a line break inside is not a mark
			c.machine.limit = 300 * time.Millisecond
		}
		dir := t.TempDir()
		err := boot(t.Context(), c.machine, dir, disks{})
		if err == nil || c.want != nil && !errors.Is(err, c.want) || !strings.Contains(err.Error(), "end of the console's log") {
			t.Errorf("%s: %v", name, err)
		}
		if c.want == nil && !strings.Contains(err.Error(), "was not done after") {
			t.Errorf("%s: %v", name, err)
		}
		links, _ := filepath.Glob("/proc/[0-9]*/cwd") // the pattern is well-formed
		for _, link := range links {
			if cwd, _ := os.Readlink(link); cwd == dir {
				t.Errorf("%s: %s is left of the machine", name, filepath.Dir(link))
			}
		}
	}
}
