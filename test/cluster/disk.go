package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/realkubelet"
	"github.com/crius-run/crius/test/kit/wait"
)

// The sizes of the suite "disk", in MiB. The node itself needs a few more.
const (
	diskSize     = 256
	pressureFrom = 48 // available at most

	quietFile = 20  // written by a pod that must not be evicted
	noisyFile = 165 // written by the other one: pressure, whatever else is removed
	imageSize = 20

	highThreshold = 46 // percent: reached with all unused images, and not with one less
	lowThreshold  = 32 // with one of them left
)

// pinnedImage is never collected.
const pinnedImage = node.RegistryHost + "/disk/pinned:latest"

// diskConfig is crius's configuration.
var diskConfig = fmt.Sprintf("[image]\npinned_images = [%q]\n", pinnedImage)

// diskKubelet is the kubelet's configuration.
var diskKubelet = map[string]any{
	"evictionHard":                     map[string]any{"memory.available": "1Mi", "imagefs.available": fmt.Sprintf("%dMi", pressureFrom)},
	"evictionPressureTransitionPeriod": "30s", // long enough to be observed
	"imageGCHighThresholdPercent":      highThreshold,
	"imageGCLowThresholdPercent":       lowThreshold,
}

// diskKubeletArgs have images collected at any age; in the configuration 0
// means the default of two minutes.
var diskKubeletArgs = []string{"--minimum-image-ttl-duration", "0"}

// disk is a node's image disk that fills up.
type disk struct {
	*cluster
	images *images
}

// quiet and noisy are pods; quiet does not use much of the disk.
const (
	quiet = "quiet"
	noisy = "noisy"
)

// fillDisk fills the image disk with a container's data, and then with images.
func (c *cluster) fillDisk(ctx context.Context, i *images) (*result, error) {
	d := &disk{c, i}
	if err := d.push(); err != nil {
		return nil, err
	}
	if err := d.writer(ctx, quiet, quietFile); err != nil {
		return nil, err
	}
	r := new(result)
	for _, part := range []struct {
		name string
		do   func(context.Context) error
	}{
		{"the kubelet knows the disk and the writable layer", d.measured},
		{"the pod that fills it is evicted, and no other", d.evicts},
		{"unused images above the threshold are removed, as many as it takes", d.collects},
	} {
		name := "[own] image disk: " + part.name
		if err := part.do(ctx); err != nil {
			r.fail(name, err)
			continue
		}
		r.passed = append(r.passed, spec{name: name})
	}
	if err := errors.Join(d.api.removePod(ctx, quiet), d.emptied(ctx)); err != nil {
		r.fail("what is left", err)
	}
	return r, nil
}

// unused returns the name of an image that no pod uses.
func unused(i int) string { return fmt.Sprintf("%s/disk/unused:%d", node.RegistryHost, i) }

// unusedImages is their number: one is present at the eviction, all others come
// when it is over.
const unusedImages = 5

// push pushes images of random data, which take the same space on disk as in an
// archive.
func (d *disk) push() error {
	names := []string{pinnedImage}
	for i := range unusedImages {
		names = append(names, unused(i))
	}
	for seed, name := range names {
		noise := make([]byte, imageSize<<20)
		_, _ = rand.NewChaCha8([32]byte{byte(seed)}).Read(noise)
		layer, err := image.NewStoredLayer(image.Regular("noise", 0o644, noise))
		if err != nil {
			return err
		}
		built, err := image.Image{Layers: []image.Layer{layer}}.Build()
		if err != nil {
			return err
		}
		repo, tag, _ := strings.Cut(strings.TrimPrefix(name, node.RegistryHost+"/"), ":")
		d.Registry.Push(repo, tag, built)
	}
	return nil
}

func (d *disk) pull(ctx context.Context, names ...string) error {
	for _, name := range names {
		if _, err := d.Images().PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: name}}); err != nil {
			return fmt.Errorf("pull %s: %w", name, err)
		}
	}
	return nil
}

