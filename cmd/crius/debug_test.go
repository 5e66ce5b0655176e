package main

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/crius-run/crius/cmd/crius/config"
	"github.com/crius-run/crius/pod"
)

// unpack reads an archive of crius debug.
func unpack(t *testing.T, file string) map[string]string {
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

// Without a server, and whatever tools the machine lacks, there is an archive of what
// can be had.
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
	parts := unpack(t, file)
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

// What a container has made is not listed, and names cannot pass for lines.
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

// A part that fails, hangs or is endless takes nothing from the others.
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
	parts := unpack(t, file)
	if parts["half"] != "something" || parts["last"] != `A=<redacted>, "A=<redacted>", http://<redacted>@proxy:1, AB=c, the end` || len(parts["endless"]) != partSize {
		t.Errorf("%q, %q, %d bytes", parts["half"], parts["last"], len(parts["endless"]))
	}
	if !strings.Contains(parts["errors.txt"], "half: no more\n") || !strings.Contains(parts["errors.txt"], "endless: truncated after") {
		t.Errorf("%q", parts["errors.txt"])
	}
}

func second(_ int, err error) error { return err }
