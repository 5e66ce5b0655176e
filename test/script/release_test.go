package script

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func release(t *testing.T, env []string, args ...string) (out string, err error) {
	t.Helper()
	script, err := filepath.Abs(filepath.Join(repository, "contrib", "packaging", "release.sh"))
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), script, args...)
	cmd.Env = append(os.Environ(), env...)
	text, err := cmd.CombinedOutput()
	return string(text), err
}

func TestReleaseNotesAreASectionOfTheChangelog(t *testing.T) {
	t.Parallel()
	notes, err := release(t, nil, "notes", "Unreleased")
	if err != nil || !strings.HasPrefix(notes, "### Added\n- ") || strings.Contains(notes, "\n## ") {
		t.Errorf("%v: %.200s", err, notes)
	}
	if said, err := release(t, nil, "notes", "v999.0.0"); err == nil || !strings.Contains(said, "CHANGELOG.md has no section v999.0.0") {
		t.Errorf("a version without a section: %v: %s", err, said)
	}
}

func TestReleaseIsSigned(t *testing.T) {
	t.Parallel()
	dir, key := t.TempDir(), filepath.Join(t.TempDir(), "key")
	if out, err := exec.CommandContext(t.Context(), "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for name, text := range map[string]string{"crius.deb": "package", "provenance.json": "{}"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := release(t, []string{"KEY=" + key}, "seal", dir); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	public, err := os.ReadFile(key + ".pub")
	if err != nil {
		t.Fatal(err)
	}
	signers := filepath.Join(t.TempDir(), "allowed_signers")
	if err := os.WriteFile(signers, []byte("crius "+string(public)), 0o644); err != nil {
		t.Fatal(err)
	}
	check := exec.CommandContext(t.Context(), "sh", "-c", "ssh-keygen -Y verify -f \"$1\" -I crius -n file -s SHA256SUMS.sig <SHA256SUMS && sha256sum -c --quiet SHA256SUMS && cat SHA256SUMS", "sh", signers)
	check.Dir = dir
	if out, err := check.CombinedOutput(); err != nil || !strings.Contains(string(out), "  crius.deb\n") || strings.Contains(string(out), "SHA256SUMS\n") {
		t.Errorf("%v: %s", err, out)
	}
	if out, err := release(t, []string{"KEY="}, "seal", dir); err != nil || !strings.Contains(out, "SHA256SUMS is not signed: set KEY") {
		t.Errorf("without a key: %v: %s", err, out)
	}
}
