package integration

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/storage/checkpoint"
)

// restoredBy runs crius restore with these arguments, which must succeed, and returns the pod with its only container,
// which is that of the checkpoint.
func (w *world) restoredBy(t *testing.T, of *container, args ...string) *container {
	t.Helper()
	code, said, errs := w.try(t, "", append([]string{"restore"}, args...)...)
	id := strings.TrimSpace(said)
	if code != 0 || len(id) != 64 {
		t.Fatalf("crius restore %q: exit code %d, %q, %q", args, code, said, errs)
	}
	p := &pod{w: w, id: id, handler: of.pod.handler, config: w.configOf(t, id), made: []string{id}}
	t.Cleanup(func() { p.vanish(t) })
	list, err := w.Runtime().ListContainers(t.Context(), &cri.ListContainersRequest{Filter: &cri.ContainerFilter{PodSandboxId: id}})
	must(t, err)
	equal(t, "containers", len(list.Containers), 1)
	c := &container{p, list.Containers[0].Id, of.config}
	p.made = append(p.made, c.id)
	return c
}

// configOf returns the request by which a pod was made.
func (w *world) configOf(t *testing.T, id string) *cri.PodSandboxConfig {
	t.Helper()
	resp, err := w.Runtime().PodSandboxStatus(t.Context(), &cri.PodSandboxStatusRequest{PodSandboxId: id, Verbose: true})
	must(t, err)
	var info struct{ Config *cri.PodSandboxConfig }
	must(t, json.Unmarshal([]byte(resp.Info["info"]), &info))
	return info.Config
}

// cannotRestore runs crius restore, which must fail with these words and leave no pod that was not there before.
func (w *world) cannotRestore(t *testing.T, like string, words []string, args ...string) {
	t.Helper()
	before := w.podsNamed(t, like)
	code, said, errs := w.try(t, "", append([]string{"restore"}, args...)...)
	t.Logf("crius restore %q: %s", args, errs)
	if code != 1 || said != "" {
		t.Errorf("crius restore %q: exit code %d, printed %q", args, code, said)
	}
	for _, word := range words {
		if !strings.Contains(errs, word) {
			t.Errorf("crius restore %q says %q, want %q", args, errs, word)
		}
	}
	equal(t, "pods after "+strings.Join(args, " "), w.podsNamed(t, like), before)
}

// A pod is restored on the node without a kubelet, from what its checkpoint signs for: under another name beside the
// pod that it is of, held until somebody starts it, or in its place.
func TestRestoreCommand(t *testing.T) {
	t.Parallel()
	w, ok := dumps(t)
	if !ok {
		return
	}
	p, dir := w.run(t, "runc"), filepath.Join(w.dir(t), "pod")
	name := p.config.Metadata.Name
	c := p.start(t, "write /dev/shm/shared memory ; lines 1000000000 20ms")
	c.says(t, "line 5")
	if code, _, errs := w.try(t, "", "checkpoint", "default/"+name, "--output", dir); code != 0 {
		t.Fatal(errs)
	}
	before := c.lines(t)

	beside := w.restoredBy(t, c, dir, "--name", name+"-2", "--timeout", "5m")
	if first := beside.number(t); first < 5 || first > before+1 {
		t.Errorf("the counter goes on with %d; it had written %d", first, before)
	}
	equal(t, "/dev/shm", beside.exec(t, "cat /dev/shm/shared"), "memory")
	made := beside.pod.config
	uid := made.Metadata.Uid
	if made.Metadata.Name != name+"-2" || made.Metadata.Namespace != "default" || len(uid) != 36 || uid == p.config.Metadata.Uid {
		t.Errorf("the pod is %v", made.Metadata)
	}
	equal(t, "label", made.Labels["io.kubernetes.pod.uid"], uid)
	equal(t, "logs", made.LogDirectory, filepath.Join(w.Path("logs"), "default_"+name+"-2_"+uid))
	equal(t, "annotation", made.Annotations["kubernetes.io/config.source"], "api")
	c.goesOnCounting(t)

	w.cannotRestore(t, name, []string{"already exists"}, dir)
	w.cannotRestore(t, name, []string{"no such file or directory"}, dir+"-missing")
	changed := w.dir(t)
	must(t, os.CopyFS(changed, os.DirFS(dir)))
	put(t, filepath.Join(changed, checkpoint.Request), strings.Replace(read(t, filepath.Join(changed, checkpoint.Request)), name, "evil", 1))
	w.cannotRestore(t, "evil", []string{checkpoint.Request, "signed for"}, changed)
	put(t, filepath.Join(changed, checkpoint.Manifest), read(t, filepath.Join(changed, checkpoint.Manifest))+" ")
	w.cannotRestore(t, "evil", []string{"not signed by this node"}, changed)

	p.stop(t)
	p.remove(t)
	link := filepath.Join(w.dir(t), "link")
	must(t, os.Symlink(dir, link))
	held := w.restoredBy(t, c, link, "--start=false")
	equal(t, "state", held.status(t).State, cri.ContainerState_CONTAINER_CREATED)
	equal(t, "name", held.pod.config.Metadata.Name, name)
	held.start(t)
	held.number(t)
	if n := w.metric(t, "crius_restore_bytes_total"); n == 0 {
		t.Error("no bytes were restored")
	}
}
