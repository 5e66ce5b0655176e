package network

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/crius-run/crius/internal/fault"
)

const confTemplate = `{"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "ptp", "first": "{{.PodCIDR}}", "ipam": {"type": "host-local",
	"ranges": [{{range $i, $r := .PodCIDRRanges}}{{if $i}}, {{end}}[{"subnet": "{{$r}}"}]{{end}}],
	"routes": [{{range $i, $r := .Routes}}{{if $i}}, {{end}}{"dst": "{{$r}}"}{{end}}]}}]}`

// templated is a network with a template and an empty configuration directory.
func templated(t *testing.T, text string) (*Network, Options) {
	t.Helper()
	dir := t.TempDir()
	cfg := Options{Config: DefaultConfig()}
	cfg.ConfDir, cfg.ConfTemplate = filepath.Join(dir, "net.d"), filepath.Join(dir, "template")
	cfg.PodCIDRFile = filepath.Join(dir, "state", "podcidr")
	if err := os.WriteFile(cfg.ConfTemplate, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return New(cfg), cfg
}

func TestSetPodCIDR(t *testing.T) {
	t.Parallel()
	n, cfg := templated(t, confTemplate)
	file := filepath.Join(cfg.ConfDir, rendered)
	for _, c := range []struct{ cidr, want string }{
		{"10.1.2.0/24", `"first": "10.1.2.0/24", "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.1.2.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}`},
		{"10.1.2.3/24, fd00:0::/64", `"first": "10.1.2.0/24", "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.1.2.0/24"}], [{"subnet": "fd00::/64"}]], "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]}`},
		{"fd00::/64,fd01::/64", `"first": "fd00::/64", "ipam": {"type": "host-local", "ranges": [[{"subnet": "fd00::/64"}], [{"subnet": "fd01::/64"}]], "routes": [{"dst": "::/0"}]}`},
	} {
		if err := n.SetPodCIDR(c.cidr); err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(file)
		if got := strings.Join(strings.Fields(string(text)), " "); err != nil || !strings.Contains(got, c.want) {
			t.Errorf("%s: %v\n%s\nlacks %s", c.cidr, err, got, c.want)
		}
		if chosen, err := n.choose(); err != nil || chosen.file != file {
			t.Errorf("%s: chosen %+v, %v", c.cidr, chosen, err)
		}
	}

	// An unchanged file is not touched, and a mistake changes nothing.
	before, _ := os.Stat(file)
	for cidr, want := range map[string]error{
		"fd00::/64,fd01::/64": nil, "": nil, "  ": nil,
		"10.0.0.0": fault.Invalid, "10.0.0.0/33": fault.Invalid, "10.0.0.0/8,": fault.Invalid, "x": fault.Invalid, `10.0.0.0/8"}`: fault.Invalid,
	} {
		if err := n.SetPodCIDR(cidr); !errors.Is(err, want) {
			t.Errorf("SetPodCIDR(%q) = %v, want %v", cidr, err, want)
		}
		if after, err := os.Stat(file); err != nil || !os.SameFile(before, after) || before.ModTime() != after.ModTime() {
			t.Errorf("%q: the file was written again, %v", cidr, err)
		}
	}
	if entries, _ := os.ReadDir(cfg.ConfDir); len(entries) != 1 {
		t.Errorf("left in %s: %v", cfg.ConfDir, entries)
	}

	// The kubelet announces it only once: it must survive a restart.
	if got := New(cfg).announced(); strings.Join(got, " ") != "fd00::/64 fd01::/64" {
		t.Errorf("after a restart: %q", got)
	}
}

// The kubelet does not announce its ranges again after a reload.
func TestTemplateAfterReload(t *testing.T) {
	t.Parallel()
	n, dir := at(t, "", nil)
	if err := n.SetPodCIDR("10.1.0.0/16"); err != nil {
		t.Fatal(err)
	}
	cfg := n.config().Config
	cfg.ConfTemplate = filepath.Join(t.TempDir(), "template")
	if err := os.WriteFile(cfg.ConfTemplate, []byte(confTemplate), 0o600); err != nil {
		t.Fatal(err)
	}
	n.Configure(cfg)
	other := t.TempDir()
	cfg.ConfDir = other
	n.Configure(cfg)
	for _, dir := range []string{dir, other} {
		if text, err := os.ReadFile(filepath.Join(dir, rendered)); err != nil || !strings.Contains(string(text), "10.1.0.0/16") {
			t.Errorf("in %s: %s, %v", dir, text, err)
		}
	}
}

func TestSetPodCIDRWithoutTemplate(t *testing.T) {
	t.Parallel()
	n, dir := at(t, "", nil)
	if err := n.SetPodCIDR("10.1.0.0/16"); err != nil {
		t.Error(err)
	}
	if entries, _ := os.ReadDir(dir); len(entries) != 0 {
		t.Errorf("made %v", entries)
	}
}

func TestBadTemplate(t *testing.T) {
	t.Parallel()
	for name, text := range map[string]string{
		"syntax":        `{{`,
		"unknown field": `{{.Nothing}}`,
		"not a network": `{"name": "x"}`,
		"not JSON":      `{{.PodCIDR}}`,
	} {
		n, cfg := templated(t, text)
		if err := n.SetPodCIDR("10.1.0.0/16"); !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), cfg.ConfTemplate) {
			t.Errorf("%s: %v", name, err)
		}
		if entries, _ := os.ReadDir(cfg.ConfDir); len(entries) != 0 {
			t.Errorf("%s: made %v", name, entries)
		}
	}
	n, cfg := templated(t, "")
	os.Remove(cfg.ConfTemplate)
	if err := n.SetPodCIDR("10.1.0.0/16"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("template missing: %v", err)
	}
}

