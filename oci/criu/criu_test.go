package criu

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/test/kit/program"
)

// The words are those by which the kubelet's end-to-end tests (test/e2e_node/checkpoint_container.go) know
// a node without checkpoints.
func TestReady(t *testing.T) {
	t.Parallel()
	works := "[ \"$1\" = check ] && exit 0; echo Version: 4.2.1\n"
	for name, c := range map[string]struct{ path, script, want string }{
		"disabled":       {"", "", "criu support is disabled by configuration"},
		"missing":        {"criu", "", "checkpoint/restore requires at least CRIU"},
		"old":            {"criu", "echo Version: 3.16.1\n", `checkpoint/restore requires at least CRIU 3.17: `},
		"broken":         {"criu", "exit 3\n", "checkpoint/restore requires at least CRIU"},
		"other name":     {"criu-ns", works, "checkpoint/restore requires at least CRIU"},
		"not for kernel": {"criu", "[ \"$1\" = check ] && echo 'x: Error (criu/vdso.c:1): vdso: Unexpected' && exit 1; echo Version: 3.17.1\n", "vdso: Unexpected"},
		"works":          {"criu", works, ""},
	} {
		path := c.path
		if path != "" {
			path = filepath.Join(t.TempDir(), path)
		}
		if c.script != "" {
			if err := program.Write(path, []byte("#!/bin/sh\n"+c.script)); err != nil {
				t.Fatal(err)
			}
		}
		p := New(path)
		found, err := p.Ready(t.Context())
		if c.want == "" {
			if err != nil || found.Version != "4.2.1" || found.Path != path {
				t.Errorf("%s: %+v, %v", name, found, err)
			}
			continue
		}
		if !errors.Is(err, fault.Unimplemented) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}

// A criu that is installed or replaced while the server runs is noticed.
func TestReadyNoticesChanges(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "criu")
	p := New(path)
	write := func(version string) {
		t.Helper()
		if err := errors.Join(os.RemoveAll(path), program.Write(path, []byte("#!/bin/sh\necho Version: "+version+"\n"))); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := p.Ready(t.Context()); err == nil {
		t.Error("a missing program is ready")
	}
	for _, version := range []string{"4.1", "4.2.10"} {
		write(version)
		if found, err := p.Ready(t.Context()); err != nil || found.Version != version {
			t.Errorf("%+v, %v, want version %s", found, err, version)
		}
	}
}

func TestParseVersion(t *testing.T) {
	t.Parallel()
	for said, want := range map[string]int{"Version: 4.2.1\nGitID: v4\n": 40201, "Version: 3.17": 31700, "Version: 4": 40000, "": 0, "Version: x.y": 0} {
		if _, got := parseVersion(said); got != want {
			t.Errorf("%q: %d, want %d", said, got, want)
		}
	}
}

// crius's file replaces whatever is there, without following a link.
func TestWriteOptions(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file, victim := filepath.Join(dir, OptionsFile), filepath.Join(dir, "victim")
	if err := errors.Join(os.WriteFile(victim, []byte("mine"), 0o600), os.Symlink(victim, file)); err != nil {
		t.Fatal(err)
	}
	for _, connections := range []bool{true, false} {
		if err := (Found{number: 40201}).WriteOptions(file, connections); err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(file)
		if err != nil || strings.Contains(string(text), "tcp-established") != connections || strings.Contains(string(text), "action-script") {
			t.Errorf("%s, %v", text, err)
		}
	}
	if text, _ := os.ReadFile(victim); string(text) != "mine" {
		t.Errorf("the file behind the link is %q", text)
	}
}

// The first error that ends criu is told: not what it complains of without a privilege, and goes on.
func TestLogError(t *testing.T) {
	t.Parallel()
	const limit = "(00.0) Error (criu/util.c:1534): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted\n"
	for text, want := range map[string]string{
		"": "", limit: "", "(00.1) Warn  (x): y\n": "",
		strings.Repeat("(00.1) vma\n", 1<<20) + strings.Repeat("x", 1<<20) + "\n(00.2) Error (y): z\n(00.2) Error (y): No space left on device": "Error (y): z",
		limit + "(00.2) Error (criu/namespaces.c:1117): Can't dump a pid namespace\n(00.3) Error (criu/cr-dump.c:1975): Dumping FAILED.\n":      "Error (criu/namespaces.c:1117): Can't dump a pid namespace",
		// Of Debian's criu 4.2.1.
		"(00.1) Error (criu/sk-inet.c:137): inet: Unsupported proto 262 for socket 52e5e9a\n":       "Error (criu/sk-inet.c:137): inet: Unsupported proto 262 for socket 52e5e9a (" + hints[0].hint + ")",
		"(00.1) Error (criu/cr-dump.c:389): Can't get rlimit 0: Operation not permitted\n":          "Error (criu/cr-dump.c:389): Can't get rlimit 0: Operation not permitted (" + hints[1].hint + ")",
		"(00.1) Error (criu/pie/parasite.c:588): send_fds failed (-22)\n":                           "Error (criu/pie/parasite.c:588): send_fds failed (-22) (" + hints[2].hint + ")",
		"(00.1) Error (criu/files-reg.c:1790): Can't lookup mount=51 for fd=6 path=/etc/hostname\n": "Error (criu/files-reg.c:1790): Can't lookup mount=51 for fd=6 path=/etc/hostname (" + hints[3].hint + ")",
		"(10.1) Error (criu/seize.c:335): zombie 2134 (comm odd) found while seizing\n":             "Error (criu/seize.c:335): zombie 2134 (comm odd) found while seizing (" + hints[4].hint + ")",
	} {
		file := filepath.Join(t.TempDir(), "dump.log")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, full := LogError(file); got != want || full != strings.Contains(text, "No space") {
			t.Errorf("%.100q: %q, %t, want %q", text, got, full, want)
		}
	}
}