// has reports whether an image is present. An image whose status is unavailable
// counts as present.
func (d *disk) has(ctx context.Context, name string) bool {
	s, err := d.Images().ImageStatus(ctx, &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: name}})
	return err != nil || s.Image != nil
}

// writer makes a pod write a file of that many MiB into its writable layer, and
// keep running.
func (d *disk) writer(ctx context.Context, name string, mebibytes int) error {
	command := fmt.Sprintf("dd if=/dev/zero of=/file bs=1M count=%d; sleep 100000", mebibytes)
	err := d.api.createPod(ctx, name, map[string]any{"image": d.images.one("busybox"), "command": []any{"sh", "-c", command}})
	if err != nil {
		return err
	}
	return d.api.awaitPod(ctx, name, func(s podStatus) bool { return s.Phase == "Running" || s.Phase == "Failed" })
}

// space returns the available and the total space of the disk, in bytes.
func (d *disk) space() (available, capacity uint64, err error) {
	var st unix.Statfs_t
	err = unix.Statfs(d.ImageRoot(), &st)
	return st.Bavail * uint64(st.Bsize), st.Blocks * uint64(st.Bsize), err
}

// summary is the used part of the kubelet's statistics.
type summary struct {
	Node struct {
		Runtime struct {
			ImageFs struct{ AvailableBytes, CapacityBytes, UsedBytes uint64 }
		}
	}
	Pods []struct {
		PodRef     struct{ Name string }
		Containers []struct{ Rootfs struct{ UsedBytes uint64 } }
	}
}

// measured waits until the kubelet's statistics agree with the disk.
func (d *disk) measured(ctx context.Context) error {
	return d.api.until(ctx, func() error {
		var s summary
		if err := d.api.call(ctx, http.MethodGet, "/api/v1/nodes/"+realkubelet.NodeName+"/proxy/stats/summary", nil, &s); err != nil {
			return err
		}
		info, err := d.Images().ImageFsInfo(ctx, &cri.ImageFsInfoRequest{})
		if err != nil {
			return err
		}
		available, capacity, err := d.space()
		if err != nil {
			return err
		}
		var written uint64
		for _, p := range s.Pods {
			if p.PodRef.Name == quiet && len(p.Containers) == 1 {
				written = p.Containers[0].Rootfs.UsedBytes
			}
		}
		fs, images := s.Node.Runtime.ImageFs, info.ImageFilesystems[0].UsedBytes.GetValue()
		if fs.CapacityBytes != capacity || !near(fs.AvailableBytes, available) || fs.UsedBytes != images ||
			!near(written, quietFile<<20) || !near(capacity-available, images+written) {
			return fmt.Errorf("the kubelet knows of %+v, and of %d bytes that the container has written; the disk has %d bytes, of which %d are available, and images take %d",
				fs, written, capacity, available, images)
		}
		return nil
	})
}

// near allows for the space of directories, records and logs.
func near(a, b uint64) bool {
	const slack = 8 << 20
	return max(a, b)-min(a, b) < slack
}

// evicts has a pod fill the disk besides an image that is used, one that is
// pinned and one that is neither.
func (d *disk) evicts(ctx context.Context) error {
	if err := d.pull(ctx, pinnedImage, unused(0)); err != nil {
		return err
	}
	before, _, err := d.space()
	if err != nil {
		return err
	}
	if err := d.writer(ctx, noisy, noisyFile); err != nil {
		return err
	}
	if err := d.pressure(ctx, "True"); err != nil {
		return err
	}
	if err := d.api.awaitPod(ctx, noisy, func(s podStatus) bool {
		return s.Phase == "Failed" && s.Reason == "Evicted" && strings.Contains(s.Message, "low on resource: ephemeral-storage")
	}); err != nil {
		return fmt.Errorf("the kubelet has not evicted the pod: %w", err)
	}
	if err := errors.Join(d.pressure(ctx, "False"), d.isGone(ctx, noisy), d.api.removePod(ctx, noisy)); err != nil {
		return err
	}
	after, _, err := d.space()
	if err != nil {
		return err
	}
	if after < before && !near(after, before) {
		return fmt.Errorf("%d bytes were available before, and %d are after the eviction", before, after)
	}
	return errors.Join(d.keeps(ctx), d.removes(ctx, unused(0)))
}

