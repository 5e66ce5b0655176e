//go:build kubelet

package kubelet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/daemon"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/realkubelet"
	"github.com/crius-run/crius/test/kit/tools"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// nodeName is the kubelet's name for its node; names of static pods contain it.
const nodeName = realkubelet.NodeName

// nodeAddress is the node's own.
const nodeAddress = realkubelet.Address

// address of the kubelet's API in the node's network.
const address = "127.0.0.1:10250"

type options struct {
	version, handler string
	facade           bool           // crius answers at CRI-O's socket; see decision 0008
	statsFromCRI     bool           // the gate PodAndContainerStatsFromCRI
	config           map[string]any // overrides the kubelet's configuration
}

// machine is a node of scene with a stand-alone kubelet on it.
type machine struct {
	*scene.World
	options
	program string
	criu    string // empty: the machine has none

	mu     sync.Mutex
	daemon *daemon.Daemon // the kubelet; nil before its first start
}

// newMachine returns a node whose kubelet answers. Call checkTeardown at its end.
func newMachine(ctx context.Context, o options) (_ *machine, err error) {
	program, err := tools.Kubelet(ctx, o.version)
	if err != nil {
		return nil, err
	}
	criu, err := tools.Criu(ctx)
	if errors.Is(err, tools.ErrNoCriu) {
		fmt.Fprintln(os.Stderr, "of checkpoints only the refusals are tested:", err)
	} else if err != nil {
		return nil, err
	}
	config := fmt.Sprintf("[runtime]\ndefault_handler = %q\ncriu = %q\n", o.handler, cmp.Or(criu, "/nonexistent/criu"))
	if o.facade {
		config += "[api]\ncrio_socket = \"{{.Path \"crio\" \"crio.sock\"}}\"\n"
	}
	w, err := scene.New(ctx, node.Options{Config: config})
	if err != nil {
		return nil, err
	}
	k := &machine{World: w, options: o, program: program, criu: criu}
	if err := k.begin(ctx); err != nil {
		return nil, errors.Join(err, k.stopKubelet(), k.Close())
	}
	return k, nil
}

// begin takes stock and starts the kubelet.
func (k *machine) begin(ctx context.Context) error {
	if err := realkubelet.Prepare(ctx, k.Node, k.Socket(), k.kubeletConfig()); err != nil {
		return err
	}
	if err := k.Settle(ctx, k.handler); err != nil {
		return err
	}
	return k.startKubelet(ctx)
}

// kubeletConfig returns the tests' additions to every kubelet's configuration.
func (k *machine) kubeletConfig() map[string]any {
	config := map[string]any{
		"staticPodPath":               k.Path("static"),
		"address":                     "127.0.0.1",
		"authentication":              map[string]any{"anonymous": map[string]any{"enabled": true}, "webhook": map[string]any{"enabled": false}},
		"authorization":               map[string]any{"mode": "AlwaysAllow"},
		"fileCheckFrequency":          "1s",
		"syncFrequency":               "5s",
		"containerLogMaxSize":         "40Ki",
		"containerLogMaxFiles":        3,
		"containerLogMonitorInterval": "3s",
		"crashLoopBackOff":            map[string]any{"maxContainerRestartPeriod": "1s"},
		"featureGates":                map[string]any{"PodAndContainerStatsFromCRI": k.statsFromCRI, "KubeletCrashLoopBackOffMax": true},
	}
	maps.Copy(config, k.config)
	return config
}

// startKubelet runs the kubelet and waits until its API is healthy.
func (k *machine) startKubelet(ctx context.Context) error {
	d, err := daemon.Start(ctx, k.Node, "kubelet", realkubelet.Command(k.Node, k.program), func() bool {
		body, err := k.get(ctx, "/healthz")
		return err == nil && string(body) == "ok"
	})
	if err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.daemon = d
	return nil
}

// stopKubelet ends the kubelet with SIGTERM, if it is running.
func (k *machine) stopKubelet() error { return k.endKubelet(syscall.SIGTERM) }

func (k *machine) endKubelet(signal syscall.Signal) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.daemon.Stop(signal)
}

// kubeletLog returns the end of the kubelet's log.
func (k *machine) kubeletLog(lines int) string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.daemon.Tail(lines)
}

// checkTeardown waits until the kubelet has removed all pods and their sandboxes, which
// its garbage collection does once a minute, and checks that crius has left nothing.
func (k *machine) checkTeardown() (err error) {
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

// objects lists the pods and containers of crius, "" if there are none.
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
