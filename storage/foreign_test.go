package storage

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	cstorage "go.podman.io/storage"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/foreign"
	"github.com/crius-run/crius/test/kit/program"
	"github.com/crius-run/crius/test/kit/wait"
)

// container makes one in the store as CRI-O and podman do, with the metadata of either.
func (n *node) container(id, image, metadata string, names ...string) {
	n.t.Helper()
	c, err := n.store.CreateContainer(id, names, image, "", metadata, &cstorage.ContainerOptions{LabelOpts: []string{"disable"}, Volatile: true})
	if err == nil {
		err = n.store.AddNames(c.LayerID, []string{names[0] + "-layer"})
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(n.cfg.Root, "overlay", c.LayerID, "diff", "written"), make([]byte, 1<<20), 0o600)
	}
	if err != nil {
		n.t.Fatal(err)
	}
}

// Ids of the containers of neighbours.
var (
	infraID  = strings.Repeat("1", 64)
	webID    = strings.Repeat("2", 64)
	podmanID = strings.Repeat("3", 64)
)

// neighbours is a node whose image is used by a pod of CRI-O, a container of podman
// and one of crius.
func neighbours(t *testing.T) (*node, *Image) {
	t.Helper()
	n, img := pulled(t, motd(t, "x"))
	const pod = "k8s_web_shop_5e0c_0"
	crio := func(name, short, more string) string {
		return fmt.Sprintf(`{"pod-name":%q,"pod-id":%q,"image-name":"x","image-id":%q,"name":%q,"metadata-name":%q,"created-at":1700000000%s}`,
			pod, infraID, img.ID, name, short, more)
	}
	n.container(infraID, img.ID, crio("k8s_POD_web_shop_5e0c_0", "web", `,"uid":"5e0c","namespace":"shop","pod":true`), "k8s_POD_web_shop_5e0c_0", pod)
	n.container(webID, img.ID, crio("k8s_nginx_web_shop_5e0c_0", "nginx", `,"attempt":1`), "k8s_nginx_web_shop_5e0c_0")
	n.container(podmanID, img.ID, fmt.Sprintf(`{"image-name":"x","image-id":%q,"name":"toolbox","created-at":1700000000}`, img.ID), "toolbox")
	own := n.rootfs("own", img.ID)
	n.mount(own)
	t.Cleanup(func() { n.removeRootfs(own) })
	return n, img
}

// foreign are the containers that others have in the store, by id.
func (n *node) others() map[string]foreign.Container {
	n.t.Helper()
	list, err := n.Foreign.List(testContext(n.t), true)
	if err != nil {
		n.t.Fatal(err)
	}
	all := map[string]foreign.Container{}
	for _, c := range list {
		all[c.ID] = c
	}
	return all
}

func ids(list []foreign.Container) (all []string) {
	for _, c := range list {
		all = append(all, c.ID)
	}
	return all
}

func TestForeignContainersAreListed(t *testing.T) {
	n, _ := neighbours(t)
	all := n.others()
	if len(all) != 3 {
		t.Fatalf("found %+v", all)
	}
	for id, want := range map[string]foreign.Container{
		infraID:  {Name: "POD", Runtime: foreign.CRIO, Pod: "shop/web", PodID: infraID},
		webID:    {Name: "nginx", Runtime: foreign.CRIO, Pod: "shop/web", PodID: infraID},
		podmanID: {Name: "toolbox"},
	} {
		got := all[id]
		if got.Name != want.Name || got.Runtime != want.Runtime || got.Pod != want.Pod || got.PodID != want.PodID || got.Kept != "" {
			t.Errorf("%+v, want %+v", got, want)
		}
		if got.Created.IsZero() || got.Bytes < 1<<20 || got.Bytes > 2<<20 {
			t.Errorf("created at %s, %d bytes", got.Created, got.Bytes)
		}
	}
}

