// Package realkubelet runs the kubelet program on a node of package node, so
// that its changes outside of the node's directory stay private.
package realkubelet

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/crius-run/crius/test/kit/node"
)

// NodeName is the kubelet's name for its node; names of static pods contain it.
const NodeName = "node"

// Address is the node's own, in its network.
const Address = "192.0.2.1"

// Prepare writes the configuration of a kubelet for the runtime at a socket,
// and the files that the kubelet expects. changes override the configuration.
func Prepare(ctx context.Context, n *node.Node, socket string, changes map[string]any) error {
	for _, dir := range []string{"static", "crio", "kubelet", "sys", "volume-plugins"} {
		if err := os.MkdirAll(n.Path(dir), 0o755); err != nil {
			return err
		}
	}
	for name, value := range tunables {
		if err := os.WriteFile(n.Path("sys", filepath.Base(name)), []byte(value+"\n"), 0o644); err != nil {
			return err
		}
	}
	full := configuration(n, socket)
	maps.Copy(full, changes)
	text, err := json.MarshalIndent(full, "", "  ")
	if err != nil {
		return err
	}
	_, err = n.Run(ctx, "ip", "address", "add", Address+"/32", "dev", "lo")
	return errors.Join(err,
		os.WriteFile(n.Path("kubelet.json"), text, 0o644),
		os.WriteFile(n.Path("resolv.conf"), []byte("nameserver 192.0.2.53\n"), 0o644),
		makeCgroup(n.CgroupParent()+"/kubepods/besteffort"),
		makeCgroup(n.CgroupParent()+"/kubepods/burstable"))
}

// configuration is what every kubelet has.
func configuration(n *node.Node, socket string) map[string]any {
	return map[string]any{
		"kind":                     "KubeletConfiguration",
		"apiVersion":               "kubelet.config.k8s.io/v1beta1",
		"podLogsDir":               n.Path("logs"),
		"port":                     10250,
		"healthzPort":              0,
		"containerRuntimeEndpoint": "unix://" + socket,
		"cgroupDriver":             "cgroupfs",
		"cgroupRoot":               n.CgroupParent(),
		"failCgroupV1":             false,
		"failSwapOn":               false,
		"volumePluginDir":          n.Path("volume-plugins"),
		"resolvConf":               n.Path("resolv.conf"),
		"makeIPTablesUtilChains":   false,
		"registryPullQPS":          0,
		"evictionHard":             map[string]any{"memory.available": "1Mi"}, // the kubelet must not react to the test machine's disk
	}
}

// makeCgroup makes a cgroup in every hierarchy. A kubelet does not make its
// root, and makes its cgroups below that only in some hierarchies; runtimes
// make them in the others.
func makeCgroup(path string) error {
	hierarchies, err := filepath.Glob("/sys/fs/cgroup/*/cgroup.procs")
	if err != nil {
		return err
	}
	if len(hierarchies) == 0 { // cgroup v2 only
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
// private files.
var tunables = map[string]string{
	"/proc/sys/vm/overcommit_memory": "1",
	"/proc/sys/vm/panic_on_oom":      "0",
	"/proc/sys/kernel/panic":         "10",
	"/proc/sys/kernel/panic_on_oops": "1",
}

// surroundings is a script that runs a kubelet in a mount namespace in which
// its writes outside of its own directories are private, and in which CRI-O's
// socket is crius's. Its mounts below the node's directory propagate to the
// node.
const surroundings = `
mount --make-private /
mount --make-rprivate /proc
mount -t tmpfs log /var/log
mount -t tmpfs lib /var/lib
mount -t tmpfs crio /run
mkdir /run/crio
ln -s "$1/crio/crio.sock" /run/crio/crio.sock
for file in $2; do mount --bind "$1/sys/${file##*/}" "$file"; done
shift 2
exec "$@"`

// Command returns the command line of a kubelet on a prepared node.
func Command(n *node.Node, program string, args ...string) *exec.Cmd {
	var files []string
	for name := range tunables {
		files = append(files, name)
	}
	own := []string{"--mount", "--propagation", "unchanged", "sh", "-ec", surroundings, "sh", n.Path(), strings.Join(files, " "),
		program, "--config", n.Path("kubelet.json"), "--root-dir", n.Path("kubelet"), "--cert-dir", n.Path("kubelet", "pki"),
		"--hostname-override", NodeName, "--node-ip", Address, "--v", "2"}
	return exec.Command("unshare", append(own, args...)...)
}
