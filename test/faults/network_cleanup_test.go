package faults

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// A node that has lost its plugins, its configuration and a pod's network
// namespace still stops and removes the pod. The pending network cleanup is
// done once the plugins are back, also after a restart.
func TestStopWithoutPluginsConfigurationOrNamespace_crio_4084(t *testing.T) {
	t.Parallel()
	w := scene.Spotless(t, node.Options{})
	pluginsOfItsOwn(t, w)
	v := watch(t, w)
	var pods []*scene.Pod
	for _, handler := range append(scene.Handlers, scene.Handlers...) {
		p := w.Pod(t, handler)
		p.Start(t, "sleep")
		pods = append(pods, p)
	}
	for _, p := range pods[2:] { // two of them lose the namespace, too
		pin := w.Path("ns", "netns", "crius-"+p.ID)
		if err := unix.Unmount(pin, unix.MNT_DETACH); err != nil {
			t.Fatal(err)
		}
		if err := os.Remove(pin); err != nil {
			t.Fatal(err)
		}
	}
	for _, dir := range []string{"plugins", "cni/net.d"} {
		if err := os.Rename(w.Path(dir), w.Path(dir+".away")); err != nil {
			t.Fatal(err)
		}
	}
	for i, p := range pods {
		p.Stop(t)
		scene.Equal(t, "state", p.Status(t).State, cri.PodSandboxState_SANDBOX_NOTREADY)
		if i%2 == 0 {
			p.Remove(t)
		}
	}
	v.unaffected(t)
	if leases(t, w) < len(pods) {
		t.Error("addresses of stopped pods were given back without a plugin")
	}
	if err := w.Crash(t.Context()); err != nil { // a pending cleanup survives the server
		t.Fatal(err)
	}
	for _, dir := range []string{"plugins", "cni/net.d"} {
		if err := os.Rename(w.Path(dir+".away"), w.Path(dir)); err != nil {
			t.Fatal(err)
		}
	}
	wait.For(t, "the addresses of all pods but the prober to be given back", func() bool { return leases(t, w) == 2 })
	for _, p := range append(pods, v.pod) {
		p.Stop(t)
		p.Remove(t)
	}
	w.Bare(t)
}

// pluginsOfItsOwn gives the node a plugin directory that can be removed.
func pluginsOfItsOwn(t *testing.T, w *scene.World) {
	t.Helper()
	plugins, err := filepath.Glob("/usr/lib/cni/*")
	if err != nil || len(plugins) == 0 {
		t.Fatalf("no plugins: %v", err)
	}
	if err := os.Mkdir(w.Path("plugins"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, plugin := range plugins {
		if err := os.Symlink(plugin, w.Path("plugins", filepath.Base(plugin))); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Configure("20-plugins", "[network]\nplugin_dirs = [\"{{.Path \"plugins\"}}\"]\n"); err != nil {
		t.Fatal(err)
	}
	if err := w.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// leases counts addresses of both families.
func leases(t *testing.T, w *scene.World) int {
	t.Helper()
	files, err := filepath.Glob(w.Path("cni", "leases", "*", "*[.:]*[0-9a-f]"))
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, file := range files {
		if base := filepath.Base(file); base[0] != 'l' { // last_reserved_ip.N
			n++
		}
	}
	return n
}
