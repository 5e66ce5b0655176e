package integration

import (
	"encoding/json"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/testkit/kubelet"
	"github.com/crius-run/crius/internal/testkit/node"
)

var semver = regexp.MustCompile(`^v?[0-9]+\.[0-9]+\.[0-9]+([-+].*)?$`)

func TestVersion(t *testing.T) {
	t.Parallel()
	w := shared(t)
	v, err := w.Runtime().Version(t.Context(), &cri.VersionRequest{})
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "version", v.Version, "0.1.0") // a kubelet refuses anything else
	equal(t, "name", v.RuntimeName, "crius")
	equal(t, "API version", v.RuntimeApiVersion, "v1")
	if !semver.MatchString(v.RuntimeVersion) {
		t.Errorf("version %q is not semantic", v.RuntimeVersion)
	}
}

func (w *world) statusOf(t *testing.T) *cri.StatusResponse {
	t.Helper()
	s, err := w.Runtime().Status(t.Context(), &cri.StatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// condition returns one condition; kind is RuntimeReady or NetworkReady.
func (w *world) condition(t *testing.T, kind string) *cri.RuntimeCondition {
	t.Helper()
	for _, c := range w.statusOf(t).Status.Conditions {
		if c.Type == kind {
			return c
		}
	}
	t.Fatalf("no condition %s", kind)
	return nil
}

func TestStatusOfAHealthyNode(t *testing.T) {
	t.Parallel()
	w := shared(t)
	for _, kind := range []string{"RuntimeReady", "NetworkReady"} {
		if c := w.condition(t, kind); !c.Status {
			t.Errorf("%s is false: %s: %s", kind, c.Reason, c.Message)
		}
	}
	var first []string
	for range 10 {
		s := w.statusOf(t)
		var names []string
		for _, h := range s.RuntimeHandlers {
			names = append(names, h.Name)
			if h.Features == nil {
				t.Errorf("handler %q tells no features", h.Name)
			}
		}
		if first == nil {
			first = names
			equalSet(t, "handlers", names, []string{"", "runc", "crun"})
		}
		equalSlices(t, "order of the handlers", names, first)
		if !s.Features.GetSupplementalGroupsPolicy() {
			t.Error("supplemental_groups_policy is not announced")
		}
		if len(s.Info) != 0 {
			t.Errorf("info was not asked for: %v", s.Info)
		}
	}
	verbose, err := w.Runtime().Status(t.Context(), &cri.StatusRequest{Verbose: true})
	if err != nil {
		t.Fatal(err)
	}
	if len(verbose.Info) == 0 {
		t.Error("a verbose status has no info")
	}
	for key, value := range verbose.Info {
		if !json.Valid([]byte(value)) {
			t.Errorf("info %s is no JSON: %.100s", key, value)
		}
	}
}

func TestVerboseInfoIsJSON(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "runc")
	c := p.start(t, "sleep")
	pod, err := w.Runtime().PodSandboxStatus(t.Context(), &cri.PodSandboxStatusRequest{PodSandboxId: p.id, Verbose: true})
	if err != nil {
		t.Fatal(err)
	}
	ctr, err := w.Runtime().ContainerStatus(t.Context(), &cri.ContainerStatusRequest{ContainerId: c.id, Verbose: true})
	if err != nil {
		t.Fatal(err)
	}
	img, err := w.Images().ImageStatus(t.Context(), &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: probe}, Verbose: true})
	if err != nil {
		t.Fatal(err)
	}
	for what, info := range map[string]map[string]string{"pod": pod.Info, "container": ctr.Info, "image": img.Info} {
		if len(info) == 0 {
			t.Errorf("verbose status of a %s has no info", what)
		}
		for key, value := range info {
			if !json.Valid([]byte(value)) {
				t.Errorf("info %s of a %s is no JSON: %.100s", key, what, value)
			}
		}
	}
}

func TestRuntimeConfigTellsTheCgroupDriver(t *testing.T) {
	t.Parallel()
	w := shared(t)
	c, err := w.Runtime().RuntimeConfig(t.Context(), &cri.RuntimeConfigRequest{})
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "cgroup driver", c.GetLinux().GetCgroupDriver(), cri.CgroupDriver_CGROUPFS)
}

