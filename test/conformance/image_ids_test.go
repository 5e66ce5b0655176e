package main_test

import (
	"slices"
	"testing"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/images"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/scene"
)

// TestImageIDsAreTheSameEverywhere tests the rule in api.proto since 1.36:
// PullImageResponse.image_ref, Image.id, Container.image_id, Container.image_ref and
// ContainerStatus.image_id are the same for the same image, by whatever name it
// was pulled, whether it is a manifest or an index.
func TestImageIDsAreTheSameEverywhere(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	plain, err := images.Build(func(c *imagespec.ImageConfig) { c.Labels = map[string]string{"for": t.Name()} })
	if err != nil {
		t.Fatal(err)
	}
	other, err := image.Image{Platform: imagespec.Platform{OS: "linux", Architecture: "s390x"}}.Build()
	if err != nil {
		t.Fatal(err)
	}
	index, err := image.Index(other, plain)
	if err != nil {
		t.Fatal(err)
	}
	w.Registry.Push("ids/manifest", "one", plain)
	w.Registry.Push("ids/manifest", "two", plain)
	w.Registry.Push("ids/index", "one", index)
	const manifests, indexes = node.RegistryHost + "/ids/manifest", node.RegistryHost + "/ids/index"
	names := []string{
		manifests + ":one", manifests + ":two", manifests + "@" + plain.Digest().String(),
		manifests + ":one@" + plain.Digest().String(),
		indexes + ":one", indexes + "@" + index.Digest().String(), indexes + "@" + plain.Digest().String(),
	}
	p := w.Pod(t, "runc")
	var first string
	for _, name := range names {
		id := w.Pull(t, name)
		if first == "" {
			first = id
		}
		scene.Equal(t, "image_ref of the pull of "+name, id, first)
		agrees(t, p, name, first)
	}
	agrees(t, p, first, first) // by the id itself, as the kubelet asks
	forget(t, w, first)
	resp, err := w.Images().ImageStatus(t.Context(), &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: names[0]}})
	if err != nil || resp.Image != nil {
		t.Errorf("after its removal: %v, %v", resp, err)
	}
}

// agrees compares the ids that every answer about an image has with want.
func agrees(t *testing.T, p *scene.Pod, name, want string) {
	t.Helper()
	w := p.World
	resp, err := w.Images().ImageStatus(t.Context(), &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: name}})
	if err != nil || resp.Image == nil {
		t.Fatalf("ImageStatus of %s: %v, %v", name, resp, err)
	}
	scene.Equal(t, "id in ImageStatus of "+name, resp.Image.Id, want)
	list, err := w.Images().ListImages(t.Context(), &cri.ListImagesRequest{Filter: &cri.ImageFilter{Image: &cri.ImageSpec{Image: name}}})
	if err != nil || len(list.Images) != 1 || list.Images[0].Id != want {
		t.Errorf("ListImages of %s: %v, %v, want %s", name, list, err, want)
	}
	all, err := w.Images().ListImages(t.Context(), &cri.ListImagesRequest{})
	if err != nil || !slices.ContainsFunc(all.Images, func(i *cri.Image) bool { return i.Id == want }) {
		t.Errorf("ListImages: %v, or no %s", err, want)
	}
	c := p.Create(t, "sleep", func(c *cri.ContainerConfig) { c.Image = &cri.ImageSpec{Image: want, UserSpecifiedImage: name} })
	s := c.Status(t)
	scene.Equal(t, "image_id in ContainerStatus", s.ImageId, want)
	if s.ImageRef == "" {
		t.Error("ContainerStatus has no image_ref")
	}
	listed, err := w.Runtime().ListContainers(t.Context(), &cri.ListContainersRequest{Filter: &cri.ContainerFilter{Id: c.ID}})
	if err != nil || len(listed.Containers) != 1 || listed.Containers[0].ImageId != want || listed.Containers[0].ImageRef != want {
		t.Errorf("ListContainers: %v, %v, want image_id and image_ref (cri-o#7143) %s", listed, err, want)
	}
	c.Remove(t)
}

// A new image under an old tag is another image, and containers of the old one
// report the old id.
func TestImageIDsOfAMovedTag(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	push := func(version string) string {
		built, err := images.Build(func(c *imagespec.ImageConfig) { c.Labels = map[string]string{"for": t.Name() + version} })
		if err != nil {
			t.Fatal(err)
		}
		w.Registry.Push("ids/moved", "latest", built)
		return w.Pull(t, node.RegistryHost+"/ids/moved:latest")
	}
	old := push("1")
	c := w.Pod(t, "runc").Create(t, "sleep", func(c *cri.ContainerConfig) { c.Image.Image = old })
	current := push("2")
	if old == current {
		t.Errorf("both have the id %s", old)
	}
	scene.Equal(t, "image_id of the container", c.Status(t).ImageId, old)
	forget(t, w, current)
	c.Remove(t)
	forget(t, w, old)
}
