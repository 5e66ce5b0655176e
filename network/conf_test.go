package network

import (
	"bytes"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
)

func named(name string) string {
	return `{"cniVersion": "1.0.0", "name": "` + name + `", "plugins": [{"type": "bridge"}]}`
}

// at returns a network over a configuration directory with the given files.
func at(t testing.TB, defaultNetwork string, files map[string]string) (*Network, string) {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	cfg := Options{Config: DefaultConfig()}
	cfg.ConfDir, cfg.DefaultNetwork = dir, defaultNetwork
	return New(cfg), dir
}

func TestChoose(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		files          map[string]string
		defaultNetwork string
		want           string // name of the network; empty: fault.Unavailable
	}{
		"alphabetical":         {map[string]string{"20-b.conflist": named("b"), "10-z.conflist": named("z")}, "", "z"},
		"across extensions":    {map[string]string{"10-a.json": `{"name": "j", "type": "x"}`, "05-b.conf": `{"name": "c", "type": "x"}`, "20.conflist": named("l")}, "", "c"},
		"by name":              {map[string]string{"10-a.conflist": named("a"), "20-b.conflist": named("b")}, "b", "b"},
		"first of that name":   {map[string]string{"10-a.conf": `{"name": "a", "type": "first"}`, "20-a.conflist": named("a")}, "a", "a"},
		"name not there":       {map[string]string{"10-a.conflist": named("a")}, "b", ""},
		"others are ignored":   {map[string]string{"00-a.conflist.bak": named("x"), "00.txt": named("y"), ".conflist~": named("z"), "10.conflist": named("a")}, "", "a"},
		"directory":            {map[string]string{"00-dir.conflist/x": "x", "10.conflist": named("a")}, "", "a"},
		"broken passed over":   {map[string]string{"00.conflist": "{", "10.conflist": named("a")}, "", "a"},
		"empty file":           {map[string]string{"00.conflist": "", "10.conflist": named("a")}, "", "a"},
		"no name":              {map[string]string{"00.conflist": `{"plugins": [{"type": "x"}]}`, "10.conflist": named("a")}, "", "a"},
		"name is a path":       {map[string]string{"00.conflist": named("../../x"), "10.conflist": named("a")}, "", "a"},
		"no plugins":           {map[string]string{"00.conflist": `{"name": "n", "plugins": []}`, "10.conflist": named("a")}, "", "a"},
		"no plugins key":       {map[string]string{"00.conflist": `{"name": "n"}`, "10.conflist": named("a")}, "", "a"},
		"plugin without type":  {map[string]string{"00.conflist": `{"name": "n", "plugins": [{}]}`, "10.conflist": named("a")}, "", "a"},
		"plugin is a path":     {map[string]string{"00.conflist": `{"name": "n", "plugins": [{"type": "../../bin/sh"}]}`, "10.conflist": named("a")}, "", "a"},
		"ipam is a path":       {map[string]string{"00.conflist": `{"name": "n", "plugins": [{"type": "x", "ipam": {"type": "/bin/sh"}}]}`, "10.conflist": named("a")}, "", "a"},
		"version of tomorrow":  {map[string]string{"00.conflist": `{"cniVersion": "2.0.0", "name": "n", "plugins": [{"type": "x"}]}`, "10.conflist": named("a")}, "", "a"},
		"version is nonsense":  {map[string]string{"00.conflist": `{"cniVersion": "new", "name": "n", "plugins": [{"type": "x"}]}`, "10.conflist": named("a")}, "", "a"},
		"too large":            {map[string]string{"00.conflist": strings.Repeat(" ", maxConf) + named("big"), "10.conflist": named("a")}, "", "a"},
		"list in a .conf":      {map[string]string{"00.conf": named("a")}, "", "a"},
		"single in a conflist": {map[string]string{"00.conflist": `{"name": "a", "type": "x"}`}, "", "a"},
		"nothing":              {nil, "", ""},
		"only broken":          {map[string]string{"00.conflist": "{"}, "", ""},
	} {
		n, dir := at(t, c.defaultNetwork, c.files)
		chosen, err := n.choose()
		if c.want == "" {
			if !errors.Is(err, fault.Unavailable) || !strings.Contains(err.Error(), dir) {
				t.Errorf("%s: %v; want fault.Unavailable that names %s", name, err, dir)
			}
			if ready := n.Ready(t.Context()); !errors.Is(ready, fault.Unavailable) {
				t.Errorf("%s: ready: %v", name, ready)
			}
			if c.files["00.conflist"] != "" && !strings.Contains(err.Error(), "00.conflist is unusable") {
				t.Errorf("%s: %v does not name the unusable file", name, err)
			}
			continue
		}
		if err != nil || chosen.list.Name != c.want {
			t.Errorf("%s: %+v, %v; want %s", name, chosen, err, c.want)
		}
	}
	n, dir := at(t, "", nil)
	os.Remove(dir)
	if err := n.Ready(t.Context()); !errors.Is(err, fault.Unavailable) || !strings.Contains(err.Error(), dir) {
		t.Errorf("without the directory: %v", err)
	}
}

