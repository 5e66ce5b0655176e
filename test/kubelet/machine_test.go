//go:build kubelet

package kubelet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/tools"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// nodeName is what the kubelet calls its node; static pods bear it in their names.
const nodeName = "node"

// nodeAddress is the node's own.
const nodeAddress = "192.0.2.1"

// address of the kubelet's API in the node's network.
const address = "127.0.0.1:10250"

type options struct {
	version, handler string
	facade           bool           // crius answers at CRI-O's socket; see decision 0008
	statsFromCRI     bool           // the gate PodAndContainerStatsFromCRI
	config           map[string]any // laid over the kubelet's configuration
}

// machine is a node of scene with a stand-alone kubelet on it.
type machine struct {
	*scene.World
	options
	program string

	mu   sync.Mutex
	cmd  *exec.Cmd // nil while it does not run
	done chan struct{}
}

// newMachine returns a node whose kubelet answers. Its end is farewell.
func newMachine(ctx context.Context, o options) (_ *machine, err error) {
	program, err := tools.Kubelet(ctx, o.version)
	if err != nil {
		return nil, err
	}
	config := fmt.Sprintf("[runtime]\ndefault_handler = %q\n", o.handler)
	if o.facade {
		config += "[api]\ncrio_socket = \"{{.Path \"crio\" \"crio.sock\"}}\"\n"
	}
	w, err := scene.New(ctx, node.Options{Config: config})
	if err != nil {
		return nil, err
	}
	k := &machine{World: w, options: o, program: program}
	if err := k.begin(ctx); err != nil {
		return nil, errors.Join(err, k.stopKubelet(), k.Close())
	}
	return k, nil
}

// begin takes stock and starts the kubelet.
func (k *machine) begin(ctx context.Context) error {
	if err := k.prepare(ctx); err != nil {
		return err
	}
	if err := k.Settle(ctx, k.handler); err != nil {
		return err
	}
	return k.startKubelet(ctx)
}

// prepare writes the kubelet's configuration and what it wants to find.
func (k *machine) prepare(ctx context.Context) error {
	for _, dir := range []string{"static", "crio", "kubelet", "sys", "volume-plugins"} {
		if err := os.MkdirAll(k.Path(dir), 0o755); err != nil {
			return err
		}
	}
	for name, value := range tunables {
		if err := os.WriteFile(k.Path("sys", filepath.Base(name)), []byte(value+"\n"), 0o644); err != nil {
			return err
		}
	}
	config, err := json.MarshalIndent(k.kubeletConfig(), "", "  ")
	if err != nil {
		return err
	}
	_, err = k.Run(ctx, "ip", "address", "add", nodeAddress+"/32", "dev", "lo")
	return errors.Join(err,
		os.WriteFile(k.Path("kubelet.json"), config, 0o644),
		os.WriteFile(k.Path("resolv.conf"), []byte("nameserver 192.0.2.53\n"), 0o644),
		makeCgroup(k.CgroupParent()+"/kubepods/besteffort"),
		makeCgroup(k.CgroupParent()+"/kubepods/burstable"))
}

// makeCgroup makes a cgroup in every hierarchy. A kubelet does not make its root, and
// makes what it keeps below that in some hierarchies only; runtimes make it in the
// others.
func makeCgroup(path string) error {
	hierarchies, err := filepath.Glob("/sys/fs/cgroup/*/cgroup.procs")
	if err != nil {
		return err
	}
	if len(hierarchies) == 0 { // cgroup v2 alone
		hierarchies = []string{"/sys/fs/cgroup/cgroup.procs"}
	}
	for _, file := range hierarchies {
		if err := os.MkdirAll(filepath.Join(filepath.Dir(file), path), 0o755); err != nil {
			return err
		}
	}
	return nil
}

// tunables are what a kubelet sets for the whole machine. It finds them set, in
// files of its own.
var tunables = map[string]string{
	"/proc/sys/vm/overcommit_memory": "1",
	"/proc/sys/vm/panic_on_oom":      "0",
	"/proc/sys/kernel/panic":         "10",
	"/proc/sys/kernel/panic_on_oops": "1",
}

func (k *machine) kubeletConfig() map[string]any {
	config := map[string]any{
		"kind":                        "KubeletConfiguration",
		"apiVersion":                  "kubelet.config.k8s.io/v1beta1",
		"staticPodPath":               k.Path("static"),
		"podLogsDir":                  k.Path("logs"),
		"address":                     "127.0.0.1",
		"port":                        10250,
		"healthzPort":                 0,
		"authentication":              map[string]any{"anonymous": map[string]any{"enabled": true}, "webhook": map[string]any{"enabled": false}},
		"authorization":               map[string]any{"mode": "AlwaysAllow"},
		"containerRuntimeEndpoint":    "unix://" + k.Socket(),
		"cgroupDriver":                "cgroupfs",
		"cgroupRoot":                  k.CgroupParent(),
		"failCgroupV1":                false,
		"failSwapOn":                  false,
		"fileCheckFrequency":          "1s",
		"syncFrequency":               "5s",
		"volumePluginDir":             k.Path("volume-plugins"),
		"resolvConf":                  k.Path("resolv.conf"),
		"makeIPTablesUtilChains":      false,
		"registryPullQPS":             0,
		"containerLogMaxSize":         "40Ki",
		"containerLogMaxFiles":        3,
		"containerLogMonitorInterval": "3s",
		"crashLoopBackOff":            map[string]any{"maxContainerRestartPeriod": "1s"},
		"evictionHard":                map[string]any{"memory.available": "1Mi"}, // the tests' disk is nobody's business
		"featureGates":                map[string]any{"PodAndContainerStatsFromCRI": k.statsFromCRI, "KubeletCrashLoopBackOffMax": true},
	}
	for key, value := range k.config {
		config[key] = value
	}
	return config
}

