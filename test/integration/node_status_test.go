package integration

import (
	"encoding/json"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
)

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
			t.Errorf("info %s is not valid JSON: %.100s", key, value)
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
				t.Errorf("info %s of a %s is not valid JSON: %.100s", key, what, value)
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

// A missing network configuration is reported, and is found once it appears;
// meanwhile the runtime is ready, and pods that need no network run.
func TestNetworkReadiness(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{Config: "[network]\nready_grace_period = \"0s\"\n"})
	p := w.run(t, "crun")
	p.finish(t, "echo works")
	file, aside := w.Path("cni", "net.d", "10-p.conflist"), w.Path("aside")
	for _, broken := range []func() error{
		func() error { return os.Rename(file, aside) },
		func() error {
			return os.WriteFile(file, []byte(`{"cniVersion":"1.0.0","name":"p","plugins":[{"type":"no-such-plugin"}]}`), 0o600)
		},
	} {
		must(t, broken())
		wait.For(t, "the network not to be ready", func() bool { c := w.condition(t, "NetworkReady"); return !c.Status && c.Message != "" })
		if c := w.condition(t, "RuntimeReady"); !c.Status {
			t.Errorf("the runtime is not ready because of the network: %v", c)
		}
		_, err := w.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: w.podConfig(t)})
		wantCode(t, err, codes.Unavailable)
	}
	w.run(t, "crun", kubelet.HostNetwork).finish(t, "echo runs", hostNetworkContainer)
	// DEL needs what was recorded at ADD.
	p.stop(t)
	p.remove(t)
	must(t, os.Rename(aside, file))
	wait.For(t, "the network whose configuration is back", func() bool { return w.condition(t, "NetworkReady").Status })
	w.run(t, "crun").finish(t, "echo runs")
}

// Users other than root see nothing of containers, and reach no program in
// them: one may be setuid. Roots of user namespaces pass through the run
// directory, to their own containers.
func TestDirectoriesArePrivate_CVE_2021_41103_CVE_2024_25621(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "runc")
	p.start(t, "sleep")
	run := w.RunRoot()
	through := []string{run, filepath.Join(run, "pods"), filepath.Join(run, "containers")}
	seen := 0
	err := filepath.WalkDir(run, func(path string, e os.DirEntry, err error) error {
		if err != nil || !e.IsDir() {
			return nil //nolint:nilerr // gone meanwhile
		}
		info, err := e.Info()
		if err != nil {
			return nil //nolint:nilerr // gone meanwhile
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
		l.SetReadDeadline(time.Now().Add(wait.Limit))
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
	// After a boot without a valid store manifest all images are read, for which
	// the server asks systemd for time.
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

// Only root reaches the sockets of the node, of the server and of monitors.
func TestSocketsAreRootsAlone(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{Config: "[api]\nsocket_mode = 0o600\n"})
	w.run(t, "runc").start(t, "sleep", terminal)
	asSomebody := func(path string) error {
		cmd := exec.CommandContext(t.Context(), "test", "-w", path)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 1001, Gid: 1001}}
		return cmd.Run()
	}
	must(t, asSomebody("/dev/null"))
	sockets := 0
	must(t, filepath.WalkDir(w.Path(), func(path string, e os.DirEntry, err error) error {
		if err != nil || e.Type() != os.ModeSocket {
			return nil //nolint:nilerr // gone meanwhile
		}
		sockets++
		if asSomebody(path) == nil {
			t.Errorf("somebody may connect to %s", path)
		}
		return nil
	}))
	if sockets < 4 { // of CRI, control, metrics and a monitor
		t.Errorf("only %d sockets were seen", sockets)
	}
}
