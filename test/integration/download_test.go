package integration

import (
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/registry"
	"github.com/crius-run/crius/test/kit/wait"
)

// downloads returns the files of layers that have not been unpacked, and their
// total size in bytes.
func (w *world) downloads(t *testing.T) (files []string, sum int64) {
	t.Helper()
	files, err := filepath.Glob(w.Path("tmp/crius-downloads/*"))
	must(t, err)
	for _, file := range files {
		if info, err := os.Stat(file); err == nil { // others may disappear meanwhile
			sum += info.Size()
		}
	}
	return files, sum
}

// After a server was killed in the middle of a pull, the next one requests only
// what is missing, and nothing is left of either.
func TestPullIsResumedAfterKill(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	data, err := io.ReadAll(noise(4 * mib))
	must(t, err)
	ref := w.unusual(t, "large", image.Regular("noise", 0o644, data))
	pull := func() error {
		_, err := w.Images().PullImage(t.Context(), &cri.PullImageRequest{Image: &cri.ImageSpec{Image: ref}})
		return err
	}
	config := func(answer http.Handler, _ <-chan struct{}) http.Handler { return answer }
	w.Registry.Inject(registry.Fault{Path: "/large/blobs/", Times: 1, Do: config})
	w.Registry.Inject(registry.Fault{Path: "/large/blobs/", Do: registry.Stall(3 * mib)})
	ended := make(chan error, 1)
	go func() { ended <- pull() }()
	wait.For(t, "a part of the layer", func() bool { _, sum := w.downloads(t); return sum > 2*mib })
	must(t, w.Kill())
	<-ended
	w.Registry.Heal()
	w.Registry.Forget()
	must(t, w.Start(t.Context()))
	_, here := w.downloads(t)
	must(t, pull())
	ranges := 0
	for _, req := range w.Registry.Requests() {
		if strings.Contains(req.Path, "/large/blobs/") && req.Range != "" {
			ranges++
		}
	}
	if sent := w.Registry.Sent("/large/blobs/"); ranges != 1 || sent > 2*mib+64<<10 { // including the config
		t.Errorf("%d bytes were here, and %d were sent in %d parts, of %d", here, sent, ranges, len(data))
	}
	if files, _ := w.downloads(t); len(files) > 0 {
		t.Errorf("left: %q", files)
	}
	if !strings.Contains(w.LogTail(200), "resuming download") {
		t.Error("the log does not say that the download was resumed")
	}
}
