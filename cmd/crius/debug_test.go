package main

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/crius-run/crius/cmd/crius/config"
	"github.com/crius-run/crius/pod"
)

// extract reads an archive of crius debug.
func extract(t *testing.T, file string) map[string]string {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	packed, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]string{}
	for archive := tar.NewReader(packed); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return found
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(archive)
		if err != nil {
			t.Fatal(err)
		}
		found[strings.TrimPrefix(header.Name, "crius-debug/")] = string(content)
	}
}

// Without a server, and without some of the tools, the archive has everything that is
// available.
func TestDebugWithoutAServer(t *testing.T) {
	dir := t.TempDir()
	config := write(t, "crius.toml", "root = '"+dir+"/lib'\nrun_root = '"+dir+"/run'\n[api]\nlisten = '"+dir+"/s'\n[image]\nroot = '"+dir+"/images'\nrun_root = '"+dir+"/images-run'\n")
	file := filepath.Join(dir, "archive.tar.gz")
	code, out, errs := crius(t, "--config", config, "debug", file)
	if code != 0 || strings.TrimSpace(out) != file {
		t.Fatalf("exit code %d, %q, %q", code, out, errs)
	}
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
	parts := extract(t, file)
	for name, word := range map[string]string{
		"version.txt": "crius", "configuration.toml": dir + "/lib", "check.txt": "kernel", "mounts.txt": "/proc", "processes.txt": "PID",
		"errors.txt": "status.json: no server at " + dir + "/s",
	} {
		if !strings.Contains(parts[name], word) {
			t.Errorf("%s has no %q: %.300q", name, word, parts[name])
		}
	}
	if code, _, errs := crius(t, "--config", config, "debug", file); code != 1 || !strings.Contains(errs, "file exists") {
		t.Errorf("over a file that is there: exit code %d, %q", code, errs)
	}
}