// A reader sees one rendering or another, never a part.
func TestRenderIsAtomic(t *testing.T) {
	t.Parallel()
	n, cfg := templated(t, confTemplate)
	if err := n.SetPodCIDR("10.0.0.0/24"); err != nil {
		t.Fatal(err)
	}
	var wait sync.WaitGroup
	done := make(chan struct{})
	wait.Go(func() {
		reader := New(cfg)
		for {
			select {
			case <-done:
				return
			default:
			}
			if _, err := reader.choose(); err != nil {
				t.Error(err)
				return
			}
		}
	})
	for i := range 50 {
		if err := n.SetPodCIDR([]string{"10.1.0.0/24", "10.1.0.0/24,fd00::/64"}[i%2]); err != nil {
			t.Error(err)
		}
	}
	close(done)
	wait.Wait()
}

// Accepted ranges are addresses in canonical form: they are written to a file,
// and read from it after a restart.
func FuzzPodCIDR(f *testing.F) {
	for _, cidr := range []string{"10.1.2.3/24, fd00:0::/64", "0.0.0.0/0,::/0", "::ffff:10.0.0.1/120", "10.0.0.0/33", "fe80::1%eth0/64", ",", "\xff/8"} {
		f.Add(cidr)
	}
	f.Fuzz(func(t *testing.T, cidr string) {
		ranges, err := parseRanges(cidr)
		if err != nil {
			if !errors.Is(err, fault.Invalid) || len(err.Error()) > 1000 {
				t.Errorf("%q: %v", cidr, err)
			}
			return
		}
		text := strings.Join(ranges.PodCIDRRanges, ",")
		again, err := parseRanges(text)
		if err != nil || strings.Join(again.PodCIDRRanges, ",") != text || strings.Join(again.Routes, ",") != strings.Join(ranges.Routes, ",") {
			t.Errorf("%q became %+v, and that %+v, %v", cidr, ranges, again, err)
		}
		for _, one := range ranges.PodCIDRRanges {
			if p, err := netip.ParsePrefix(one); err != nil || p != p.Masked() {
				t.Errorf("%q gives %q", cidr, one)
			}
		}
		if len(ranges.Routes) > 2 || len(ranges.Routes) == 0 {
			t.Errorf("%q gives the routes %q", cidr, ranges.Routes)
		}
	})
}
