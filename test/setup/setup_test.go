// Package setup tests test/setup.sh on an imitated machine: apt and dpkg-query
// are real, and everything that they read and write is in a directory of the
// test.
package setup

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// machine is where setup.sh runs.
type machine struct {
	*testing.T
	dir string
}

// pkg is a package: its name, its version and further fields.
type pkg struct{ name, version, fields string }

// newMachine makes a machine with packages installed, and others in its
// archive.
func newMachine(t *testing.T, installed, archive []pkg) *machine {
	t.Helper()
	m := &machine{t, t.TempDir()}
	for _, dir := range []string{"bin", "etc/apt.conf.d", "etc/preferences.d", "etc/trusted.gpg.d", "etc/sources.list.d", "dpkg/info", "dpkg/updates", "lists/partial", "cache/archives/partial", "log", "repo"} {
		m.must(os.MkdirAll(m.path(dir), 0o755))
	}
	var status, index strings.Builder
	for _, p := range installed {
		fmt.Fprintf(&status, "Package: %s\nStatus: install ok installed\nVersion: %s\nArchitecture: amd64\nMaintainer: x <x@x>\nDescription: x\n%s\n", p.name, p.version, p.fields)
	}
	for _, p := range archive {
		fmt.Fprintf(&index, "Package: %s\nVersion: %s\nArchitecture: amd64\nMaintainer: x <x@x>\nDescription: x\nFilename: ./%s.deb\nSize: 1\nSHA256: %064d\n%s\n", p.name, p.version, p.name, 0, p.fields)
	}
	m.write("dpkg/status", status.String(), 0o644)
	m.write("repo/Packages", index.String(), 0o644)
	m.write("etc/sources.list", "deb [trusted=yes] file:"+m.path("repo")+" ./\n", 0o644)
	m.write("apt.conf", fmt.Sprintf(`Dir "%[1]s"; Dir::Etc "%[1]s/etc"; Dir::State "%[1]s"; Dir::State::lists "%[1]s/lists"; Dir::State::status "%[1]s/dpkg/status";
Dir::Cache "%[1]s/cache"; Dir::Log "%[1]s/log"; Dir::Bin::dpkg "%[1]s/bin/dpkg"; APT::Sandbox::User "root"; APT::Architecture "amd64"; APT::Architectures { "amd64"; };
`, m.dir), 0o644)
	// Commands that install are replaced with ones that print that: the
	// simulation is apt's own.
	m.program("apt-get", `case " $* " in
*" -s "* | *" update "*) exec /usr/bin/apt-get "$@" ;;
*) echo "$*" >>`+m.path("done")+` ;;
esac`)
	m.program("go", `case "$1" in version) echo go version go1.99.1 linux/amd64 ;; env) echo auto ;; esac`)
	for _, name := range []string{"bash", "sed", "id", "dpkg", "dpkg-query", "mkdir", "env"} {
		real, err := exec.LookPath(name)
		m.must(err)
		m.must(os.Symlink(real, m.path("bin/"+name)))
	}
	return m
}

func (m *machine) path(name string) string { return filepath.Join(m.dir, name) }

func (m *machine) must(err error) {
	m.Helper()
	if err != nil {
		m.Fatal(err)
	}
}

func (m *machine) write(name, text string, mode os.FileMode) {
	m.Helper()
	m.must(os.WriteFile(m.path(name), []byte(text), mode))
}

// program puts a script into the machine's PATH.
func (m *machine) program(name, script string) {
	m.Helper()
	m.write("bin/"+name, "#!/bin/bash\n"+script+"\n", 0o755)
}

// setup returns the output of setup.sh, and the arguments of apt-get without
// options.
func (m *machine) setup(args ...string) (said, installed string, err error) {
	m.Helper()
	script, pathErr := filepath.Abs("../setup.sh")
	m.must(pathErr)
	cmd := exec.Command("/bin/bash", append([]string{script}, args...)...)
	cmd.Env = []string{"PATH=" + m.path("bin"), "APT_CONFIG=" + m.path("apt.conf"), "DPKG_ADMINDIR=" + m.path("dpkg"), "LC_ALL=C"}
	out, err := cmd.CombinedOutput()
	asked, _ := os.ReadFile(m.path("done"))
	for _, line := range strings.Split(string(asked), "\n") {
		if line != "" && !strings.Contains(line, "--no-remove") {
			m.Errorf("apt-get may remove packages: %q", line)
		}
	}
	var names []string
	for _, word := range strings.Fields(string(asked)) {
		// The plugins of the machine that runs the test count, wherever PATH leads.
		if !strings.HasPrefix(word, "-") && word != "install" && word != "containernetworking-plugins" {
			names = append(names, word)
		}
	}
	return string(out), strings.Join(names, " "), err
}

