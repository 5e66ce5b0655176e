package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/crius-run/crius/cmd/crius/config"
	"github.com/crius-run/crius/cmd/crius/kubelet"
	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/oci"
	runtimeversion "github.com/crius-run/crius/oci/version"
	"github.com/crius-run/crius/storage/foreign"
	"github.com/crius-run/crius/storage/unpack/wire"
	testprogram "github.com/crius-run/crius/test/kit/program"
)

// testNode returns a node whose host directory has only the given files, and whose
// configuration has paths in another directory.
func testNode(t *testing.T, toml string, files map[string]string) *node {
	t.Helper()
	root := t.TempDir()
	for path, text := range files {
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	loaded, err := config.Load(config.Sources{File: write(t, "crius.toml", toml)})
	if err != nil {
		t.Fatal(err)
	}
	return &node{config: loaded, host: host{root}}
}

// find returns the first finding whose text contains a word.
func find(t *testing.T, findings []finding, word string) finding {
	t.Helper()
	for _, f := range findings {
		if strings.Contains(f.Text, word) {
			return f
		}
	}
	t.Errorf("nothing is said about %q in %+v", word, findings)
	return finding{}
}

// A dead server is no trouble on a node that does not run crius yet, and one on a node that does.
func TestCheckWithoutServer(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	toml := fmt.Sprintf("run_root = '%s'\napi.listen = '%s/crius.sock'\n", dir, dir)
	want(t, testNode(t, toml, nil).checkServer(t.Context()), "no server is running at", statusOK)
	enabled := map[string]string{"etc/systemd/system/multi-user.target.wants/crius.service": ""}
	want(t, testNode(t, toml, enabled).checkServer(t.Context()), "no server is running at", statusOK) // the unit's is another one
	n := testNode(t, "", enabled)
	if f := n.serverAway(n.config.Config.API.Listen); f.Status != statusWarn || !strings.Contains(f.Text, "although its unit crius.service is enabled") {
		t.Errorf("%+v", f)
	}
}

func want(t *testing.T, findings []finding, word string, s status) {
	t.Helper()
	if f := find(t, findings, word); f.Status != s {
		t.Errorf("%q is %q, want %q", f.Text, f.Status, s)
	}
}

func TestCheckConfiguration(t *testing.T) {
	ctx := context.Background()
	n := testNode(t, "", nil)
	want(t, n.checkConfiguration(ctx), n.config.Files[0], statusOK)
	if err := os.Chmod(n.config.Files[0], 0o620); err != nil {
		t.Fatal(err)
	}
	f := find(t, n.checkConfiguration(ctx), "writable by users other than its owner")
	if f.Status != statusWarn || f.Do != "chmod go-w "+n.config.Files[0] {
		t.Errorf("a file that the group may write: %+v", f)
	}
	n.config.Files = nil
	want(t, n.checkConfiguration(ctx), "defaults", statusOK)
}

func TestCheckPrivileges(t *testing.T) {
	for effective, c := range map[string]struct {
		word string
		want status
	}{
		"000001ffffffffff": {"all required capabilities", statusOK},
		"000001fffeffffff": {"CAP_SYS_RESOURCE", statusWarn},
		"000001ffffdfffff": {"CAP_SYS_ADMIN", statusFail},
		"0000000000000000": {"CAP_NET_ADMIN", statusFail},
	} {
		n := testNode(t, "", map[string]string{"proc/self/status": "Name:\tcrius\nCapPrm:\t0\nCapEff:\t" + effective + "\nCapBnd:\t0\n"})
		want(t, n.checkPrivileges(context.Background()), c.word, c.want)
	}
}

func TestCheckKernel(t *testing.T) {
	n := testNode(t, "", map[string]string{
		"proc/self/ns/net": "", "proc/self/ns/ipc": "", "proc/self/ns/mnt": "", "proc/self/ns/uts": "",
		"proc/sys/user/max_user_namespaces": "0\n",
		"proc/sys/net/ipv4/ip_forward":      "0\n",
		"sys/fs/selinux/enforce":            "0",
	})
	findings := n.checkKernel(context.Background())
	want(t, findings, "no pid namespaces", statusFail)
	want(t, findings, "no user namespaces", statusWarn)
	want(t, findings, "are disabled", statusWarn)
	want(t, findings, "IPv4 forwarding", statusWarn)
	want(t, findings, "seccomp", statusWarn)
	want(t, findings, "SELinux is permissive", statusWarn)
	for _, f := range findings {
		if strings.Contains(f.Text, "pidfds") || strings.Contains(f.Text, "openat2") || strings.Contains(f.Text, "overlay") {
			t.Errorf("this kernel: %+v", f)
		}
	}
}

func TestCheckSELinuxSwitchedOff(t *testing.T) {
	n := testNode(t, "[pod]\nselinux = false\n", map[string]string{"sys/fs/selinux/enforce": "1"})
	want(t, n.checkSELinux(), "pod.selinux is false", statusWarn)
	if findings := testNode(t, "", nil).checkSELinux(); len(findings) > 0 {
		t.Errorf("a node without SELinux: %+v", findings)
	}
}

func TestCheckArtifactsBeforeTheImagestore(t *testing.T) {
	root := t.TempDir()
	n := testNode(t, fmt.Sprintf("[image]\nroot = %q\nimagestore = %q", root, t.TempDir()), nil)
	if findings := n.checkDirectories(context.Background()); strings.Contains(fmt.Sprint(findings), "from before") {
		t.Errorf("there are none: %v", findings)
	}
	if err := os.MkdirAll(filepath.Join(root, "crius-artifacts"), 0o700); err != nil {
		t.Fatal(err)
	}
	want(t, n.checkDirectories(context.Background()), "OCI artifacts from before", statusWarn)
}

func TestCheckAdditionalArtifactStores(t *testing.T) {
	dir := t.TempDir()
	n := testNode(t, fmt.Sprintf("[image]\nadditional_artifact_stores = [%q]", dir), nil)
	want(t, n.checkDirectories(context.Background()), "additional_artifact_stores", statusWarn)
	if err := os.MkdirAll(filepath.Join(dir, "crius-artifacts/artifacts"), 0o700); err != nil {
		t.Fatal(err)
	}
	if findings := n.checkDirectories(context.Background()); strings.Contains(fmt.Sprint(findings), "additional_artifact_stores") {
		t.Errorf("a store that is there: %v", findings)
	}
}

func TestCheckPassage(t *testing.T) {
	run := t.TempDir()
	n := testNode(t, fmt.Sprintf("run_root = %q\nroot = %q", run, t.TempDir()), nil)
	if err := os.Chmod(run, 0o700); err != nil {
		t.Fatal(err)
	}
	closed := func() bool {
		return strings.Contains(fmt.Sprint(n.checkDirectories(context.Background())), "user namespaces")
	}
	if closed() {
		t.Error("a run root that no server has used is called closed")
	}
	if err := os.Mkdir(filepath.Join(run, "containers"), 0o711); err != nil {
		t.Fatal(err)
	}
	want(t, n.checkDirectories(context.Background()), "mode 0700", statusWarn)
	if err := os.Chmod(run, 0o711); err != nil {
		t.Fatal(err)
	}
	if closed() {
		t.Error("a run root of mode 0711 is called closed")
	}
}

// systemd-tmpfiles, which runs at boot and whenever a package is installed, gives the run
// directory the same mode as the server.
func TestTmpfilesLetUserNamespacesPass(t *testing.T) {
	text, err := os.ReadFile("../../contrib/tmpfiles.d/crius.conf")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(text), "\nd /run/crius 0711 root root -\n") {
		t.Errorf("want mode 0711 for /run/crius:\n%s", text)
	}
}

