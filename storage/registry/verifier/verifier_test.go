package verifier

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/registry/trust"
	"github.com/crius-run/crius/test/kit/program"
)

var web = imagespec.Descriptor{MediaType: imagespec.MediaTypeImageIndex, Digest: digest.FromString("web"), Size: 3}

// put makes a program of a script.
func put(t *testing.T, path, script string) {
	t.Helper()
	if err := program.Write(path, []byte(script)); err != nil {
		t.Fatal(err)
	}
}

// with returns verifiers with these scripts.
func with(t *testing.T, scripts map[string]string) *Verifiers {
	t.Helper()
	dir := t.TempDir()
	for name, script := range scripts {
		put(t, filepath.Join(dir, name), "#!/bin/sh\n"+script+"\n")
	}
	return &Verifiers{dir: dir, timeout: time.Minute}
}

// What containerd's documentation promises to a verifier.
func TestVerifierGetsNameDigestAndDescriptor(t *testing.T) {
	t.Parallel()
	asked := filepath.Join(t.TempDir(), "asked")
	v := with(t, map[string]string{"a": fmt.Sprintf(`echo "$@" > %[1]s; cat >> %[1]s; echo " it is signed "; echo chatter >&2`, asked), "b": "echo fine"})
	verdict, err := v.Check(t.Context(), "docker.io/library/web:1", web)
	if err != nil || verdict != "a: it is signed; b: fine" {
		t.Errorf("%q, %v", verdict, err)
	}
	got, err := os.ReadFile(asked)
	if err != nil {
		t.Fatal(err)
	}
	want := "-name docker.io/library/web:1 -digest " + web.Digest.String() + " -stdin-media-type application/vnd.oci.descriptor.v1+json\n" +
		`{"mediaType":"application/vnd.oci.image.index.v1+json","digest":"` + web.Digest.String() + `","size":3}`
	if string(got) != want {
		t.Errorf("the verifier was asked %s, want %s", got, want)
	}
}

// Whatever goes wrong, the image is refused.
func TestVerifiersRefuse(t *testing.T) {
	t.Parallel()
	missing := &Verifiers{dir: filepath.Join(t.TempDir(), "none"), timeout: time.Minute}
	short := with(t, map[string]string{"hangs": "echo thinking; sleep 1000 & sleep 1000"})
	short.timeout = time.Millisecond
	file := with(t, nil)
	if err := os.WriteFile(filepath.Join(file.dir, "README"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		v    *Verifiers
		kind error
		text string
	}{
		"one of two refuses":  {with(t, map[string]string{"a": "exit 0", "b": "echo no signature; exit 3"}), fault.Denied, "image verifier b: refuses docker.io/library/web:1 (exit code 3): no signature"},
		"output without end":  {with(t, map[string]string{"a": "yes no | head -c 1000000; exit 1"}), fault.Denied, "(exit code 1): no"},
		"no threads":          {with(t, map[string]string{"a": "echo runtime: failed to create new OS thread '(have 3 already; errno=11)' >&2; exit 2"}), fault.Exhausted, "pids.max"},
		"killed":              {with(t, map[string]string{"a": "kill -9 $$"}), fault.Precondition, "signal: killed"},
		"none at all":         {with(t, nil), nil, ""},
		"too slow":            {short, fault.Precondition, "no answer within image.verifier_timeout (1ms)"},
		"missing directory":   {missing, fault.Precondition, "create it, or unset the option"},
		"file but no program": {file, fault.Precondition, "README is not a program"},
	} {
		_, err := c.v.Check(t.Context(), "docker.io/library/web:1", web)
		if c.kind == nil {
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		if !errors.Is(err, c.kind) || !errors.Is(err, trust.ErrSignature) || !strings.Contains(err.Error(), c.text) || len(err.Error()) > 2*maxVerdict {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := (&Verifiers{}).Check(t.Context(), "web", web); err != nil {
		t.Errorf("without a directory: %v", err)
	}
}

// A container that is created a hundred times needs one answer, until a verifier or the image
// changes. A refusal is not kept.
func TestAnswersAreKept(t *testing.T) {
	t.Parallel()
	count := filepath.Join(t.TempDir(), "count")
	script := "echo >> " + count
	v := with(t, map[string]string{"a": script})
	check := func(name string, image imagespec.Descriptor, times int) {
		t.Helper()
		for range 2 {
			if _, err := v.Check(t.Context(), name, image); err != nil {
				t.Error(err)
			}
		}
		if text, err := os.ReadFile(count); err != nil || strings.Count(string(text), "\n") != times {
			t.Errorf("asked %d times, want %d, %v", strings.Count(string(text), "\n"), times, err)
		}
	}
	check("web:1", web, 1)
	check("web:2", web, 2)
	check("web:1", imagespec.Descriptor{Digest: digest.FromString("other")}, 3)
	other := web
	other.MediaType = imagespec.MediaTypeImageManifest
	check("web:1", other, 4)
	put(t, filepath.Join(v.dir, "a"), "#!/bin/sh\n"+script+" # newer\n")
	check("web:1", web, 5)
	put(t, filepath.Join(v.dir, "b"), "#!/bin/sh\nexit 1\n")
	for range 2 {
		if _, err := v.Check(t.Context(), "web:1", web); !errors.Is(err, fault.Denied) {
			t.Errorf("refused once: %v", err)
		}
	}
	if err := os.Remove(filepath.Join(v.dir, "b")); err != nil {
		t.Fatal(err)
	}
	check("web:1", web, 7)  // the refusals have asked it, too
	v.Use(v.dir, v.timeout) // as a reload does
	check("web:1", web, 8)
}

// A verifier's keys and policies are files of its own: what they no longer allow is refused after a
// while, though the program is the same.
func TestAnswersExpire(t *testing.T) {
	t.Parallel()
	v := with(t, map[string]string{"a": "exit 1"})
	programs, err := programsIn(v.dir)
	if err != nil {
		t.Fatal(err)
	}
	descriptor, err := json.Marshal(web)
	if err != nil {
		t.Fatal(err)
	}
	key := v.key(programs, "web:1", descriptor)
	v.answers = map[[32]byte]answer{key: {time.Now().Add(-keepAnswer / 2), "allowed then"}}
	if verdict, err := v.Check(t.Context(), "web:1", web); verdict != "allowed then" || err != nil {
		t.Errorf("%q, %v", verdict, err)
	}
	v.answers[key] = answer{time.Now().Add(-10 * time.Minute), "allowed then"}
	if _, err := v.Check(t.Context(), "web:1", web); !errors.Is(err, fault.Denied) {
		t.Errorf("after ten minutes: %v", err)
	}
}
