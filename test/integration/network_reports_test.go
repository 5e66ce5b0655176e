package integration

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
)

// unleased checks that no address is reserved.
func (w *world) unleased(t *testing.T) {
	t.Helper()
	if left := mustInventory(t, w).About("lease:"); len(left) > 0 {
		t.Errorf("addresses are still reserved: %q", left)
	}
}

// saysOfCleanup waits until crius check says why the cleanup after a pod is not finished.
func (w *world) saysOfCleanup(t *testing.T, p *pod, words ...string) {
	t.Helper()
	wait.For(t, "crius check to say why the cleanup is not finished", func() bool { return w.check(t).says(append(words, "FAIL", "cleanup of "+p.id)...) })
}

// A pod whose network plugin has been uninstalled, together with the configuration, can be stopped and removed, and
// its name is free. Its address is released when the plugin is back.
func TestPluginIsMissingWhenAPodIsRemoved_containerd_8774_cri_315(t *testing.T) {
	t.Parallel()
	w := spotless(t, node.Options{})
	bridge := w.Path("cni", "bin", "bridge")
	for _, plugin := range []string{"bridge", "portmap", "bandwidth", "host-local"} {
		must(t, os.Symlink("/usr/lib/cni/"+plugin, w.Path("cni", "bin", plugin)))
	}
	must(t, w.Configure("20-plugins", "[network]\nplugin_dirs = ['{{.Path \"cni\" \"bin\"}}']\n"), w.Crash(t.Context()))
	p := w.runForwarded(t, 0)
	conf := read(t, w.Path("cni", "net.d", "10-p.conflist"))
	must(t, os.Remove(bridge), os.Remove(w.Path("cni", "net.d", "10-p.conflist")))
	p.stop(t)
	equal(t, "state", p.status(t).State, cri.PodSandboxState_SANDBOX_NOTREADY)
	p.remove(t)
	w.saysOfCleanup(t, p, `CNI plugin "bridge" is not installed`, "network.plugin_dirs")
	must(t, os.Symlink("/usr/lib/cni/bridge", bridge))
	put(t, w.Path("cni", "net.d", "10-p.conflist"), conf)
	next := w.run(t, "crun", func(c *cri.PodSandboxConfig) { c.Metadata = p.config.Metadata })
	next.vanish(t)
	w.Restored(t, w.empty)
}

// What libcni has recorded for itself may be empty after a power cut, or gone: the pod can be stopped all the same.
func TestRecordOfLibcniIsDamaged_containerd_8197_cni_1055_aws_vpc_cni_2283(t *testing.T) {
	t.Parallel()
	w := spotless(t, node.Options{})
	w.masquerade(t)
	for i, text := range []string{"", "{", `{"kind": "cniCacheV1"}`, `{"kind":"cniCacheV1","result":{"cniVersion":"9.9.9"}}`} {
		p := w.runForwarded(t, i)
		results, err := filepath.Glob(filepath.Join(p.stateDir(), "cni", "results", "*"))
		must(t, err)
		equal(t, "number of libcni's records", len(results), 1)
		put(t, results[0], text)
		p.stop(t)
		p.remove(t)
	}
	w.Restored(t, w.empty)
}

// Rules of portmap have the name of the network in theirs. The pod's is that of its ADD, whatever the configuration
// says by now.
func TestNetworkIsRenamedOrGone_plugins_752(t *testing.T) {
	t.Parallel()
	w := spotless(t, node.Options{})
	w.masquerade(t)
	conf := w.Path("cni", "net.d", "10-p.conflist")
	before := read(t, conf)
	renamed, orphan := w.runForwarded(t, 0), w.runForwarded(t, 1)
	put(t, conf, strings.ReplaceAll(before, `"name": "pods"`, `"name": "renamed"`))
	must(t, w.Crash(t.Context()))
	renamed.stop(t)
	renamed.remove(t)
	must(t, os.Remove(conf), w.Crash(t.Context()))
	orphan.stop(t)
	orphan.remove(t)
	w.Restored(t, w.empty)
	put(t, conf, before)
}

// A network namespace that somebody has unmounted, also if its file is left: the pod can be stopped, and its address
// is released.
func TestNetworkNamespaceIsMissing_crio_9372_crio_9923_cri_950(t *testing.T) {
	t.Parallel()
	w := spotless(t, node.Options{})
	for i, restart := range []bool{false, true} {
		unpinned, unmounted := w.runForwarded(t, 2*i), w.runForwarded(t, 2*i+1)
		unpinned.unpinAll(t)
		must(t, unix.Unmount(w.Path("ns", "netns", "crius-"+unmounted.id), unix.MNT_DETACH))
		if restart {
			must(t, w.Crash(t.Context()))
		}
		for _, p := range []*pod{unpinned, unmounted} {
			equal(t, "state", p.listed(t), cri.PodSandboxState_SANDBOX_NOTREADY)
			p.stop(t)
			for _, lease := range mustInventory(t, w).About("lease:") {
				if strings.Contains(lease, p.id) {
					t.Errorf("a stopped pod has %s", lease)
				}
			}
			p.remove(t)
		}
	}
	w.Restored(t, w.empty)
}

// Restarts of the server and of the node reserve no more addresses than there are pods.
func TestRestartsReserveNoAddresses_kubernetes_34278_kubernetes_108121_podman_3759(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	p := w.run(t, "crun")
	for range 3 {
		must(t, w.Crash(t.Context()))
		equal(t, "addresses after a restart", len(mustInventory(t, w).About("lease:")), 2)
	}
	for range 2 {
		must(t, w.Reboot(t.Context()))
		next := w.run(t, "crun", func(c *cri.PodSandboxConfig) {
			c.Metadata.Name, c.Metadata.Uid, c.Metadata.Attempt = p.config.Metadata.Name, p.config.Metadata.Uid, p.config.Metadata.Attempt+1
		})
		p.stop(t)
		equal(t, "addresses after a reboot", len(mustInventory(t, w).About("lease:")), 2)
		p.remove(t)
		p = next
	}
	p.stop(t)
	w.unleased(t)
}

// A plugin that refuses a DEL without a namespace does not keep the pod from being stopped and removed after a reboot.
// Its address is released once the plugin accepts the DEL.
func TestPluginRefusesAMissingNamespace_sriov_cni_18_containerd_6565(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	plugin := w.cni(t)
	p := w.run(t, "crun")
	plugin.does(t, "DEL", "fail failed to Statfs")
	must(t, w.Reboot(t.Context()))
	p.stop(t)
	p.remove(t)
	w.saysOfCleanup(t, p, "failed to Statfs")
	plugin.heal(t)
	must(t, w.Crash(t.Context()))
	wait.For(t, "the address to be released", func() bool { return len(mustInventory(t, w).About("lease:")) == 0 })
}
