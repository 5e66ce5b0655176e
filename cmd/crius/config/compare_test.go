package config

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/crius-run/crius/cmd/crius/config/foreign"
)

// compared compares a configuration of CRI-O with one of crius.
func compared(t *testing.T, crio, crius string) *Comparison {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "crio.conf"), []byte(crio), 0o600); err != nil {
		t.Fatal(err)
	}
	imp, err := foreign.CRIO(dir)
	if err != nil {
		t.Fatal(err)
	}
	n := newNode(t)
	n.write(n.file, crius)
	now, err := n.load()
	if err != nil {
		t.Fatal(err)
	}
	c, err := Compare(imp, now)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// keysOf returns the keys that differ, without those that differ on every stock node.
func keysOf(c *Comparison) []string {
	keys := []string{}
	for _, d := range c.Differences {
		if !slices.Contains([]string{"api.max_message_size", "api.crio_socket", "runtime.default_handler", "image.short_name_mode"}, d.Key) {
			keys = append(keys, d.Key)
		}
	}
	return keys
}

func TestCompareNamesBothOrigins(t *testing.T) {
	c := compared(t, "[crio.runtime]\npids_limit = 100\n", "[pod]\nread_only = true\n")
	if len(c.Differences) < 2 {
		t.Fatalf("differences are %+v", c.Differences)
	}
	found := map[string]Difference{}
	for _, d := range c.Differences {
		found[d.Key] = d
	}
	limit := found["pod.pids_limit"]
	if filepath.Base(limit.TheirsOrigin) != "crio.conf:2 crio.runtime.pids_limit" {
		t.Errorf("the origin is %q", limit.TheirsOrigin)
	}
	limit.TheirsOrigin = ""
	equal(t, "limit", limit, Difference{Key: "pod.pids_limit", Theirs: "100", Ours: "0", OursOrigin: "default"})
	// An option that only crius sets is compared with CRI-O's default.
	equal(t, "read-only", found["pod.read_only"].Theirs, "")
	equal(t, "read-only", found["pod.read_only"].Ours, "true")
	// Options without a key of CRI-O are not compared.
	equal(t, "others", keysOf(compared(t, "", "[image]\nparallel_layers = 7\n")), []string{})
}

// Values with the same effect are not different.
func TestCompareEffectiveValues(t *testing.T) {
	dir := t.TempDir()
	link := filepath.Join(dir, "link")
	program := filepath.Join(dir, "crun")
	for _, err := range []error{os.Symlink(dir, link), os.WriteFile(program, nil, 0o755)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", dir)
	for name, c := range map[string]struct{ crio, crius string }{
		"a slash at the end":     {"[crio.network]\nnetwork_dir = '/nonexistent/net.d/'", "[network]\nconf_dir = '/nonexistent/net.d'"},
		"a link":                 {fmt.Sprintf("[crio.runtime]\nseccomp_profile = '%s/x'", dir), fmt.Sprintf("[pod]\nseccomp_profile = '%s/x'", link)},
		"an order":               {"[crio.runtime]\ndefault_capabilities = ['KILL', 'CAP_CHOWN']", "[pod]\ndefault_capabilities = ['CHOWN', 'KILL']"},
		"directories not there":  {fmt.Sprintf("[crio.network]\nplugin_dirs = [%q]", dir), fmt.Sprintf("[network]\nplugin_dirs = ['/nonexistent', %q]", dir)},
		"a default written out":  {"[crio.image]\nsignature_policy = '/etc/containers/policy.json'", ""},
		"a program and its path": {fmt.Sprintf("[crio.runtime.runtimes.crun]\nruntime_path = %q", program), ""},
		"a handler of crius":     {"", "[runtime.handlers.own]\npath = 'own'"},
	} {
		t.Run(name, func(t *testing.T) {
			compared := compared(t, c.crio, c.crius)
			equal(t, "differences", keysOf(compared), []string{})
			equal(t, "missing", len(compared.Missing), 0)
		})
	}
	// A search path in another order is different.
	c := compared(t, fmt.Sprintf("[crio.network]\nplugin_dirs = [%q, '/']", dir), fmt.Sprintf("[network]\nplugin_dirs = ['/', %q]", dir))
	equal(t, "differences", keysOf(c), []string{"network.plugin_dirs"})
}

func TestCompareHandlers(t *testing.T) {
	crio := "[crio.runtime]\ndefault_runtime = 'kata'\n[crio.runtime.runtimes.kata]\nruntime_type = 'vm'\nruntime_path = '/opt/kata'\n" +
		"[crio.runtime.runtimes.runc]\nruntime_path = '/opt/runc'\n"
	c := compared(t, crio, "")
	equal(t, "handlers", c.Handlers, []string{"kata", "runc"})
	equal(t, "missing", c.Missing, []string{"kata"})
	equal(t, "differences", keysOf(c), []string{"runtime.handlers.runc.path"})
	// CRI-O has its default handler even without a table.
	equal(t, "handlers", compared(t, "", "").Handlers, []string{"crun"})
}

func TestInputs(t *testing.T) {
	n := newNode(t)
	n.write(n.file, "[image]\nauth_file = '/a'\nroot = '/r'\nsignature_policy = ''\n[network]\nplugin_dirs = ['/b', '/c']\n[runtime.handlers.x]\npath = '/d'\nfeatures = '/e'\n")
	l, err := n.load()
	if err != nil {
		t.Fatal(err)
	}
	var paths []string
	for _, s := range l.Inputs() {
		paths = append(paths, s.Key+" "+s.Value)
	}
	equal(t, "inputs", paths, []string{"runtime.handlers.x.features /e", "image.auth_file /a", "network.plugin_dirs /b", "network.plugin_dirs /c"})
}