// debian returns a mirror's packages that setup.sh needs.
func debian() []pkg {
	var all []pkg
	for _, name := range strings.Fields("crun containernetworking-plugins iptables nftables iproute2 ca-certificates rpm lintian") {
		all = append(all, pkg{name, "1.0-1", ""})
	}
	return append(all, pkg{"runc", "1.1-1", ""}, pkg{"containerd", "1.6-1", "Depends: runc\n"})
}

const dockers = "Provides: containerd, runc\nConflicts: containerd, runc\nReplaces: containerd, runc\n"

// On a machine with Docker's packages the set-up would have removed them for
// Debian's runc.
func TestSetupUsesTheRuntimeThatIsThere(t *testing.T) {
	t.Parallel()
	m := newMachine(t, []pkg{{"containerd.io", "1.7-1", dockers}}, debian())
	m.program("runc", "true")
	said, installed, err := m.setup("demo-runc")
	if want := "iptables nftables iproute2 ca-certificates"; err != nil || installed != want {
		t.Errorf("installs %q, want %q: %v: %s", installed, want, err, said)
	}
}

func TestSetupOfAFreshMachine(t *testing.T) {
	t.Parallel()
	for set, want := range map[string]string{
		"demo-runc": "runc iptables nftables iproute2 ca-certificates",
		"rpm":       "rpm",
	} {
		said, installed, err := newMachine(t, nil, debian()).setup(set)
		if err != nil || installed != want {
			t.Errorf("%s installs %q, want %q: %v: %s", set, installed, want, err, said)
		}
	}
}

func TestSetupReplacesNothing(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		installed []pkg
		archive   []pkg
		want      string
	}{
		"conflict":             {[]pkg{{"containerd.io", "1.7-1", dockers}}, debian(), "removes containerd.io 1.7-1"},
		"conflict deeper":      {[]pkg{{"podman", "4-1", "Conflicts: helper\n"}}, append(debian()[1:], pkg{"crun", "1.0-1", "Depends: helper\n"}, pkg{"helper", "1-1", ""}), "removes podman 4-1"},
		"newer library":        {[]pkg{{"libx", "1.0-1", ""}}, append(debian()[1:], pkg{"crun", "1.0-1", "Depends: libx (>= 2)\n"}, pkg{"libx", "2.0-1", ""}), "replaces libx 1.0-1 by 2.0-1"},
		"an update is no harm": {[]pkg{{"libx", "1.0-1", ""}}, append(debian()[1:], pkg{"crun", "1.0-1", "Depends: libx (= 1.0-2)\n"}, pkg{"libx", "1.0-2", ""}), ""},
		"installed is kept":    {[]pkg{{"crun", "0.5-1", ""}, {"runc", "0.5-1", ""}}, debian(), ""},
	} {
		m := newMachine(t, c.installed, c.archive)
		said, installed, err := m.setup("crun", "runc")
		switch {
		case c.want == "" && err != nil:
			t.Errorf("%s: %v: %s", name, err, said)
		case c.want != "" && (err == nil || installed != "" || !strings.Contains(said, c.want) || !strings.Contains(said, "nothing was done")):
			t.Errorf("%s: installs %q, says %q, want %q (%v)", name, installed, said, c.want, err)
		}
		if name == "installed is kept" && installed != "" {
			t.Errorf("%s: installs %q", name, installed)
		}
	}
}

// Each target that installs packages uses setup.sh.
func TestMakefileInstallsByTheScriptAlone(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range strings.Split(string(text), "\n") {
		if strings.Contains(line, "apt-get") || strings.Contains(line, "dpkg -i") {
			t.Errorf("%q", line)
		}
	}
}
