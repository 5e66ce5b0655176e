package storage

import (
	"context"
	"crypto/rand"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	cstorage "go.podman.io/storage"

	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/registry"
	"github.com/crius-run/crius/test/kit/registry/registrytest"
)

// BenchmarkRootfs compares the two ways to give a container a writable layer:
// a container of containers/storage, and crius's own overlay mount. One
// operation is the whole life of a root file system. The figures are in
// docs/decisions/0001-writable-layer.md; ms are means, p99 is of the way up.
func BenchmarkRootfs(b *testing.B) {
	ways := []struct {
		name string
		make func(b *testing.B, n *node, image string) way
	}{
		{"library", newLibraryWay},
		{"own", newOwnWay},
	}
	for _, w := range ways {
		for _, existing := range []int{0, 500} {
			for _, parallel := range []int{1, 8} {
				for _, pulling := range []bool{false, true} {
					name := fmt.Sprintf("%s/existing=%d/parallel=%d/pulling=%t", w.name, existing, parallel, pulling)
					b.Run(name, func(b *testing.B) {
						n := newNode(b)
						img := n.pull(serve(b, "bench", "1", sixLayers(b)).Addr() + "/bench:1")
						if pulling {
							keepPulling(b, n)
						}
						benchmark(b, w.make(b, n, img.ID), existing, parallel)
					})
				}
			}
		}
	}
}

// way makes and removes the i-th root file system.
type way struct {
	up, down func(i int) error
}

func newLibraryWay(b *testing.B, n *node, image string) way {
	id := func(i int) string { return digestOf(fmt.Sprint(b.Name(), i)) }
	return way{
		up: func(i int) error {
			options := cstorage.ContainerOptions{Volatile: true}
			if _, err := n.store.CreateContainer(id(i), nil, image, "", "", &options); err != nil {
				return err
			}
			_, err := n.store.Mount(id(i), "")
			return err
		},
		down: func(i int) error {
			if _, err := n.store.Unmount(id(i), false); err != nil {
				return err
			}
			return n.store.DeleteContainer(id(i))
		},
	}
}

func newOwnWay(b *testing.B, n *node, image string) way {
	rootfs := func(i int) Rootfs {
		id := digestOf(fmt.Sprint(b.Name(), i))
		return Rootfs{
			ID:      id,
			ImageID: image,
			Dir:     filepath.Join(n.containersDir, id),
			Target:  filepath.Join(n.dir, "run", "containers", id, "rootfs"),
		}
	}
	return way{
		up:   func(i int) error { return n.MountRootfs(context.Background(), rootfs(i)) },
		down: func(i int) error { return n.RemoveRootfs(context.Background(), rootfs(i)) },
	}
}

func benchmark(b *testing.B, w way, existing, parallel int) {
	for i := range existing {
		if err := w.up(-1 - i); err != nil {
			b.Fatal(err)
		}
	}
	var mu sync.Mutex
	var ups []time.Duration
	var downs time.Duration
	var next atomic.Int64
	b.ResetTimer()
	var done sync.WaitGroup
	for range parallel {
		done.Go(func() {
			for i := int(next.Add(1)); i <= b.N; i = int(next.Add(1)) {
				start := time.Now()
				if err := w.up(i); err != nil {
					b.Error(err)
				}
				middle := time.Now()
				if err := w.down(i); err != nil {
					b.Error(err)
				}
				mu.Lock()
				ups = append(ups, middle.Sub(start))
				downs += time.Since(middle)
				mu.Unlock()
			}
		})
	}
	done.Wait()
	b.StopTimer()
	for i := range existing {
		if err := w.down(-1 - i); err != nil {
			b.Fatal(err)
		}
	}
	slices.Sort(ups)
	var sum time.Duration
	for _, up := range ups {
		sum += up
	}
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	b.ReportMetric(ms(sum)/float64(len(ups)), "up-ms")
	b.ReportMetric(ms(ups[len(ups)*99/100]), "up-p99-ms")
	b.ReportMetric(ms(downs)/float64(len(ups)), "down-ms")
}

func sixLayers(b *testing.B) *image.Artifact {
	var layers []image.Layer
	for i := range 6 {
		layers = append(layers, layer(b, image.Text(fmt.Sprintf("file%d", i), "content\n")))
	}
	return build(b, image.Image{Layers: layers})
}

// keepPulling pulls and removes a 64 MB image of 4 layers over and over, at
// 10 MB a second per layer, until the benchmark ends.
func keepPulling(b *testing.B, n *node) {
	var layers []image.Layer
	for i := range 4 {
		var files []image.File
		for j := range 64 {
			data := make([]byte, 256<<10)
			rand.Read(data)
			files = append(files, image.Regular(fmt.Sprintf("%d-%d", i, j), 0o644, data))
		}
		layers = append(layers, layer(b, files...))
	}
	r := registrytest.Start(b)
	r.Push("large", "1", build(b, image.Image{Layers: layers}))
	r.Inject(registry.Fault{Path: "/blobs/", Do: registry.Slow(10 << 20)})
	ctx, cancel := context.WithCancel(context.Background())
	var done sync.WaitGroup
	done.Go(func() {
		for ctx.Err() == nil {
			img, err := n.Pull(ctx, PullRequest{Image: r.Addr() + "/large:1"})
			if err == nil {
				err = n.Remove(ctx, img.ID)
			}
			if err != nil && ctx.Err() == nil {
				b.Error(err)
				return
			}
		}
	})
	b.Cleanup(func() {
		cancel()
		done.Wait()
	})
	for len(r.Requests()) < 5 { // until layers are under way
		time.Sleep(10 * time.Millisecond)
	}
}