// pressure waits until the kubelet reports this status of DiskPressure.
func (d *disk) pressure(ctx context.Context, status string) error {
	if !wait.Until(ctx, func() bool { return d.api.nodeIs(ctx, "DiskPressure", status) }) {
		return fmt.Errorf("DiskPressure does not become %s", status)
	}
	return nil
}

// isGone waits until crius has nothing of a pod.
func (d *disk) isGone(ctx context.Context, pod string) error {
	return d.api.until(ctx, func() error {
		label := map[string]string{"io.kubernetes.pod.name": pod}
		sandboxes, err := d.runtime.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{Filter: &cri.PodSandboxFilter{LabelSelector: label}})
		if err != nil {
			return err
		}
		containers, err := d.runtime.ListContainers(ctx, &cri.ListContainersRequest{Filter: &cri.ContainerFilter{LabelSelector: label}})
		if err == nil && len(sandboxes.Items)+len(containers.Containers) > 0 {
			err = fmt.Errorf("of pod %s are left %v and %v", pod, sandboxes.Items, containers.Containers)
		}
		return err
	})
}

// keeps checks that the quiet pod is running and that the images that must not
// be removed are present.
func (d *disk) keeps(ctx context.Context) error {
	var now struct{ Status podStatus }
	err := d.api.call(ctx, http.MethodGet, pods+"/"+quiet, nil, &now)
	if err == nil && now.Status.Phase != "Running" {
		err = fmt.Errorf("pod %s is %s: %s", quiet, now.Status.Phase, now.Status.Message)
	}
	for _, name := range []string{pinnedImage, d.images.one("busybox")} {
		if !d.has(ctx, name) {
			err = errors.Join(err, fmt.Errorf("image %s has been removed", name))
		}
	}
	return err
}

// removes waits until the kubelet has removed an image.
func (d *disk) removes(ctx context.Context, name string) error {
	if !wait.Until(ctx, func() bool { return !d.has(ctx, name) }) {
		return fmt.Errorf("the kubelet has not removed image %s", name)
	}
	return nil
}

// collects fills the disk with images above the high threshold. The kubelet
// checks every five minutes.
func (d *disk) collects(ctx context.Context) error {
	for i := 1; i < unusedImages; i++ {
		if err := d.pull(ctx, unused(i)); err != nil {
			return err
		}
	}
	used, err := d.percent()
	if err != nil {
		return err
	}
	if used < highThreshold && d.unusedLeft(ctx) == unusedImages-1 { // with less it has already begun
		return fmt.Errorf("%d%% of the disk are used, which is no reason to remove images", used)
	}
	collected := func() bool {
		used, err := d.percent()
		return err == nil && used <= lowThreshold
	}
	for waits := 1; !wait.Until(ctx, collected); waits++ { // which is as long as the kubelet's period
		if waits == 2 {
			return errors.New("the kubelet has not removed enough images")
		}
	}
	if left, want := d.unusedLeft(ctx), 1; left != want {
		return fmt.Errorf("%d unused images are left, want %d", left, want)
	}
	return d.keeps(ctx)
}

// unusedLeft returns how many of the unused images that were pulled last are
// present.
func (d *disk) unusedLeft(ctx context.Context) (left int) {
	for i := 1; i < unusedImages; i++ {
		if d.has(ctx, unused(i)) {
			left++
		}
	}
	return left
}

// percent returns how much of the disk is used.
func (d *disk) percent() (uint64, error) {
	available, capacity, err := d.space()
	if err != nil {
		return 0, err
	}
	return 100 - available*100/capacity, nil
}