func TestCheckCgroups(t *testing.T) {
	ctx := context.Background()
	systemd, cgroupfs := "runtime.cgroup_driver = 'systemd'", "runtime.cgroup_driver = 'cgroupfs'"
	want(t, testNode(t, systemd, nil).checkCgroups(ctx), "systemd is not running", statusFail)
	for what, n := range map[string]*node{
		"systemd runs": testNode(t, systemd, map[string]string{"run/systemd/system/x": ""}),
		"cgroupfs":     testNode(t, cgroupfs, nil),
	} {
		for _, f := range n.checkCgroups(ctx) {
			if f.Status == statusFail {
				t.Errorf("%s: %+v", what, f)
			}
		}
	}
}

func TestCheckPullCgroup(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	for config, fails := range map[string]bool{
		"runtime.cgroup_driver = 'systemd'\nimage.pull_cgroup = 'pod'":     true,
		"runtime.cgroup_driver = 'systemd'":                                false,
		"runtime.cgroup_driver = 'cgroupfs'\nimage.pull_cgroup = '/pulls'": false,
	} {
		failed := slices.ContainsFunc(testNode(t, config, nil).checkCgroups(t.Context()), func(f finding) bool {
			return f.Status == statusFail && strings.Contains(f.Text, "image.pull_cgroup: images cannot be pulled: busctl")
		})
		if failed != fails {
			t.Errorf("without busctl: %q fails: %t", config, failed)
		}
	}
}