func TestNotReadyWithoutARuntime(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{Config: `[runtime.handlers.absent]
path = "{{.Path "absent"}}"
`})
	c := w.condition(t, "RuntimeReady")
	if c.Status || !strings.Contains(c.Message, "absent") || c.Reason == "" {
		t.Errorf("with a handler whose program is missing: %v", c)
	}
	// The other handlers still work, and the missing one says why it doesn't.
	w.run(t, "runc").finish(t, "echo works")
	config := w.podConfig(t)
	resp, err := w.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: config, RuntimeHandler: "absent"})
	if err == nil { // a pod needs no runtime as long as it has no container
		p := &pod{w: w, id: resp.PodSandboxId, config: config, made: []string{resp.PodSandboxId}}
		_, err = p.try(t.Context(), steps("sleep"))
		p.vanish(t)
	}
	if err == nil || !strings.Contains(err.Error(), "absent") {
		t.Errorf("a container of that handler: %v", err)
	}
	runc, err := exec.LookPath("runc")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(runc, w.Path("absent")); err != nil {
		t.Fatal(err)
	}
	if !eventually(func() bool { return w.condition(t, "RuntimeReady").Status }) {
		t.Errorf("the program has come, but: %v", w.condition(t, "RuntimeReady"))
	}
}

func TestNetworkReadinessFollowsTheConfiguration(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	file := w.Path("cni", "net.d", "10-p.conflist")
	aside := w.Path("aside")
	for _, broken := range []func() error{
		func() error { return os.Rename(file, aside) },
		func() error { return os.WriteFile(file, []byte("{"), 0o600) },
		func() error {
			return os.WriteFile(file, []byte(`{"cniVersion":"1.0.0","name":"p","plugins":[{"type":"no-such-plugin"}]}`), 0o600)
		},
	} {
		if err := broken(); err != nil {
			t.Fatal(err)
		}
		if !eventually(func() bool { c := w.condition(t, "NetworkReady"); return !c.Status && c.Message != "" }) {
			t.Errorf("network is ready without a usable configuration")
		}
		if c := w.condition(t, "RuntimeReady"); !c.Status {
			t.Errorf("the runtime is not ready because of the network: %v", c)
		}
		_, err := w.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: w.podConfig(t)})
		wantCode(t, err, codes.Unavailable)
		w.run(t, "runc", kubelet.HostNetwork).finish(t, "echo runs", hostNetworkContainer)
	}
	if err := os.Rename(aside, file); err != nil {
		t.Fatal(err)
	}
	if !eventually(func() bool { return w.condition(t, "NetworkReady").Status }) {
		t.Errorf("the configuration is back, but: %v", w.condition(t, "NetworkReady"))
	}
	w.run(t, "runc").finish(t, "echo runs")
}

