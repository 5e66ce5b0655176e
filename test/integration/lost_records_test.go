package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/inventory"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
)

// masquerade makes the node's bridge masquerade: its rules could be left as well.
func (w *world) masquerade(t *testing.T) {
	t.Helper()
	conf := w.Path("cni", "net.d", "10-p.conflist")
	put(t, conf, strings.Replace(read(t, conf), `"isGateway": true`, `"isGateway": true, "ipMasq": true`, 1))
}

// A loss is what happens to the files of a pod while no server runs.
type loss struct {
	name string
	do   func(t *testing.T, p *pod)
}

func (p *pod) stateDir() string { return filepath.Join(p.w.StateRoot(), "pods", p.id) }
func (p *pod) record() string   { return filepath.Join(p.stateDir(), "pod.json") }

// overwrite replaces the record, and its previous version if that is still there.
func (p *pod) overwrite(t *testing.T, text string) {
	t.Helper()
	put(t, p.record(), text)
	if err := os.Remove(p.record() + ".last"); err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
}

// losses are the ways in which a pod's record is lost, with more and more of what leads to the pod.
func losses() []loss {
	return []loss{
		{"empty", func(t *testing.T, p *pod) { p.overwrite(t, "") }},
		{"cut off", func(t *testing.T, p *pod) { p.overwrite(t, read(t, p.record())[:200]) }},
		{"zeros", func(t *testing.T, p *pod) { p.overwrite(t, strings.Repeat("\x00", 4096)) }},
		{"missing", func(t *testing.T, p *pod) {
			p.overwrite(t, "")
			must(t, os.Remove(p.record()))
		}},
		{"empty, libcni's as well", func(t *testing.T, p *pod) {
			p.overwrite(t, "")
			results, err := filepath.Glob(filepath.Join(p.stateDir(), "cni", "results", "*"))
			must(t, err)
			equal(t, "number of libcni's records", len(results), 1)
			put(t, results[0], "")
		}},
		{"state directory missing", func(t *testing.T, p *pod) { must(t, os.RemoveAll(p.stateDir())) }},
		{"both directories missing", func(t *testing.T, p *pod) {
			must(t, os.RemoveAll(p.stateDir()))
			p.dropRunDir(t)
		}},
	}
}

// dropRunDir removes the pod's run directory, with what is mounted there.
func (p *pod) dropRunDir(t *testing.T) {
	t.Helper()
	dir := filepath.Join(p.w.RunRoot(), "pods", p.id)
	for _, name := range []string{"shm", "files"} {
		must(t, unix.Unmount(filepath.Join(dir, name), unix.MNT_DETACH))
	}
	must(t, os.RemoveAll(dir))
}

// unpinAll removes the pod's namespaces.
func (p *pod) unpinAll(t *testing.T) {
	t.Helper()
	pins, err := filepath.Glob(p.w.Path("ns", "*", "crius-"+p.id))
	must(t, err)
	equal(t, "number of namespaces", len(pins), 3)
	for _, pin := range pins {
		must(t, unix.Unmount(pin, unix.MNT_DETACH), os.Remove(pin))
	}
}

// runForwarded runs a pod with a host port and a container.
func (w *world) runForwarded(t *testing.T, i int, change ...podChange) *pod {
	t.Helper()
	p := w.run(t, handlers[i%2], append(change, func(c *cri.PodSandboxConfig) {
		c.Metadata.Name += fmt.Sprint(i)
		c.PortMappings = []*cri.PortMapping{{HostPort: int32(31000 + i), ContainerPort: 80}}
	})...)
	p.start(t, "sleep")
	return p
}

// restoredAfterLoss waits until the node is as it was before the pods, except for the damaged records, which are
// left to a person.
func (w *world) restoredAfterLoss(t *testing.T) {
	t.Helper()
	must(t, os.RemoveAll(filepath.Join(w.StateRoot(), "pods", "damaged")))
	w.Restored(t, w.empty)
}

// A pod whose record is lost leaves nothing on the node once a server has started: no
// address, no rules of plugins, no interface, no namespace, mount or cgroup.
func TestLostRecordsLeakNothing(t *testing.T) {
	t.Parallel()
	w := spotless(t, node.Options{})
	w.masquerade(t)
	var pods []*pod
	for i := range losses() {
		pods = append(pods, w.runForwarded(t, i))
	}
	must(t, w.Kill())
	for i, l := range losses() {
		l.do(t, pods[i])
		t.Logf("%s: pod %s", l.name, pods[i].id)
	}
	must(t, w.Start(t.Context()))
	w.restoredAfterLoss(t)
}