// surroundings is a script that runs a kubelet in a mount namespace in which what it
// writes outside of its own directories is private, and in which CRI-O's socket is
// crius's. What it mounts below the node's directory reaches the node.
const surroundings = `
mount --make-private /
mount --make-rprivate /proc
mount -t tmpfs log /var/log
mount -t tmpfs crio /run
mkdir /run/crio
ln -s "$1/crio/crio.sock" /run/crio/crio.sock
for file in $2; do mount --bind "$1/sys/${file##*/}" "$file"; done
shift 2
exec "$@"`

// startKubelet runs the kubelet and waits until its API is healthy.
func (k *machine) startKubelet(ctx context.Context) error {
	log, err := os.OpenFile(k.Path("kubelet.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	var files []string
	for name := range tunables {
		files = append(files, name)
	}
	cmd := exec.Command("unshare", "--mount", "--propagation", "unchanged", "sh", "-ec", surroundings, "sh", k.Path(), strings.Join(files, " "),
		k.program, "--config", k.Path("kubelet.json"), "--root-dir", k.Path("kubelet"), "--cert-dir", k.Path("kubelet", "pki"),
		"--hostname-override", nodeName, "--node-ip", nodeAddress, "--v", "2")
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := k.Do(cmd.Start); err != nil {
		return fmt.Errorf("start the kubelet: %w", err)
	}
	done := make(chan struct{})
	k.mu.Lock()
	k.cmd, k.done = cmd, done
	k.mu.Unlock()
	go func() {
		_ = cmd.Wait()
		close(done)
	}()
	ended := false
	if wait.Until(ctx, func() bool {
		select {
		case <-done:
			ended = true
			return true
		default:
		}
		body, err := k.get(ctx, "/healthz")
		return err == nil && string(body) == "ok"
	}) && !ended {
		return nil
	}
	return fmt.Errorf("the kubelet is not healthy (ended: %v); the end of its log:\n%s", ended, k.kubeletLog(30))
}

// stopKubelet ends the kubelet with SIGTERM, if it runs.
func (k *machine) stopKubelet() error { return k.endKubelet(syscall.SIGTERM) }

func (k *machine) endKubelet(signal syscall.Signal) error {
	k.mu.Lock()
	cmd, done := k.cmd, k.done
	k.cmd = nil
	k.mu.Unlock()
	if cmd == nil {
		return nil
	}
	if err := cmd.Process.Signal(signal); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	if !wait.Until(context.Background(), func() bool {
		select {
		case <-done:
			return true
		default:
			return false
		}
	}) {
		_ = cmd.Process.Kill()
		return fmt.Errorf("the kubelet did not end within %v of %v", wait.Limit, signal)
	}
	return nil
}

// kubeletLog is the end of the kubelet's log.
func (k *machine) kubeletLog(lines int) string {
	data, err := os.ReadFile(k.Path("kubelet.log"))
	if err != nil {
		return err.Error()
	}
	all := strings.Split(strings.TrimRight(string(data), "\n"), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

// farewell waits until the kubelet has removed all pods and their sandboxes, which
// its garbage collection does once a minute, and checks that crius has left nothing.
func (k *machine) farewell() (err error) {
	defer func() { err = errors.Join(err, k.stopKubelet(), k.Close()) }()
	manifests, err := filepath.Glob(k.Path("static", "*"))
	if err != nil {
		return err
	}
	for _, file := range manifests {
		if err := os.Remove(file); err != nil {
			return err
		}
	}
	var left string
	if !wait.Until(context.Background(), func() bool {
		left, err = k.objects(context.Background())
		return err != nil || left == ""
	}) {
		return fmt.Errorf("the kubelet has not removed\n%s\nthe end of its log:\n%s", left, k.kubeletLog(20))
	}
	if err != nil {
		return err
	}
	if err := k.stopKubelet(); err != nil {
		return err
	}
	if err := k.Clean(context.Background(), k.Empty, wait.Limit); err != nil {
		return err
	}
	if err := k.Stop(); err != nil {
		return fmt.Errorf("SIGTERM: %w\n%s", err, k.LogTail(20))
	}
	if faults := k.Faults(); len(faults) > 0 {
		return fmt.Errorf("crius's log has %d faults; the first:\n%s", len(faults), faults[0])
	}
	return nil
}

// objects lists the pods and containers that crius has, "" if none.
func (k *machine) objects(ctx context.Context) (string, error) {
	pods, err := k.Runtime().ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	if err != nil {
		return "", err
	}
	containers, err := k.Runtime().ListContainers(ctx, &cri.ListContainersRequest{})
	if err != nil {
		return "", err
	}
	var out strings.Builder
	for _, p := range pods.Items {
		fmt.Fprintf(&out, "pod %s %s\n", p.Metadata.Name, p.State)
	}
	for _, c := range containers.Containers {
		fmt.Fprintf(&out, "container %s %s\n", c.Metadata.Name, c.State)
	}
	return out.String(), nil
}
