package faults

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/images"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// holdLock takes a lock of containers/storage like another program that shares
// the store, and releases it when release is called.
func holdLock(t *testing.T, file string) (release func()) {
	t.Helper()
	f, err := os.OpenFile(file, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	lock := unix.Flock_t{Type: unix.F_WRLCK}
	wait.For(t, file+" to be free", func() bool { return unix.FcntlFlock(f.Fd(), unix.F_SETLK, &lock) == nil })
	return func() { f.Close() }
}

// Another program that keeps the image store locked blocks pulls and removals
// of images, but not pods. The error names the file and the program.
func TestALockedStore_crio_1172(t *testing.T) {
	t.Parallel()
	w := spotless(t, node.Options{})
	v := watch(t, w)
	removable := w.Image(t, nil)
	built, err := images.Build(func(c *imagespec.ImageConfig) { c.Labels = map[string]string{"never": "seen"} })
	if err != nil {
		t.Fatal(err)
	}
	w.Registry.Push("unseen", "latest", built)
	name, err := os.ReadFile("/proc/self/comm")
	if err != nil {
		t.Fatal(err)
	}
	me := fmt.Sprintf("process %d (%s)", os.Getpid(), strings.TrimSpace(string(name)))
	verbs := map[string]func() error{
		"PullImage": func() error {
			_, err := w.Images().PullImage(t.Context(), &cri.PullImageRequest{Image: &cri.ImageSpec{Image: node.RegistryHost + "/unseen:latest"}})
			return err
		},
		"RemoveImage": func() error {
			_, err := w.Images().RemoveImage(t.Context(), &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: removable}})
			return err
		},
	}
	usage, err := w.Images().ImageFsInfo(t.Context(), &cri.ImageFsInfoRequest{})
	if err != nil {
		t.Fatal(err)
	}
	used := usage.ImageFilesystems[0].UsedBytes.GetValue()
	for i, name := range []string{"storage.lock", "overlay-layers/layers.lock", "overlay-images/images.lock", "overlay-containers/containers.lock"} {
		file := filepath.Join(w.Path("img"), name)
		t.Run(filepath.Base(name), func(t *testing.T) {
			wait.Retry(t, func() error { // the verb waits for ten seconds
				release := holdLock(t, file)
				defer release()
				answers := make(chan error, 1)
				call := verbs[[]string{"PullImage", "RemoveImage"}[i%2]] // each with half of the locks, because of the time that it takes
				go func() { answers <- call() }()
				if usage, err := w.Images().ImageFsInfo(t.Context(), &cri.ImageFsInfoRequest{}); err != nil {
					t.Errorf("ImageFsInfo: %v", err)
				} else if now := usage.ImageFilesystems[0].UsedBytes.GetValue(); now < used || now > used+used/100 { // records count as well
					t.Errorf("images take %d bytes now, and %d before", now, used)
				}
				if list, err := w.Images().ListImages(t.Context(), &cri.ListImagesRequest{}); err != nil || len(list.Images) != 2 {
					t.Errorf("ListImages: %v, %v", list, err)
				}
				late := len(answers) > 0
				v.works(t)
				scene.WantCode(t, <-answers, codes.DeadlineExceeded, file, me)
				if late {
					return errors.New("ImageFsInfo and ListImages answered only when the verb that needs the lock had given up")
				}
				return nil
			})
		})
	}
	v.unaffected(t)
	for verb, call := range verbs {
		if err := call(); status.Code(err) != codes.OK {
			t.Errorf("%s with the locks free: %v", verb, err)
		}
	}
}
