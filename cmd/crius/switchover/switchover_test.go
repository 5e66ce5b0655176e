package switchover

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/crius-run/crius/cmd/crius/config"
	"github.com/crius-run/crius/cmd/crius/config/foreign"
	"github.com/crius-run/crius/cmd/crius/diagnosis"
	testprogram "github.com/crius-run/crius/test/kit/program"
)

// switched returns the findings if crius, with this configuration, replaced CRI-O, with
// that one. DIR stands for a directory with two runtimes, a monitor and the network "net"
// with its plugin.
func switched(t *testing.T, crio, crius string, files map[string]string) []diagnosis.Finding {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{
		"runc":          "#!/bin/sh\necho runc version 1.3.5\n",
		"crun":          "#!/bin/sh\necho crun version 1.21\n",
		"monitor":       "#!/bin/sh\n",
		"plugin":        "#!/bin/sh\necho '{\"cniVersion\": \"1.0.0\", \"supportedVersions\": [\"1.0.0\"]}'\n",
		"a.conflist":    `{"cniVersion": "1.0.0", "name": "net", "plugins": [{"type": "plugin"}]}`,
		"etc/crio.conf": strings.ReplaceAll(crio, "DIR", dir),
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := testprogram.Write(path, []byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	imp, err := foreign.CRIO(filepath.Join(dir, "etc"))
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	for path, text := range files {
		path = filepath.Join(root, path)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	file := filepath.Join(root, "crius.toml")
	if err := os.WriteFile(file, []byte(strings.ReplaceAll(crius, "DIR", dir)), 0o600); err != nil {
		t.Fatal(err)
	}
	now, err := config.Load(config.Sources{File: file})
	if err != nil {
		t.Fatal(err)
	}
	checks, err := Checks(imp, now, root)
	if err != nil {
		t.Fatal(err)
	}
	var findings []diagnosis.Finding
	for _, c := range checks {
		for _, f := range c.Run(t.Context()) {
			f.Check = c.Name
			findings = append(findings, f)
		}
	}
	return findings
}

// find returns the first finding whose text contains a word.
func find(t *testing.T, findings []diagnosis.Finding, word string) diagnosis.Finding {
	t.Helper()
	at := slices.IndexFunc(findings, func(f diagnosis.Finding) bool { return strings.Contains(f.Text, word) })
	if at < 0 {
		t.Fatalf("nothing is said about %q in %+v", word, findings)
	}
	return findings[at]
}

const (
	crioHere = "[crio.network]\nnetwork_dir = 'DIR'\nplugin_dirs = ['DIR']\n" +
		"[crio.runtime]\ndefault_runtime = 'runc'\n[crio.runtime.runtimes.runc]\nruntime_path = 'DIR/runc'\n"
	criusHere = "api.crio_socket = '/run/crio/crio.sock'\napi.max_message_size = 83886080\nimage.short_name_mode = 'enforcing'\nnetwork.conf_dir = 'DIR'\nnetwork.plugin_dirs = ['DIR']\n" +
		"runtime.monitor = 'DIR/monitor'\nruntime.handlers.runc.path = 'DIR/runc'\n"
)

var kubeletHere = map[string]string{
	"var/lib/kubelet/config.yaml": "cgroupDriver: systemd\ncontainerRuntimeEndpoint: unix:///run/crius/crius.sock\n",
	"etc/crictl.yaml":             "runtime-endpoint: unix:///var/run/crio/crio.sock\n",
}

// On a prepared node nothing is left to do.
func TestSwitchOfPreparedNode(t *testing.T) {
	findings := switched(t, crioHere, criusHere, kubeletHere)
	for _, f := range findings {
		if f.Status != diagnosis.StatusOK && f.Check != "settings" { // lists defaults that differ
			t.Errorf("%+v", f)
		}
	}
	for _, word := range []string{"etc/crio.conf", "have the same values in crius", "runc version 1.3.5", "systemd driver, as for CRI-O", `network "net"`, "where crius listens", "missing or CRI-O's"} {
		if f := find(t, findings, word); f.Status != diagnosis.StatusOK {
			t.Errorf("%+v", f)
		}
	}
}

func TestSwitchFindsDifferences(t *testing.T) {
	for name, c := range map[string]struct {
		crio, crius string // in addition to the above
		files       map[string]string
		word        string
		want        diagnosis.Status
		do          string
	}{
		"a setting without counterpart": {crio: "[crio.image]\ndefault_transport = 'oci:'\n", word: "images are pulled from registries only", want: diagnosis.StatusWarn},
		"lines of another file":         {crio: "[crio.image]\ninsecure_registries = ['r:5000']\n", word: "or their images cannot be pulled: crius config --from-crio prints the lines", want: diagnosis.StatusWarn},
		"another value":                 {crio: "[crio.image]\nimage_volumes = 'bind'\n", word: `image.volumes: "bind" for CRI-O (`, want: diagnosis.StatusWarn, do: `set image.volumes = "bind" to have the same`},
		"a value that only crius has":   {crius: "image.volumes = 'bind'\n", word: `image.volumes: "bind" for crius (file `, want: diagnosis.StatusWarn, do: "remove it from the configuration of crius, unless it is intended"},
		"a handler":                     {crio: "[crio.runtime.runtimes.kata]\nruntime_path = 'DIR/crun'\n", word: "kata: crius has no such handler: its pods, which CRI-O can run, do not start", want: diagnosis.StatusFail, do: "add [runtime.handlers.kata]: crius config --from-crio prints it"},
		"a handler that nobody runs":    {crio: "[crio.runtime.runtimes.kata]\nruntime_path = '/nonexistent/kata'\n", word: "CRI-O cannot run its pods either", want: diagnosis.StatusWarn},
		"a runtime":                     {crio: "[crio.runtime.runtimes.crun]\nruntime_path = 'DIR/crun'\n", crius: "runtime.handlers.crun.path = '/nonexistent/crun'\n", word: "crun: ", want: diagnosis.StatusFail, do: "install the runtime, or correct runtime.handlers.crun.path"},
		"the cgroup driver":             {crius: "runtime.cgroup_driver = 'cgroupfs'\n", word: "the kubelet's cgroup driver is systemd", want: diagnosis.StatusFail, do: `set runtime.cgroup_driver = "systemd"`},
		"the cgroup driver alone":       {crius: "runtime.cgroup_driver = 'cgroupfs'\n", files: map[string]string{}, word: `runtime.cgroup_driver: "systemd" for CRI-O`, want: diagnosis.StatusWarn},
		"the endpoint": {files: map[string]string{"var/lib/kubelet/kubeadm-flags.env": "KUBELET_KUBEADM_ARGS=\"--container-runtime-endpoint=unix:///run/containerd/containerd.sock\"\n"},
			word: "where crius does not listen", want: diagnosis.StatusFail, do: "set it to unix:///run/crius/crius.sock with the switch"},
		"the endpoint of CRI-O": {files: map[string]string{"var/lib/kubelet/config.yaml": "containerRuntimeEndpoint: unix:///var/run/crio/crio.sock\n"},
			word: "where crius answers for api.crio_socket", want: diagnosis.StatusWarn},
		"the endpoint of crictl": {files: map[string]string{"etc/crictl.yaml": "image-endpoint: unix:///x\nruntime-endpoint: \"unix:///run/containerd/containerd.sock\"\n"},
			word: "crictl uses unix:///run/containerd/containerd.sock (/etc/crictl.yaml), where crius does not listen", want: diagnosis.StatusWarn, do: "set it to unix:///run/crius/crius.sock with the switch"},
		"the endpoint of kubeadm": {files: map[string]string{"var/lib/kubelet/instance-config.yaml": "containerRuntimeEndpoint: unix:///run/containerd/containerd.sock\n"},
			word: "kubeadm's next upgrade has the kubelet use unix:///run/containerd/containerd.sock (/var/lib/kubelet/instance-config.yaml)", want: diagnosis.StatusWarn},
		"no kubelet":        {files: map[string]string{}, word: "do not say where it looks", want: diagnosis.StatusWarn},
		"a file":            {crius: "image.auth_file = '/nonexistent/auth.json'\n", word: "image.auth_file: /nonexistent/auth.json does not exist", want: diagnosis.StatusWarn},
		"keys of images":    {crius: "image.decryption_keys_path = '/nonexistent/keys'\n", word: "missing or CRI-O's", want: diagnosis.StatusOK},
		"image verifiers":   {crius: "image.verifiers_dir = '/nonexistent/verifiers'\n", word: "image.verifiers_dir: /nonexistent/verifiers does not exist", want: diagnosis.StatusWarn},
		"metrics of pods":   {crius: "api.crio_socket = ''\n", word: "lack pod names", want: diagnosis.StatusWarn},
		"the network":       {crius: "network.conf_dir = '/nonexistent'\n", word: `pods would not get into network "net"`, want: diagnosis.StatusFail},
		"the network again": {crius: "network.default_network = 'other'\n", word: `no CNI configuration for network "other"`, want: diagnosis.StatusFail},
	} {
		t.Run(name, func(t *testing.T) {
			files := kubeletHere
			if c.files != nil {
				files = c.files
			}
			findings := switched(t, crioHere+c.crio, merged(criusHere, c.crius), files)
			f := find(t, findings, c.word)
			if f.Status != c.want || c.do != "" && f.Do != c.do || strings.HasSuffix(f.Text, ": unavailable") {
				t.Errorf("%+v, want %s with the advice %q", f, c.want, c.do)
			}
		})
	}
}

// merged replaces lines by those in over that have the same key.
func merged(lines, over string) string {
	var b strings.Builder
	for line := range strings.Lines(lines) {
		if key, _, _ := strings.Cut(line, " ="); !strings.Contains(over, key+" =") {
			b.WriteString(line)
		}
	}
	return b.String() + over
}

// Files of CRI-O's packages are removed with them.
func TestSwitchNamesWhatIsCrios(t *testing.T) {
	for path, want := range map[string]bool{"/etc/crio/policy.json": true, "/usr/libexec/crio/crun": true, "/usr/bin/crun": false, "/etc/crios": false} {
		if isCrios(path) != want {
			t.Errorf("%s: %v", path, !want)
		}
	}
}

// A hook that CRI-O leaves out, and that would keep crius from creating any container, is found before
// the switch.
func TestSwitchFindsHooksThatCannotBeRead(t *testing.T) {
	dir := t.TempDir()
	crio := strings.Replace(crioHere, "default_runtime", fmt.Sprintf("hooks_dir = [%q]\ndefault_runtime", dir), 1)
	for text, want := range map[string]diagnosis.Status{
		`{"hook": "/bin/true", "stages": ["prestart"], "cmds": ["x"]}`: diagnosis.StatusOK, // schema 0.1.0
		`{"version": "3"}`: diagnosis.StatusFail,
	} {
		if err := os.WriteFile(filepath.Join(dir, "own.json"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		found := false
		for _, f := range switched(t, crio, criusHere, kubeletHere) {
			found = found || f.Check == "hooks" && f.Status == want
		}
		if !found {
			t.Errorf("%s: no finding %v about hooks", text, want)
		}
	}
}
