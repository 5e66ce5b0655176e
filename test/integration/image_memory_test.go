package integration

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/node"
)

// An image that needs more memory to unpack than a pull may use ends the
// process that copies it, and not the server.
func TestImageThatTakesTooMuchMemory(t *testing.T) {
	t.Parallel()
	n, err := node.New(t.Context(), node.Options{Config: "[image]\nparallel_layers = 16\n"})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	defer func() {
		if t.Failed() {
			t.Log(n.LogTail(60))
		}
	}()
	if err := n.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	server := n.PID()
	var layers []image.Layer
	for i := range 16 {
		blob := wideLayer(i)
		layers = append(layers, image.Layer{Blob: blob, Digest: digest.FromBytes(blob), DiffID: digest.FromString(fmt.Sprint(i))})
	}
	greedy, err := image.Image{Layers: layers}.Build()
	if err != nil {
		t.Fatal(err)
	}
	// containers/image decompresses layers of this format concurrently. For
	// others crius decompresses one at a time, which never takes that much.
	greedy.Manifest = bytes.ReplaceAll(greedy.Manifest, []byte(imagespec.MediaTypeImageLayerGzip), []byte("application/vnd.oci.image.layer.nondistributable.v1.tar+zstd"))
	n.Registry.Push("greedy", "latest", greedy)
	pull := func(repo string) error {
		_, err := n.Images().PullImage(t.Context(), &cri.PullImageRequest{Image: &cri.ImageSpec{Image: node.RegistryHost + "/" + repo + ":latest"}})
		return err
	}
	err = pull("greedy")
	wantCode(t, err, codes.InvalidArgument)
	if err != nil && !strings.Contains(err.Error(), "memory to unpack") {
		t.Errorf("%v", err)
	}
	modest, err := image.Image{}.Build()
	if err != nil {
		t.Fatal(err)
	}
	n.Registry.Push("modest", "latest", modest)
	if err := pull("modest"); err != nil {
		t.Error(err)
	}
	if n.PID() != server {
		t.Error("the server has ended")
	}
}

// wideLayer is a zstd frame that requires a window of 128 MiB (RFC 8878,
// 3.1.1.1) and fills it, in blocks that repeat a byte.
func wideLayer(i int) []byte {
	const window, block = 128 << 20, 128 << 10
	frame := []byte{0x28, 0xb5, 0x2f, 0xfd, 0, 17 << 3}
	for filled := block; filled <= window; filled += block {
		header := block<<3 | 1<<1
		if filled == window {
			header |= 1
		}
		frame = append(frame, byte(header), byte(header>>8), byte(header>>16), byte(i))
	}
	return frame
}
