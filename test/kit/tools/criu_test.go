package tools

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crius-run/crius/test/kit/program"
)

// The set-up of criu tries each archive several times, takes the version that tests want where it can, and
// has an exit code of its own if there is none.
func TestCriuScript(t *testing.T) {
	t.Parallel()
	const pinned = "criu=4.2.1-*"
	for name, c := range map[string]struct {
		apt   string // its answer to an update ($3) or an install
		code  int
		asked []string // packages, in order
	}{
		"there":             {"exit 0", 0, []string{pinned}},
		"no network":        {"exit 100", 75, nil},
		"sid has moved on":  {`case "$*" in *update|*criu) ;; *) exit 100 ;; esac`, 0, []string{pinned, pinned, "criu"}},
		"at the second try": {`[ "$tries" -gt 3 ] || exit 100`, 0, []string{pinned}},
		"from snapshots":    {`case "$*" in *update) ;; *) grep -q snapshot "$sources" || exit 100 ;; esac`, 0, []string{pinned, pinned}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bin, out := t.TempDir(), filepath.Join(t.TempDir(), "criu")
			log := filepath.Join(bin, "log")
			apt := `echo "$*" >>` + log + `
tries=$(grep -c update ` + log + `)
sources=$(dirname "$APT_CONFIG")/sources.list
case "$*" in *install*) touch "$(dirname "$APT_CONFIG")/archives/criu.deb" ;; esac
` + c.apt + "\n"
			unpack := `mkdir -p "$3/usr/sbin" "$3/usr/lib/x"; touch "$3/usr/lib/x/libprotobuf-c.so.1"
printf '#!/bin/sh\necho loader\n' >"$3/usr/lib/x/ld-linux-x.so.2"; chmod 755 "$3/usr/lib/x/ld-linux-x.so.2"
`
			for name, text := range map[string]string{"apt-get": apt, "dpkg-deb": unpack, "sleep": ""} {
				if err := program.Write(filepath.Join(bin, name), []byte("#!/bin/sh\n"+text)); err != nil {
					t.Fatal(err)
				}
			}
			cmd := exec.Command("bash", "-c", criuScript, "criu.sh", out, "4.2.1")
			cmd.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"))
			said, err := cmd.CombinedOutput()
			code := 0
			if failed := new(exec.ExitError); errors.As(err, &failed) {
				code = failed.ExitCode()
			} else if err != nil {
				t.Fatal(err)
			}
			calls, err := os.ReadFile(log)
			if err != nil {
				t.Fatal(err)
			}
			var asked []string
			for line := range strings.Lines(string(calls)) {
				if words := strings.Fields(line); strings.Contains(line, " install ") {
					asked = append(asked, words[len(words)-1])
				}
			}
			if code != c.code || strings.Join(asked, " ") != strings.Join(c.asked, " ") {
				t.Errorf("exit code %d, asked for %q: %s", code, asked, said)
			}
			if _, err := os.Stat(filepath.Join(out, "criu")); (err == nil) != (code == 0) {
				t.Errorf("the program: %v", err)
			}
		})
	}
}