// The same if nothing but the lease leads to the pod any more. bridge does not masquerade here: without the
// namespace it does not remove its rules.
func TestLostPodLeaksNoAddress(t *testing.T) {
	t.Parallel()
	w := spotless(t, node.Options{})
	p := w.runForwarded(t, 0)
	must(t, w.Kill(), os.RemoveAll(p.stateDir()))
	p.dropRunDir(t)
	p.unpinAll(t)
	must(t, w.Start(t.Context()))
	w.restoredAfterLoss(t)
}

// handlerNetwork has the addresses of a handler's pods.
const handlerNetwork = `{"cniVersion": "1.0.0", "name": "own", "plugins": [
	{"type": "ptp", "ipMasq": true, "ipam": {"type": "host-local", "dataDir": "{{.Path "cni" "leases"}}", "ranges": [[{"subnet": "10.98.0.0/16"}]]}},
	{"type": "portmap", "capabilities": {"portMappings": true}}]}`

// The network of the pod is not the one in force: its handler has another, or the configuration has another name
// by now; or it is a pod with a container and a cgroup parent of its own.
func TestLostRecordsOfOtherPodsLeakNothing(t *testing.T) {
	t.Parallel()
	w := spotless(t, node.Options{Config: "[runtime.handlers.own]\npath = \"runc\"\ncni_conf_dir = '{{.Path \"own.d\"}}'\n"})
	w.masquerade(t)
	must(t, w.Write("own.d/10-own.conflist", handlerNetwork))
	parent := w.CgroupParent() + "/burstable/pod-lost"
	inPod, _ := pidMode(cri.NamespaceMode_POD)
	p := w.runForwarded(t, 0, inPod, func(c *cri.PodSandboxConfig) { c.Linux.CgroupParent = parent })
	renamed := w.runForwarded(t, 1)
	own := w.run(t, "own", func(c *cri.PodSandboxConfig) {
		c.Metadata.Name += "own"
		c.PortMappings = []*cri.PortMapping{{HostPort: 31002, ContainerPort: 80}}
	})
	equal(t, "the handler's pod has an address of its network", strings.HasPrefix(own.status(t).Network.Ip, "10.98."), true)
	conf := w.Path("cni", "net.d", "10-p.conflist")
	must(t, w.Kill())
	p.overwrite(t, "")
	renamed.overwrite(t, "")
	put(t, conf, strings.Replace(read(t, conf), `"name": "pods"`, `"name": "renamed"`, 1))
	must(t, os.RemoveAll(own.stateDir()))
	must(t, w.Start(t.Context()))
	for _, id := range p.made {
		wait.For(t, "the cgroup of "+id+" to go", func() bool { return len(inventory.Cgroups(parent+"/crius-"+id)) == 0 })
	}
	for _, dir := range inventory.Cgroups(parent) { // it belongs to the kubelet
		must(t, os.Remove(dir), os.Remove(filepath.Dir(dir)))
	}
	w.restoredAfterLoss(t)
}

// After a reboot the namespace is gone, but not the lease.
func TestLostRecordsLeakNoAddressAfterAReboot(t *testing.T) {
	t.Parallel()
	w := spotless(t, node.Options{})
	p := w.runForwarded(t, 0)
	must(t, w.Kill())
	p.overwrite(t, "")
	must(t, w.Reboot(t.Context()), os.RemoveAll(filepath.Join(w.StateRoot(), "pods", "damaged")))
	for _, what := range []string{"lease:", p.stateDir()} {
		wait.For(t, what+" to go", func() bool { return len(mustInventory(t, w).About(what)) == 0 })
	}
}

// A DEL that fails is retried, by this server and the next. Only the network, its namespace and the state directory
// wait for it, and crius check says why.
func TestLostPodsNetworkIsReleasedLater(t *testing.T) {
	t.Parallel()
	w := spotless(t, node.Options{})
	w.masquerade(t)
	plugin := w.cni(t)
	p := w.runForwarded(t, 0)
	must(t, w.Kill())
	p.overwrite(t, "")
	plugin.does(t, "DEL", "fail no route to the agent")
	for _, start := range []string{"first", "second"} {
		must(t, w.Start(t.Context()))
		w.saysOfCleanup(t, p, "which has no record", "no route to the agent")
		for _, id := range p.made {
			wait.For(t, "the cgroup of "+id+" to go", func() bool { return len(inventory.Cgroups(w.CgroupParent()+"/crius-"+id)) == 0 })
		}
		left := mustInventory(t, w)
		for _, what := range []string{"lease:", p.stateDir(), w.Path("ns", "netns", "crius-"+p.id)} {
			if len(left.About(what)) == 0 {
				t.Errorf("%s start: %s is gone before the network", start, what)
			}
		}
		if about := left.About(filepath.Join(w.RunRoot(), "pods", p.id)); len(about) > 0 {
			t.Errorf("%s start: %q wait for the network", start, about)
		}
		must(t, w.Kill())
	}
	plugin.heal(t)
	must(t, w.Start(t.Context()))
	w.restoredAfterLoss(t)
}