// The reason becomes a condition of the node, which must not change each time.
func TestMissingIsStable(t *testing.T) {
	t.Parallel()
	n, _ := at(t, "", map[string]string{"1.conf": "{", "2.conf": "[]", "3.conf": "", "4.conf": "{}"})
	_, first := n.choose()
	for range 20 {
		if _, err := n.choose(); err.Error() != first.Error() {
			t.Fatalf("%v\nand then %v", first, err)
		}
	}
}

// A FIFO in the directory must not hang the node.
func TestChooseFifo(t *testing.T) {
	t.Parallel()
	n, dir := at(t, "", map[string]string{"10.conflist": named("a")})
	if err := unix.Mkfifo(filepath.Join(dir, "00.conflist"), 0o600); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if chosen, err := n.choose(); err != nil || chosen.list.Name != "a" {
			t.Errorf("%+v, %v", chosen, err)
		}
	}()
	select {
	case <-done:
	case <-time.After(time.Minute):
		t.Fatal("hangs")
	}
}

// Every way to replace a configuration takes effect at once.
func TestReplacedConfigurationIsSeen_containerd_11715(t *testing.T) {
	t.Parallel()
	n, dir := at(t, "", map[string]string{"10.conflist": named("aa"), "v1/net": named("v1"), "v2/net": named("v2")})
	see := func(want string) {
		t.Helper()
		if chosen, err := n.choose(); err != nil || chosen.list.Name != want {
			t.Errorf("chosen %+v, %v; want %s", chosen, err, want)
		}
	}
	file := filepath.Join(dir, "10.conflist")
	see("aa")
	for i := range 50 { // in place, same size, within one tick of the file system's clock
		name := []string{"bb", "cc"}[i%2]
		if err := os.WriteFile(file, []byte(named(name)), 0o644); err != nil {
			t.Fatal(err)
		}
		see(name)
	}
	fresh := filepath.Join(dir, "new")
	if err := errors.Join(os.WriteFile(fresh, []byte(named("dd")), 0o644), os.Chtimes(fresh, time.Unix(0, 0), time.Unix(0, 0)), os.Rename(fresh, file)); err != nil {
		t.Fatal(err)
	}
	see("dd")
	// As in a ConfigMap volume: a link through another link that is swapped.
	link := filepath.Join(dir, "..data")
	if err := errors.Join(os.Symlink("v1", link), os.Remove(file), os.Symlink("..data/net", file)); err != nil {
		t.Fatal(err)
	}
	see("v1")
	if err := errors.Join(os.Symlink("v2", link+"_tmp"), os.Rename(link+"_tmp", link)); err != nil {
		t.Fatal(err)
	}
	see("v2")
	if err := os.WriteFile(filepath.Join(dir, "00.conflist"), []byte(named("first")), 0o644); err != nil {
		t.Fatal(err)
	}
	see("first")
}

