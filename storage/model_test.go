package storage

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/registry"
	"github.com/crius-run/crius/test/kit/registry/registrytest"
	"github.com/crius-run/crius/test/kit/wait"
)

// family makes images that share layers, so that they get in each other's way.
func family(t testing.TB, count int) (*registry.Registry, []*image.Artifact) {
	t.Helper()
	r := registrytest.Start(t)
	base := layer(t, image.Text("base", "base"))
	var images []*image.Artifact
	for i := range count {
		middle := layer(t, image.Text("middle", fmt.Sprint(i/2)))
		a := build(t, image.Image{Layers: []image.Layer{base, middle, layer(t, image.Text("own", fmt.Sprint(i)))}})
		r.Push("family", fmt.Sprint(i), a)
		images = append(images, a)
	}
	return r, images
}

// Workers pull, remove, mount and unmount at random. Whatever the order: no
// call fails that should not, no image in use is removed, a mounted root file system keeps all its layers,
// and in the end nothing is left. In between the node restarts.
func TestRandomOrder(t *testing.T) {
	t.Parallel()
	const workers, steps, rounds = 4, 15, 3
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	n := newNode(t)
	n.holds.grace = 5 * time.Millisecond // so that holds end in the middle of it all
	r, images := family(t, 6)
	mounted := make([]map[string]int, workers) // container to image, by worker
	for round := range rounds {
		var all sync.WaitGroup
		for w := range workers {
			if mounted[w] == nil {
				mounted[w] = map[string]int{}
			}
			all.Go(func() {
				m := &member{node: n, registry: r, images: images, random: rand.New(rand.NewPCG(seed, uint64(round*workers+w))), mounted: mounted[w], name: fmt.Sprintf("w%d", w)}
				for range steps {
					m.step()
				}
			})
		}
		all.Wait()
		if round == rounds-1 {
			break
		}
		n.restart()
		n.holds.grace = 5 * time.Millisecond
		var live []Rootfs
		for w := range workers {
			for name, i := range mounted[w] {
				live = append(live, n.rootfs(name, images[i].ID()))
			}
		}
		if err := n.Adopt(t.Context(), live); err != nil {
			t.Fatal(err)
		}
	}
	for w := range workers {
		for name, i := range mounted[w] {
			n.removeRootfs(n.rootfs(name, images[i].ID()))
		}
	}
	for _, img := range n.list() {
		n.remove(img.ID)
	}
	n.empty()
}

// member is one worker of the model.
type member struct {
	*node
	registry *registry.Registry
	images   []*image.Artifact
	random   *rand.Rand
	mounted  map[string]int
	name     string
	made     int
}

func (m *member) step() {
	i := m.random.IntN(len(m.images))
	ctx := testContext(m.t)
	ref := fmt.Sprintf("%s/family:%d", m.registry.Addr(), i)
	switch m.random.IntN(6) {
	case 0, 1:
		if img, err := m.Pull(ctx, PullRequest{Image: ref}); err != nil || img.ID != m.images[i].ID() {
			m.t.Errorf("pull %d: %v, %v", i, img, err)
		}
	case 2:
		err := m.Remove(ctx, ref)
		if err != nil && !errors.Is(err, fault.Precondition) {
			m.t.Errorf("remove %d: %v", i, err)
		}
		for name, used := range m.mounted {
			if used == i && err == nil {
				m.t.Errorf("image %d was removed while %s uses it", i, name)
			}
		}
	case 3:
		m.made++
		name := fmt.Sprintf("%s-%d-%d", m.name, m.random.Uint64(), m.made)
		c := m.rootfs(name, m.images[i].ID())
		err := m.MountRootfs(ctx, c)
		if errors.Is(err, fault.NotFound) {
			m.removeRootfs(c)
			return
		}
		if err != nil {
			m.t.Errorf("mount %d: %v", i, err)
			return
		}
		m.mounted[name] = i
		m.check(name)
	case 4:
		for name, i := range m.mounted {
			m.check(name)
			m.removeRootfs(m.rootfs(name, m.images[i].ID()))
			delete(m.mounted, name)
			break
		}
	case 5:
		for name := range m.mounted {
			m.check(name)
		}
		if _, err := m.Images(ctx); err != nil {
			m.t.Error(err)
		}
		if _, _, err := m.FsInfo(ctx); err != nil {
			m.t.Error(err)
		}
	}
}

// check reads a file of every layer, straight from the layers' directories.
func (m *member) check(name string) {
	i := m.mounted[name]
	for file, want := range map[string]string{"base": "base", "middle": fmt.Sprint(i / 2), "own": fmt.Sprint(i)} {
		path := filepath.Join(m.rootfs(name, "").Target, file)
		if got, err := os.ReadFile(path); err != nil || string(got) != want {
			m.t.Errorf("%s of a mounted image %d: %q, %v", file, i, got, err)
		}
	}
	one := m.holds.acquire(m.images[i].ID())
	defer m.holds.release(one)
	for _, dir := range one.lower {
		if _, err := os.Stat(dir); err != nil {
			m.t.Errorf("layer of a mounted image %d: %v", i, err)
		}
	}
	if len(one.lower) != 3 {
		m.t.Errorf("mounted image %d is held with %d layers", i, len(one.lower))
	}
}

// A process that is killed in the middle of pulls and removals, time and again,
// leaves a store in which every listed image is whole and nothing lies around.
func TestKilledAtRandom(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := noise(t, 200<<10, 200<<10, 200<<10)
	r := serve(t, "app", "1", a)
	if err := n.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	for i := range 8 {
		c := n.child("churn", r.Addr()+"/app:1")
		time.Sleep(time.Duration(rand.IntN(400)) * time.Millisecond)
		c.kill()
		wait.For(t, "the worker to end", func() bool { return len(n.workers()) == 0 })
		n.open()
		for _, img := range n.list() {
			c := n.rootfs(fmt.Sprint(i), img.ID)
			n.mount(c)
			if st, err := os.Stat(filepath.Join(c.Target, "noise")); err != nil || st.Size() != 200<<10 {
				t.Errorf("listed image is not whole: %v, %v", st, err)
			}
			n.removeRootfs(c)
			n.remove(img.ID)
		}
		n.empty()
		if err := n.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	n.open()
	n.pull(r.Addr() + "/app:1")
}