func TestCheckCgroupsOfKubelet(t *testing.T) {
	for driver, warns := range map[string]bool{"systemd": true, "cgroupfs": false} {
		n := testNode(t, "runtime.cgroup_driver = 'cgroupfs'", map[string]string{"var/lib/kubelet/config.yaml": "cgroupDriver: " + driver + "\n"})
		warned := slices.ContainsFunc(n.checkCgroups(t.Context()), func(f finding) bool {
			return f.Status == statusWarn && strings.Contains(f.Text, "the kubelet's cgroup driver is systemd (/var/lib/kubelet/config.yaml), that of crius is cgroupfs") &&
				strings.Contains(f.Do, `set runtime.cgroup_driver = "systemd"`)
		})
		if warned != warns {
			t.Errorf("a kubelet with %s: warned is %v", driver, warned)
		}
	}
}

func TestControllers(t *testing.T) {
	h := testNode(t, "", map[string]string{
		"sys/fs/cgroup/cgroup.controllers": "cpuset cpu io\n",
		"proc/self/cgroup":                 "4:memory:/\n3:cpu,cpuacct:/x:y\n1:name=systemd:/\n0::/\n",
	}).host
	for mode, want := range map[cgroup.Mode]string{
		cgroup.V2: "cpuset cpu io", cgroup.V1: "memory cpu cpuacct name=systemd ", cgroup.Hybrid: "memory cpu cpuacct name=systemd ",
	} {
		if got := strings.Join(h.controllers(mode), " "); got != want {
			t.Errorf("layout %d: %q, want %q", mode, got, want)
		}
	}
}

func TestCheckDirectory(t *testing.T) {
	dir := t.TempDir()
	file := write(t, "file", "")
	for path, c := range map[string]struct {
		word string
		want status
	}{
		dir:                          {dir, statusOK},
		filepath.Join(dir, "a/b"):    {"will be created", statusOK},
		file:                         {"not a directory", statusFail},
		filepath.Join(file, "a"):     {"not a directory", statusFail},
		"/proc/sys/crius":            {"is not writable", statusFail},
		"/proc/self/mem/nonexisting": {"not a directory", statusFail},
	} {
		want(t, []finding{checkDirectory("key", path)}, c.word, c.want)
	}
}

func TestCheckFileSystems(t *testing.T) {
	here, elsewhere := host{t.TempDir()}, "/proc/none"
	for _, c := range []struct {
		root, images, word string
		want               status
	}{
		{here.root, filepath.Join(here.root, "images"), "on one file system", statusOK},
		{filepath.Join(here.root, "none"), elsewhere, "on the file system of the kubelet", statusOK},
		{elsewhere, here.root, "does not watch", statusWarn},
	} {
		want(t, []finding{here.checkFileSystems(c.root, c.images)}, c.word, c.want)
	}
}

func TestCheckSocket(t *testing.T) {
	ctx := context.Background()
	path := filepath.Join(t.TempDir(), "s")
	n := testNode(t, "api.listen = '"+path+"'", nil)
	want(t, n.checkSocket(ctx), "is free", statusOK)

	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	if err != nil {
		t.Fatal(err)
	}
	want(t, n.checkSocket(ctx), "a server answers", statusOK)
	want(t, testNode(t, "api.listen = '"+path+"'\nimage.signature_policy = '"+write(t, "policy.json", "{}")+"'", nil).checkStorage(ctx), "in use", statusOK)

	l.SetUnlinkOnClose(false)
	l.Close()
	want(t, n.checkSocket(ctx), "stale socket", statusOK)

	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(path, 0o700); err != nil {
		t.Fatal(err)
	}
	want(t, n.checkSocket(ctx), "not a socket", statusFail)
}