// Plugins in their own files (CNI 1.1) are in the record, too.
func TestPluginDirectory(t *testing.T) {
	t.Parallel()
	n, dir := at(t, "", map[string]string{
		"10.conflist":   `{"cniVersion": "1.0.0", "cniVersions": ["0.4.0", "1.1.0"], "name": "net", "plugins": [{"type": "one"}], "disableCheck": true, "x": 1}`,
		"net/20.conf":   `{"type": "three", "capabilities": {"dns": true}}`,
		"net/10.conf":   `{"type": "two"}`,
		"net/readme.md": `{"type": "four"}`,
	})
	chosen, err := n.choose()
	if err != nil {
		t.Fatal(err)
	}
	os.RemoveAll(dir)
	back, err := parse(chosen.list.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	if back.CNIVersion != "1.1.0" || !back.DisableCheck || strings.Contains(string(back.Bytes), "0.4.0") || typesOf(back) != "one two three" || !back.Plugins[2].Network.Capabilities["dns"] {
		t.Errorf("got back %+v: %s", back, back.Bytes)
	}
	n, _ = at(t, "", map[string]string{
		"00.conflist": `{"cniVersion": "1.0.0", "name": "net", "plugins": [{"type": "one"}]}`,
		"net/10.conf": `{"type":`,
		"10.conflist": `{"cniVersion": "1.0.0", "name": "net", "plugins": [{"type": "two"}], "loadOnlyInlinedPlugins": true}`,
	})
	if chosen, err := n.choose(); err != nil || typesOf(chosen.list) != "two" {
		t.Errorf("%+v, %v", chosen, err)
	}
}

func typesOf(list *libcni.NetworkConfigList) string {
	var all []string
	for _, plugin := range list.Plugins {
		all = append(all, plugin.Network.Type)
	}
	return strings.Join(all, " ")
}

// Not parallel: it replaces the process's log.
func TestBrokenIsLoggedOnce(t *testing.T) {
	var log bytes.Buffer
	defer slog.SetDefault(slog.Default())
	slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))
	n, dir := at(t, "", map[string]string{"00.conflist": "{", "10.conflist": named("a")})
	lines := func() int { return strings.Count(log.String(), "\n") }
	for range 3 {
		n.choose()
	}
	if lines() != 1 || !strings.Contains(log.String(), "00.conflist") {
		t.Errorf("log: %s", log.String())
	}
	os.WriteFile(filepath.Join(dir, "00.conflist"), []byte("[]"), 0o600)
	n.choose()
	n.choose()
	if lines() != 2 {
		t.Errorf("another reason is another line: %s", log.String())
	}
	os.WriteFile(filepath.Join(dir, "00.conflist"), []byte(named("b")), 0o600)
	n.choose()
	os.WriteFile(filepath.Join(dir, "00.conflist"), []byte("[]"), 0o600)
	n.choose()
	if lines() != 3 {
		t.Errorf("broken again after it was mended: %s", log.String())
	}
}

func TestInfo(t *testing.T) {
	t.Parallel()
	n, dir := at(t, "", map[string]string{"10.conflist": `{"cniVersion": "1.0.0", "name": "a", "plugins": [{"type": "no-such-plugin"}]}`})
	if err := n.SetPodCIDR("10.1.0.0/16"); err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(n.Info())
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{dir, "10.conflist", `"network":"a"`, `"plugins":["no-such-plugin"]`, `"cniVersion":"1.0.0"`, "/opt/cni/bin", "is not installed", "10.1.0.0/16"} {
		if !strings.Contains(string(text), want) {
			t.Errorf("no %s in %s", want, text)
		}
	}
}

// parse accepts its own result, which is kept in the record.
func FuzzParse(f *testing.F) {
	for _, seed := range []string{named("a"), bridgeConf(range4), ptpConf(range6), askingConf, `{"name": "a", "type": "b"}`, `{"name":"a","cniVersions":["1.0.0"],"plugins":[{"type":"x","ipam":{}}]}`, "[]", "null", "{}"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		list, err := parse(text)
		if err != nil {
			return
		}
		again, err := parse(list.Bytes)
		if err != nil || !bytes.Equal(again.Bytes, list.Bytes) || again.Name != list.Name || again.CNIVersion != list.CNIVersion || typesOf(again) != typesOf(list) {
			t.Errorf("%s\nbecomes %s\nand then %+v, %v", text, list.Bytes, again, err)
		}
		a := &Attachment{Conf: list.Bytes, Result: json.RawMessage(`{"cniVersion": "1.0.0"}`)}
		if err := a.remember(again); err != nil {
			t.Errorf("%s: %v", text, err)
		}
	})
}