func TestUpdateRuntimeConfigRendersTheTemplate(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{Config: `[network]
conf_template = "{{.Path "template"}}"
`})
	put(t, w.Path("template"), `{"cniVersion":"1.0.0","name":"rendered","plugins":[{"type":"bridge","bridge":"crbr0",
		"ipam":{"type":"host-local","dataDir":"`+w.Path("cni", "leases")+`","ranges":[{{range $i, $r := .PodCIDRRanges}}{{if $i}},{{end}}[{"subnet":"{{$r}}"}]{{end}}]}}]}`)
	if err := os.Remove(w.Path("cni", "net.d", "10-p.conflist")); err != nil {
		t.Fatal(err)
	}
	_, err := w.Runtime().UpdateRuntimeConfig(t.Context(), &cri.UpdateRuntimeConfigRequest{
		RuntimeConfig: &cri.RuntimeConfig{NetworkConfig: &cri.NetworkConfig{PodCidr: "10.77.0.0/24"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	p := w.run(t, "runc")
	if ip := p.status(t).Network.GetIp(); !strings.HasPrefix(ip, "10.77.0.") {
		t.Errorf("the pod's address %s is not of the announced range", ip)
	}
	for _, bad := range []string{"not a range", "10.77.0.0/99", "10.0.0.0/8\"}]}"} {
		_, err := w.Runtime().UpdateRuntimeConfig(t.Context(), &cri.UpdateRuntimeConfigRequest{
			RuntimeConfig: &cri.RuntimeConfig{NetworkConfig: &cri.NetworkConfig{PodCidr: bad}},
		})
		wantCode(t, err, codes.InvalidArgument)
	}
}

func TestSocketIsForRootOnly(t *testing.T) {
	t.Parallel()
	w := shared(t)
	info, err := os.Stat(w.Socket())
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "mode of the socket", info.Mode().Perm(), 0o660)
}

// Others than root see nothing of containers, and reach no program of theirs:
// one may be setuid. Roots of user namespaces pass through the run directory, to
// containers of their own.
func TestCVE202141103(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "runc")
	p.start(t, "sleep")
	run := w.RunRoot()
	through := []string{run, filepath.Join(run, "pods"), filepath.Join(run, "containers")}
	seen := 0
	err := filepath.WalkDir(run, func(path string, e os.DirEntry, err error) error {
		if err != nil || !e.IsDir() {
			return nil // gone meanwhile
		}
		info, err := e.Info()
		if err != nil {
			return nil
		}
		seen++
		if slices.Contains(through, path) {
			equal(t, "mode of "+path, info.Mode().Perm(), 0o711)
			return nil
		}
		if info.Mode().Perm()&0o007 != 0 {
			t.Errorf("%s has mode %v", path, info.Mode())
		}
		return filepath.SkipDir
	})
	if err != nil || seen < 5 {
		t.Errorf("%d directories, %v", seen, err)
	}
	info, err := os.Stat(w.StateRoot())
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "mode of "+w.StateRoot(), info.Mode().Perm(), 0o700)
}

func TestReadinessIsToldToSystemd(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	address := &net.UnixAddr{Name: filepath.Join(dir, "notify"), Net: "unixgram"}
	l, err := net.ListenUnixgram("unixgram", address)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	w := private(t, node.Options{Env: []string{"NOTIFY_SOCKET=" + address.Name}})
	said := func() string {
		t.Helper()
		var said strings.Builder
		buf := make([]byte, 4096)
		l.SetReadDeadline(time.Now().Add(patience))
		for !strings.Contains(said.String(), "READY=1") {
			n, err := l.Read(buf)
			if err != nil {
				t.Fatalf("the server answers, but told systemd only %q: %v", said.String(), err)
			}
			said.Write(buf[:n])
		}
		return said.String()
	}
	if text := said(); strings.Contains(text, "EXTEND_TIMEOUT_USEC") {
		t.Errorf("it asks for time that it does not need: %q", text)
	}
	// After a boot for which no seal vouches for the images they are all read, for
	// which systemd is asked for time.
	must(t, w.Kill())
	seals, err := filepath.Glob(w.Path("img", "crius-seal", "*", "seal.json"))
	if err != nil || len(seals) != 1 {
		t.Fatalf("seals %q, %v", seals, err)
	}
	must(t, os.Truncate(seals[0], 0))
	must(t, w.Reboot(t.Context()))
	if text := said(); !strings.Contains(text, "EXTEND_TIMEOUT_USEC=") {
		t.Errorf("it does not ask for more time: %q", text)
	}
}

func TestWhatComesLaterIsUnimplemented(t *testing.T) {
	t.Parallel()
	w := shared(t)
	c := w.run(t, "runc").start(t, "sleep")
	r, ctx := w.Runtime(), t.Context()
	calls := map[string]func() error{
		"CheckpointContainer": func() error {
			_, err := r.CheckpointContainer(ctx, &cri.CheckpointContainerRequest{ContainerId: c.id, Location: "/tmp/x"})
			return err
		},
	}
	for name, call := range calls {
		t.Run(name, func(t *testing.T) { wantCode(t, call(), codes.Unimplemented) })
	}
}