// crius does not start if another server uses the second socket.
func TestCheckCrioSocketOfAnotherProcess(t *testing.T) {
	dir := t.TempDir()
	crio := filepath.Join(dir, "crio.sock")
	n := testNode(t, "api.listen = '"+filepath.Join(dir, "crius.sock")+"'\napi.crio_socket = '"+crio+"'", nil)
	want(t, n.checkSocket(t.Context()), crio+" is free", statusOK)

	other, err := net.Listen("unix", crio)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	f := find(t, n.checkSocket(t.Context()), fmt.Sprintf("another process serves %s: process %d (", crio, os.Getpid()))
	if f.Status != statusFail || f.Do != "stop it or set a different api.crio_socket" {
		t.Errorf("%+v", f)
	}

	own, err := net.Listen("unix", n.config.Config.API.Listen) // one process serves both
	if err != nil {
		t.Fatal(err)
	}
	defer own.Close()
	want(t, n.checkSocket(t.Context()), crio+": a server answers", statusOK)
}

// A process on the socket that is not a server is named, so that it can be found.
func TestCheckServerOfAnotherProgram(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			conn.Close()
		}
	}()
	f := find(t, testNode(t, "api.listen = '"+path+"'", nil).checkServer(t.Context()), fmt.Sprintf("process %d (", os.Getpid()))
	if f.Status != statusFail || !strings.Contains(f.Text, path) || !strings.Contains(f.Do, "api.listen") {
		t.Errorf("%+v", f)
	}
}

func TestCheckMetrics(t *testing.T) {
	const kubeletFile = "var/lib/kubelet/config.yaml"
	ctx := context.Background()
	f := find(t, testNode(t, "", map[string]string{kubeletFile: "featureGates:\n  Other: true\n"}).checkMetrics(ctx), "lack pod names")
	if f.Status != statusWarn || !strings.Contains(f.Do, `api.crio_socket = "/run/crio/crio.sock"`) {
		t.Errorf("a stock kubelet: %+v", f)
	}
	want(t, testNode(t, "api.crio_socket = '/run/crio/crio.sock'", nil).checkMetrics(ctx), "finds crius at /run/crio/crio.sock", statusOK)
	want(t, testNode(t, "", map[string]string{kubeletFile: "featureGates:\n  PodAndContainerStatsFromCRI: true\n"}).checkMetrics(ctx), "gets container metrics from crius", statusOK)
	n := testNode(t, "", map[string]string{"run/crio/version": ""})
	l, err := net.Listen("unix", filepath.Join(n.host.root, kubelet.CrioSocket))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	f = find(t, n.checkMetrics(ctx), "lack pod names")
	if f.Status != statusWarn || strings.Contains(f.Do, "crio_socket") {
		t.Errorf("beside CRI-O: %+v", f)
	}
}