// Containers of CRI-O are removed with their layers; those of podman and of crius stay.
func TestContainersOfCrioAreRemoved(t *testing.T) {
	n, img := neighbours(t)
	layers := []string{n.others()[infraID].Layer, n.others()[webID].Layer}
	list, err := n.Foreign.List(testContext(t), false)
	if err != nil {
		t.Fatal(err)
	}
	chosen, err := foreign.Select(list, nil)
	if err != nil {
		t.Fatal(err)
	}
	removed, kept, err := n.Foreign.Remove(testContext(t), ids(chosen))
	if err != nil || len(kept) != 0 || !slices.Equal(ids(removed), []string{infraID, webID}) {
		t.Fatalf("removed %+v, kept %+v, %v", removed, kept, err)
	}
	for _, layer := range layers {
		if _, err := os.Stat(filepath.Join(n.cfg.Root, "overlay", layer)); !os.IsNotExist(err) {
			t.Errorf("layer %s: %v", layer, err)
		}
	}
	if left := n.others(); len(left) != 1 || left[podmanID].Bytes < 1<<20 {
		t.Errorf("left are %+v", left)
	}
	if records, err := n.holds.records(); err != nil || len(records) != 1 {
		t.Errorf("holds are %v, %v", records, err)
	}
	defects, err := n.Verify(t.Context(), nil)
	if err != nil || len(defects) > 0 {
		t.Errorf("the store has defects: %+v, %v", defects, err)
	}

	// A container of podman is removed if it is named. With an unknown id nothing is removed.
	if _, _, err := n.Foreign.Remove(testContext(t), []string{podmanID, infraID}); !errors.Is(err, fault.NotFound) {
		t.Errorf("one that is gone: %v", err)
	}
	if _, _, err := n.Foreign.Remove(testContext(t), []string{holdID(img.ID)}); !errors.Is(err, fault.NotFound) {
		t.Errorf("a hold of crius: %v", err)
	}
	if left := n.others(); len(left) != 1 {
		t.Errorf("left are %+v", left)
	}
	removed, kept, err = n.Foreign.Remove(testContext(t), []string{podmanID})
	if err != nil || len(kept) != 0 || !slices.Equal(ids(removed), []string{podmanID}) {
		t.Errorf("removed %+v, kept %+v, %v", removed, kept, err)
	}
}

// A container that is in use is never removed, however that shows.
func TestForeignContainersInUseStay(t *testing.T) {
	n, _ := neighbours(t)
	stays := func(why string, id string) {
		t.Helper()
		_, kept, err := n.Foreign.Remove(testContext(t), []string{id})
		if err != nil || len(kept) != 1 || !strings.Contains(kept[0].Kept, why) {
			t.Errorf("kept %+v, %v; want one because of %q", kept, err, why)
		}
		if _, there := n.others()[id]; !there {
			t.Fatalf("%s is gone", id)
		}
	}
	// named is a command whose program has one of the names that are looked for.
	named := func(name, argument string) []string {
		t.Helper()
		shell, err := os.ReadFile("/bin/sh")
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(t.TempDir(), name)
		if err := program.Write(path, shell); err != nil {
			t.Fatal(err)
		}
		return []string{path, "-c", "echo ready; read x", argument}
	}
	started := func(command ...string) (end func()) {
		t.Helper()
		cmd := exec.Command(command[0], command[1:]...)
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		if _, err := out.Read(make([]byte, 6)); err != nil {
			t.Fatal(err)
		}
		return func() { in.Close(); _ = cmd.Wait() }
	}

	end := started(named("conmon", webID)...)
	stays("(conmon) belongs to it", webID)
	end()

	end = started(named("crio", "")...)
	stays("CRI-O is running", webID)
	if c := n.others()[podmanID]; c.Kept != "" {
		t.Errorf("podman's is taken for CRI-O's: %s", c.Kept)
	}
	end()

	merged, err := n.store.Mount(podmanID, "")
	if err != nil {
		t.Fatal(err)
	}
	stays("mounted where process ", podmanID)
	// It is the root of a process, even if it is unmounted elsewhere.
	end = started("unshare", "--mount", "--propagation", "private", "sh", "-c", "mount --bind $0 $1 && echo ready; read x", merged, t.TempDir())
	if _, err := n.store.Unmount(podmanID, true); err != nil {
		t.Fatal(err)
	}
	stays("mounted where process ", podmanID)
	end()
	wait.For(t, "container unmounted", func() bool { return n.others()[podmanID].Kept == "" })

	// Whoever has mounted it out of sight has counted it.
	if _, err := n.store.Mount(webID, ""); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("umount", filepath.Join(n.cfg.Root, "overlay", n.others()[webID].Layer, "merged")).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	stays("mounted, according to the image store", webID)
	if _, err := n.store.Unmount(webID, true); err != nil {
		t.Error(err)
	}
}

// A process that has opened a store read-only, or has lost it to another crius, removes nothing.
func TestForeignContainersAreTheOwnersToRemove(t *testing.T) {
	n, _ := neighbours(t)
	cfg := n.cfg
	cfg.ReadOnly = true
	looking, err := openStore(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if list, err := looking.Foreign.List(t.Context(), false); err != nil || len(list) != 3 {
		t.Errorf("listed %+v, %v", list, err)
	}
	if _, _, err := looking.Foreign.Remove(t.Context(), []string{webID}); !errors.Is(err, fault.Precondition) {
		t.Errorf("removed without owning the store: %v", err)
	}
	if len(n.others()) != 3 {
		t.Error("a container is gone")
	}
	if err := looking.Close(t.Context()); err != nil {
		t.Error(err)
	}
}