// Containers write to the journal through their monitors (runtime.container_log_journal),
// choose the names of their processes, which the kernel and the server quote, and write to
// /dev/kmsg.
func TestDebugHoldsNothingThatAContainerWrote(t *testing.T) {
	const marker = "s3cr) [1] t" // a process's name has up to 15 bytes
	bin := t.TempDir()
	for name, script := range map[string]string{
		// Without a match for the program, journalctl prints the messages of the whole
		// unit.
		"journalctl": `echo 'crius[7]: time=x level=WARN msg="container not dead after SIGKILL" container=abc why="in uninterruptible sleep: process 12 (` + marker + `) in nfs_wait" err="kept"'
echo 'crius[7]: time=x level=DEBUG msg="runtime log" text="it says \"` + marker + `\" twice" handler=runc'
echo 'crius[7]: {"level":"DEBUG","text":"it says \"` + marker + `\"","handler":"runc"}'
echo 'systemd[1]: crius.service: Found left-over process 12 (` + marker + `) in control group while starting unit. Ignoring.'
case "$*" in *"_SYSTEMD_UNIT=crius.service _COMM=crius"*) ;; *) echo 'k8s_a_b_c_d_0[9]: ` + marker + `' ;; esac`,
		"dmesg": `cat <<'END'
[Sat Nov 28 08:00:00 2026] ` + marker + ` invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=985
[Sat Nov 28 08:00:00 2026] CPU: 0 PID: 12 Comm: ` + marker + ` Not tainted 6.1.0
[Sat Nov 28 08:00:00 2026] [    123]  1000   123     1234      567    45056        0           985 ` + marker + `
[Sat Nov 28 08:00:00 2026] oom-kill:constraint=CONSTRAINT_MEMCG,task_memcg=/kubepods/x,task=` + marker + `,pid=12,uid=0
[Sat Nov 28 08:00:00 2026] Memory cgroup out of memory: Killed process 12 (` + marker + `) total-vm:1kB, anon-rss:1kB
[Sat Nov 28 08:00:00 2026] ` + marker + `[12]: segfault at 0 ip 0000 sp 0000 error 4 in ` + marker + `[5600+1000]
[Sat Nov 28 08:00:00 2026] traps: ` + marker + `[12] general protection fault ip:0 sp:0 error:0 in ` + marker + `[5600+1000]
[Sat Nov 28 08:00:00 2026] INFO: task ` + marker + `:12 blocked for more than 120 seconds.
[Sat Nov 28 08:00:00 2026] task:` + marker + `    state:D stack:0 pid:12
[Sat Nov 28 08:00:00 2026] ` + marker + ` (12): drop_caches: 3
[Sat Nov 28 08:00:00 2026] audit: type=1326 audit(1.2:3): auid=1 uid=0 pid=12 comm="` + marker + `" exe="/` + marker + `" sig=0
[Sat Nov 28 08:00:00 2026] warning: ` + "`" + marker + `' uses 32-bit capabilities
[Sat Nov 28 08:00:00 2026] overlayfs: kept
END
case "$*" in *--kernel*) ;; *) echo '` + marker + `' ;; esac`,
	} {
		if err := os.WriteFile(filepath.Join(bin, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	container := exec.Command("sh", "-c", `printf '`+marker+`' >/proc/self/comm && echo ready && read -r end`)
	container.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS}
	end, err := container.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	ready, err := container.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := container.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = errors.Join(end.Close(), container.Wait()) }()
	if _, err := io.ReadFull(ready, make([]byte, len("ready"))); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	config := write(t, "crius.toml", "root = '"+dir+"/lib'\nrun_root = '"+dir+"/run'\n[api]\nlisten = '"+dir+"/s'\n[image]\nroot = '"+dir+"/images'\nrun_root = '"+dir+"/images-run'\n")
	file := filepath.Join(dir, "archive.tar.gz")
	if code, _, errs := crius(t, "--config", config, "debug", file); code != 0 {
		t.Fatal(errs)
	}
	parts := extract(t, file)
	for name, text := range parts {
		for line := range strings.Lines(text) {
			if strings.Contains(line, "s3cr") || strings.Contains(line, "] t") && strings.Contains(line, marker[4:]) {
				t.Errorf("%s: %s", name, line)
			}
		}
	}
	for name, kept := range map[string][]string{
		"crius.log": {"container not dead after SIGKILL", `err="kept"`, "handler=runc", "left-over process 12"}, "kernel.log": {"overlayfs: kept", "Killed process 12", "total-vm:1kB"},
		"processes.txt": {fmt.Sprint(container.Process.Pid), fmt.Sprint(os.Getpid())},
	} {
		for _, word := range kept {
			if !strings.Contains(parts[name], word) {
				t.Errorf("%s has no %q: %.1000s", name, word, parts[name])
			}
		}
	}
}

// Files of containers are not listed, and a name cannot look like several lines.
func TestDebugNames(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	for _, name := range []string{"containers/c/upper/secret", "containers/c/line\nbreak", "containers/c/runtime.log"} {
		file := filepath.Join(root, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, nil, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	var out strings.Builder
	if err := writeNames(t.Context(), &out, root); err != nil {
		t.Fatal(err)
	}
	if text := out.String(); strings.Contains(text, "secret") || !strings.Contains(text, `line\nbreak`) || !strings.Contains(text, "runtime.log") {
		t.Errorf("%s", text)
	}
}

// A part that fails, hangs or is endless does not affect the others.
func TestDebugArchiveOfBadParts(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "archive.tar.gz")
	f, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	endless := func(_ context.Context, w io.Writer) error {
		for block := make([]byte, 1<<20); ; {
			if _, err := w.Write(block); err != nil {
				return err
			}
		}
	}
	err = writeArchive(t.Context(), f, time.Now(), []part{
		{"half", func(_ context.Context, w io.Writer) error {
			return errors.Join(errors.New("no more"), second(io.WriteString(w, "something")))
		}},
		{"endless", endless},
		{"last", func(_ context.Context, w io.Writer) error {
			return second(io.WriteString(w, `A=b"&c, "A=b\"\u0026c", http://me:pw@proxy:1, AB=c, the end`))
		}},
	}, secretsOf(config.Config{Pod: pod.Config{DefaultEnv: []string{`A=b"&c`}}}))
	if err != nil {
		t.Fatal(err)
	}
	parts := extract(t, file)
	if parts["half"] != "something" || parts["last"] != `A=<redacted>, "A=<redacted>", http://<redacted>@proxy:1, AB=c, the end` || len(parts["endless"]) != partSize {
		t.Errorf("%q, %q, %d bytes", parts["half"], parts["last"], len(parts["endless"]))
	}
	if !strings.Contains(parts["errors.txt"], "half: no more\n") || !strings.Contains(parts["errors.txt"], "endless: truncated after") {
		t.Errorf("%q", parts["errors.txt"])
	}
}

func second(_ int, err error) error { return err }