func TestCheckRuntimes(t *testing.T) {
	monitor := write(t, "crius-conmon", "#!/bin/sh\n")
	runtime := write(t, "runtime", "#!/bin/sh\necho runtime version 9.8.7\n")
	for _, path := range []string{monitor, runtime} {
		if err := os.Chmod(path, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	toml := "[runtime]\ncgroup_driver = 'cgroupfs'\nmonitor = '" + monitor + "'\ndefault_handler = 'good'\n" +
		"[runtime.handlers.good]\npath = '" + runtime + "'\n[runtime.handlers.gone]\npath = '/nonexistent/runtime'\n"
	path := os.Getenv("PATH")
	findings := testNode(t, toml, nil).checkRuntimes(context.Background())
	want(t, findings, "monitor: "+monitor, statusOK)
	want(t, findings, "good: "+runtime, statusOK)
	want(t, findings, "gone: ", statusWarn)
	t.Setenv("PATH", t.TempDir())
	want(t, testNode(t, toml, nil).checkRuntimes(context.Background()), "crun: not installed, and no configuration asks for it", statusOK)
	want(t, testNode(t, toml+"[runtime.handlers.crun]\npath = 'crun'\n", nil).checkRuntimes(context.Background()), "crun: handler crun: no \"crun\" in PATH", statusWarn)
	t.Setenv("PATH", path)

	for _, f := range findings {
		if strings.HasPrefix(f.Text, "good: ") && strings.Contains(f.Text, "CVE") {
			t.Errorf("a runtime of which nothing is known: %+v", f)
		}
	}
	if err := testprogram.Write(runtime, []byte("#!/bin/sh\necho runc version 1.3.3\n")); err != nil {
		t.Fatal(err)
	}
	findings = testNode(t, toml, nil).checkRuntimes(context.Background())
	want(t, findings, "good: "+runtime, statusOK)
	want(t, findings, "CVE-2026-41579", statusWarn)
	for _, f := range testNode(t, "[runtime]\nbackported_cves = ['CVE-2026-41579']\n"+strings.TrimPrefix(toml, "[runtime]\n"), nil).checkRuntimes(context.Background()) {
		if strings.HasPrefix(f.Text, "good: ") && strings.Contains(f.Text, "CVE") {
			t.Errorf("a vulnerability that is said to be fixed: %+v", f)
		}
	}

	toml = strings.Replace(toml, "default_handler = 'good'", "default_handler = 'gone'", 1)
	findings = testNode(t, toml, nil).checkRuntimes(context.Background())
	want(t, findings, "default handler gone", statusFail)
	if f := find(t, findings, "default handler gone"); !strings.Contains(f.Do, "runtime.default_handler to a handler that is ready: ") || !strings.Contains(f.Do, "good") {
		t.Errorf("%+v", f)
	}

	if err := os.Remove(monitor); err != nil {
		t.Fatal(err)
	}
	want(t, testNode(t, toml, nil).checkRuntimes(context.Background()), "cannot run the monitor", statusFail)
}

func TestCheckStorageWantsAPolicy(t *testing.T) {
	n := testNode(t, "image.signature_policy = '/nonexistent/policy.json'", nil)
	want(t, n.checkStorage(context.Background()), "signature policy", statusFail)
}

func TestCheckCheckpointsWithoutCriu(t *testing.T) {
	t.Parallel()
	n := testNode(t, "runtime.criu = '/nonexistent/criu'", nil)
	f := find(t, n.checkCheckpoints(t.Context()), "containers cannot be checkpointed: ")
	if f.Status != statusOK || !strings.HasSuffix(f.Text, ": install criu or correct runtime.criu") {
		t.Errorf("%+v", f)
	}
}

// /proc has no project quotas.
func TestCheckSaysThatLayerSizesAreRefused(t *testing.T) {
	t.Parallel()
	const (
		root     = "root = '/proc/crius'\n"
		handler  = "[runtime.handlers.runc]\n"
		workload = "[runtime.workloads.small]\nactivation_annotation = 'small'\n"
	)
	for text, who := range map[string]string{
		root + handler + "allowed_annotations = ['writable-layer-size.crius.run']":             "handler runc",
		root + handler + "allowed_annotations = ['containerd.io/snapshot/max-size']":           "handler runc",
		root + handler + "allowed_container_annotations = ['containerd.io/snapshot/max-size']": "handler runc",
		root + workload + "allowed_annotations = ['writable-layer-size.crius.run']":            "workload small",
		root + handler + "allowed_annotations = ['shm-size.crio.io', 'containerd.io/*/*']":     "",
	} {
		found := testNode(t, text, nil).checkLayerSizes(t.Context())
		if who == "" {
			if len(found) > 0 {
				t.Errorf("%s: %+v", text, found)
			}
			continue
		}
		want(t, found, "containers of "+who+" that ask for a size of their writable layer by annotation are refused", statusWarn)
		want(t, found, "the proc file system mounted at /proc has no project quotas", statusWarn)
	}
}

func TestCheckUnpacker(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	want(t, checkUnpacker(context.Background()), "which takes more CPU: crius-unpack not found", statusWarn)
	program := filepath.Join(dir, "crius-unpack")
	for _, c := range []struct {
		script, text string
		s            status
	}{
		{"#!/bin/sh\necho '" + wire.Version() + "'\n", "unpacked by " + program, statusOK},
		{"#!/bin/sh\necho crius-unpack with protocol 0\n", "another version", statusFail},
		{"#!/bin/sh\necho usage >&2; exit 2\n", "than crius: exit status 2: usage", statusFail},
		{"#!/nonexistent\n", "cannot run " + program, statusFail},
	} {
		if err := testprogram.Write(program, []byte(c.script)); err != nil {
			t.Fatal(err)
		}
		want(t, checkUnpacker(context.Background()), c.text, c.s)
	}
}

func TestCheckNetworkWithoutCNI(t *testing.T) {
	n := testNode(t, "network.conf_dir = '"+t.TempDir()+"'", nil)
	want(t, n.checkNetwork(context.Background()), "", statusWarn)
}

// A network without a plugin for host ports needs nft, one with such a plugin does not.
func TestCheckNetworkWantsNft(t *testing.T) {
	dir := t.TempDir()
	n := testNode(t, "network.conf_dir = '"+dir+"'\nnetwork.plugin_dirs = ['"+dir+"']", nil)
	if err := os.WriteFile(filepath.Join(dir, "fake"), nil, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir)
	for capabilities, want := range map[string]status{"{}": statusWarn, `{"portMappings": true}`: statusOK} {
		list := `{"cniVersion": "1.0.0", "name": "a", "plugins": [{"type": "fake", "capabilities": ` + capabilities + `}]}`
		if err := os.WriteFile(filepath.Join(dir, "10-a.conflist"), []byte(list), 0o644); err != nil {
			t.Fatal(err)
		}
		findings := n.checkNetwork(context.Background())
		if last := findings[len(findings)-1]; findings[0].Status != statusOK || last.Status != want || want == statusWarn && !strings.Contains(last.Text, "nftables") {
			t.Errorf("%s: %+v", capabilities, findings)
		}
	}
}

func TestChecksAreBoundedAndNamed(t *testing.T) {
	seen := map[string]bool{}
	for _, c := range new(node).checks() {
		if c.name == "" || c.run == nil || seen[c.name] {
			t.Errorf("check %q", c.name)
		}
		seen[c.name] = true
	}
	findings := runChecks(context.Background(), []check{{"bound", func(ctx context.Context) []finding {
		deadline, bounded := ctx.Deadline()
		if !bounded || time.Until(deadline) > checkTimeout {
			return []finding{fail("", "unbounded")}
		}
		return []finding{ok("bounded")}
	}}})
	if len(findings) != 1 || findings[0] != (finding{Check: "bound", Status: statusOK, Text: "bounded"}) {
		t.Errorf("findings are %+v", findings)
	}
}

func TestCheckCommand(t *testing.T) {
	config := write(t, "crius.toml", "image.signature_policy = '/nonexistent/policy.json'")
	code, text, errs := crius(t, "--config", config, "check")
	if code != 1 || !strings.HasPrefix(errs, "crius: this node is not ready: ") {
		t.Errorf("exit code %d, error %q", code, errs)
	}
	code, document, _ := crius(t, "--config", config, "check", "-o", "json")
	var findings []finding
	if err := json.Unmarshal([]byte(document), &findings); err != nil || code != 1 {
		t.Fatalf("exit code %d, %v in %s", code, err, document)
	}
	if !strings.Contains(text, "FAIL  storage        no signature policy") || find(t, findings, "signature policy").Check != "storage" {
		t.Errorf("table:\n%s\nJSON:\n%s", text, document)
	}
}

func TestFindingsForPeople(t *testing.T) {
	var out strings.Builder
	writeFindings(&out, []finding{
		{Check: "runtimes", Status: statusOK, Text: "runc"},
		{Check: "runtimes", Status: statusWarn, Text: "evil \x1b[2J", Do: "rm \x07"},
		{Check: "network", Status: statusFail, Text: "none"},
	})
	wanted := "ok    runtimes       runc\n" +
		"warn                 evil \\x1b[2J\n" +
		"                     -> rm \\a\n" +
		"FAIL  network        none\n"
	if out.String() != wanted {
		t.Errorf("got\n%s\nwant\n%s", out.String(), wanted)
	}
}

func TestVerdict(t *testing.T) {
	bad := fail("", "x")
	for want, findings := range map[string][]finding{
		"<nil>": {ok("x"), warn("", "x")},
		"this node is not ready: 1 failed check listed above":  {ok("x"), bad},
		"this node is not ready: 2 failed checks listed above": {bad, bad},
	} {
		if got := fmt.Sprint(verdict(findings)); got != want {
			t.Errorf("verdict is %q, want %q", got, want)
		}
	}
}

// An error that keeps the server from starting fails a check.
func TestCheckAddresses(t *testing.T) {
	for name, c := range map[string]struct {
		set  func(*config.Config)
		want string // empty: no problem
	}{
		"defaults":                    {func(*config.Config) {}, ""},
		"metrics without host":        {func(c *config.Config) { c.Metrics.Address = "9090" }, "metrics.address"},
		"metrics without key":         {func(c *config.Config) { c.Metrics.Address, c.Metrics.TLSCertFile = "127.0.0.1:0", "/c" }, "metrics over TLS"},
		"certificate without metrics": {func(c *config.Config) { c.Metrics.TLSCertFile, c.Metrics.TLSKeyFile = "/c", "/k" }, "metrics"},
		"streams without port":        {func(c *config.Config) { c.API.StreamAddress = "127.0.0.1" }, "api.stream_address"},
		"streams at every address":    {func(c *config.Config) { c.API.StreamAddress = "0.0.0.0:0" }, "api.stream_address"},
		"streams without key":         {func(c *config.Config) { c.API.StreamTLSCertFile = "/c" }, "api.stream_tls_cert_file"},
	} {
		loaded := &config.Loaded{Config: config.Default()}
		c.set(&loaded.Config)
		found := (&node{config: loaded}).checkAddresses(t.Context())
		if len(found) != 1 || (found[0].Status == statusFail) != (c.want != "") || !strings.Contains(found[0].Text, c.want) {
			t.Errorf("%s: %+v, want a failure about %q", name, found, c.want)
		}
	}
}

// CRI-O's pods are listed one by one, and those in use are not to be removed.
func TestForeignFindings(t *testing.T) {
	pod := func(id, name, container, kept string) foreign.Container {
		return foreign.Container{Runtime: foreign.CRIO, PodID: id, Pod: name, Name: container, Kept: kept, Created: time.Now().Add(-time.Hour)}
	}
	podman := foreign.Container{Name: "toolbox"}
	want(t, foreignFindings([]foreign.Container{podman}), "CRI-O has no containers", statusOK)

	findings := foreignFindings([]foreign.Container{podman, pod("1", "shop/web", "POD", ""), pod("1", "shop/web", "nginx", ""), pod("2", "shop/web", "POD", "mounted")})
	if len(findings) != 3 {
		t.Errorf("findings are %+v", findings)
	}
	want(t, findings, "CRI-O has 3 containers of 2 pods", statusWarn)
	want(t, findings, "pod shop/web (1), created 1h0m0s ago: POD, nginx", statusWarn)
	want(t, findings, "in use: mounted", statusOK)

	want(t, foreignFindings([]foreign.Container{pod("2", "shop/web", "POD", "mounted")}), "all in use", statusOK)
}

func TestCheckFromCrioCommand(t *testing.T) {
	dir := t.TempDir()
	text := fmt.Sprintf("[crio.runtime]\npids_limit = 100\n[crio.runtime.runtimes.own]\nruntime_path = %q\n", "/bin/true")
	if err := os.WriteFile(filepath.Join(dir, "crio.conf"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	code, out, errs := crius(t, "check", "--from-crio", dir)
	if code != 1 || !strings.HasPrefix(errs, "crius: this node is not ready: ") {
		t.Errorf("exit code %d, error %q", code, errs)
	}
	for _, line := range []string{"pod.pids_limit: 100 for CRI-O (" + dir + "/crio.conf:2 crio.runtime.pids_limit), 0 for crius (default)\n", "FAIL  handlers       own: crius has no such handler"} {
		if !strings.Contains(out, line) {
			t.Errorf("no line %q in\n%s", line, out)
		}
	}
	_, document, _ := crius(t, "check", "-o", "json", "--from-containerd", "config/testdata/containerd/v3.toml")
	var findings []finding
	if err := json.Unmarshal([]byte(document), &findings); err != nil {
		t.Fatal(err)
	}
	if f := find(t, findings, "image.volumes"); f.Check != "settings" {
		t.Errorf("%+v", f)
	}
	for _, args := range [][]string{{"check", "--repair", "--from-crio"}, {"check", "--from-crio", "--from-containerd"}, {"check", "/etc/crio"}} {
		if code, _, errs := crius(t, args...); code != 2 {
			t.Errorf("%q: exit code %d, %s", args, code, errs)
		}
	}
	if code, _, errs := crius(t, "check", "--from-crio", "/nonexistent"); code != 1 || !strings.Contains(errs, "no configuration of CRI-O at /nonexistent") {
		t.Errorf("without CRI-O: exit code %d, %s", code, errs)
	}
}

// With the name of CRI-O, what installers for CRI-O use must be there.
func TestCheckIdentity(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	n := &node{config: &config.Loaded{Config: config.Default()}, host: host{root}}
	texts := func() string {
		var all []string
		for _, f := range n.checkIdentity(t.Context()) {
			all = append(all, string(f.Status)+" "+f.Text)
		}
		return strings.Join(all, "\n")
	}
	if got := texts(); !strings.HasPrefix(got, "ok the node's status says crius://") {
		t.Error(got)
	}
	n.config.Config.API.RuntimeName = "containerd"
	if got := texts(); !strings.HasPrefix(got, "warn the node's status says containerd://2.") {
		t.Error(got)
	}
	n.config.Config.API.RuntimeName = "cri-o"
	if got := texts(); strings.Count(got, "warn ") != 3 {
		t.Error(got)
	}
	n.config.Config.API.CrioSocket, n.config.Config.Runtime.CRIOHandlersDir = "/var/run/crio/crio.sock", "/etc/crio/crio.conf.d"
	if err := os.MkdirAll(filepath.Join(root, "etc/systemd/system"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/usr/lib/systemd/system/crius.service", filepath.Join(root, "etc/systemd/system/crio.service")); err != nil {
		t.Fatal(err)
	}
	if got := texts(); strings.Count(got, "warn ") != 0 || !strings.Contains(got, "find its drop-ins, socket and unit") {
		t.Error(got)
	}
}

// Handlers that share a program have its vulnerabilities once.
func TestVulnerabilitiesOfAProgramAreListedOnce(t *testing.T) {
	t.Parallel()
	of := func(name, path string) oci.Report {
		return oci.Report{Name: name, Path: path, Version: "1.0.0", Ready: true, Vulnerabilities: []runtimeversion.Vulnerability{{CVE: "CVE-2024-21626"}}}
	}
	all := []oci.Report{of("a", "/usr/bin/runc"), of("b", "/usr/bin/runc"), of("c", "/opt/runc")}
	for i, want := range []int{1, 0, 1} {
		if got := vulnerabilities(all[i], all[:i]); len(got) != want {
			t.Errorf("%s: %+v, want %d", all[i].Name, got, want)
		}
	}
}

// What the start would refuse is said before.
func TestCheckSaysThatRunRootIsTooLong(t *testing.T) {
	t.Parallel()
	for dir, tooLong := range map[string]bool{"/run/crius": false, "/run/kubernetes/crius": true} {
		n := testNode(t, fmt.Sprintf("run_root = %q", dir), nil)
		found := slices.ContainsFunc(n.checkConfiguration(t.Context()), func(f finding) bool { return strings.Contains(f.Text, "run_root") })
		if found != tooLong {
			t.Errorf("%s: said to be too long: %t", dir, found)
		}
	}
}

// Without root nearly everything fails, for reasons that say nothing about the node.
func TestCheckWithoutRootSaysOnlyThat(t *testing.T) {
	t.Parallel()
	n := new(node)
	found := runChecks(t.Context(), n.checksFor(65534))
	if len(found) != 1 || found[0].Check != "privileges" || found[0].Do != "run as root" || found[0].Status != statusFail {
		t.Errorf("%+v", found)
	}
	if got, want := len(n.checksFor(0)), len(n.checks()); got != want {
		t.Errorf("root has %d checks, want %d", got, want)
	}
}
