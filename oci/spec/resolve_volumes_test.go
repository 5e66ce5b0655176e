package spec

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
)

// volumeInput is a container of an image with volumes, run as the user of the
// test.
func volumeInput(rootfs string, volumes []string, mounts ...*cri.Mount) *Input {
	config := &imagespec.ImageConfig{Volumes: map[string]struct{}{}}
	for _, name := range volumes {
		config.Volumes[name] = struct{}{}
	}
	return &Input{
		Request: Request{Container: &cri.ContainerConfig{Mounts: mounts}, Image: config},
		Facts:   Facts{Rootfs: rootfs, User: Identity{UID: uint32(os.Getuid()), GID: uint32(os.Getgid())}},
	}
}

func TestMakeVolumes(t *testing.T) {
	files := map[string]string{
		"there/file": "", "link": "->/there/deep", "dangling": "->new/one", "file": "", "loop": "->loop",
		"root": "->/", "up": "->../../../..", "kernel": "->/proc/sys", "etc/motd": "", "conf": "->/etc", "mounted": "->/srv",
		"deep": "->" + strings.Repeat("a/", maxVolumeDepth),
	}
	for declared, want := range map[string]string{ // empty: ignored
		"/there": "/there", "/data": "/data", "/data/": "/data", "//a/./b": "/a/b", "/link/x": "/there/deep/x", "/dangling": "/new/one", "/up/x": "/x",
		"/device": "/device", "/processes": "/processes", "/etc": "/etc",
		"": "", ".": "", "/": "", "/.": "", "data": "", "/a/../b": "", "/..": "", "/root": "", "/up": "", "/file": "", "/file/x": "", "/loop": "", "/nul\x00": "",
		"/proc": "", "/proc/self/attr": "", "/sys": "", "/dev/shm": "", "/kernel": "", "/kernel/x": "", "/etc/hosts": "", "/conf/hostname": "", "/etc/resolv.conf/x": "",
		strings.Repeat("/a", maxVolumeDepth): strings.Repeat("/a", maxVolumeDepth), strings.Repeat("/a", maxVolumeDepth+1): "", "/deep/x": "",
		"/" + strings.Repeat("a/", 2048): "", "/" + strings.Repeat("n", 256): "",
	} {
		root := image(t, files)
		got, ignored, err := MakeVolumes(volumeInput(root, []string{declared}))
		switch {
		case err != nil:
			t.Errorf("%.40q: %v", declared, err)
		case want == "" && (len(got) != 0 || len(ignored) != 1):
			t.Errorf("%.40q is not ignored: %q, %v", declared, got, ignored)
		case want != "" && (len(ignored) != 0 || !slices.Equal(got, []string{want})):
			t.Errorf("%.40q: %q, ignored: %v, want %s", declared, got, ignored, want)
		}
		if want == "" {
			continue
		}
		if info, err := os.Lstat(filepath.Join(root, want)); err != nil || info.Mode() != os.ModeDir|0o755 {
			t.Errorf("%q: %v, %v", declared, info, err)
		}
	}
}

// An image's links cause no directories outside it.
func TestVolumesStayInside_CVE_2022_23648(t *testing.T) {
	outside := t.TempDir()
	root := image(t, map[string]string{"link": "->" + outside, "up": "->../../../../../../../../.." + outside, "d/link": "->../../../../../../../.." + outside})
	_, _, err := MakeVolumes(volumeInput(root, []string{"/link/a", "/up/b", "/d/link/c", "/link"}))
	if entries, _ := os.ReadDir(outside); err != nil || len(entries) != 0 {
		t.Errorf("the node's directory holds %v; %v", entries, err)
	}
	if _, err := os.Stat(filepath.Join(root, outside, "b")); err != nil {
		t.Errorf("the links do not lead to the image's own directory: %v", err)
	}
}

func TestMountsOfTheRequestWinOverVolumes(t *testing.T) {
	root := image(t, map[string]string{"link": "->/srv"})
	mounts := []*cri.Mount{{ContainerPath: "/data/"}, {ContainerPath: "/link"}, {ContainerPath: "/var/lib/app/sub"}}
	got, ignored, err := MakeVolumes(volumeInput(root, []string{"/data", "/data/db", "/database", "/srv/x", "/var/lib/app"}, mounts...))
	if want := []string{"/database", "/var/lib/app"}; err != nil || len(ignored) != 0 || !slices.Equal(got, want) {
		t.Errorf("%q, ignored: %v, %v; want %q", got, ignored, err, want)
	}
}

func TestManyVolumesAreRefused(t *testing.T) {
	volumes := make([]string, maxVolumes+1)
	for i := range volumes {
		volumes[i] = fmt.Sprintf("/v%d", i)
	}
	root := image(t, nil)
	if _, _, err := MakeVolumes(volumeInput(root, volumes)); !errors.Is(err, fault.Invalid) {
		t.Errorf("%d volumes: %v", len(volumes), err)
	}
	if got, _, err := MakeVolumes(volumeInput(root, volumes[1:])); err != nil || len(got) != maxVolumes {
		t.Errorf("%d volumes: %d, %v", maxVolumes, len(got), err)
	}
}

func TestNodeID(t *testing.T) {
	mappings := []*cri.IDMapping{{ContainerId: 0, HostId: 100_000, Length: 1000}, {ContainerId: 1000, HostId: 300_000, Length: 10}}
	for id, want := range map[uint32]int{0: 100_000, 999: 100_999, 1001: 300_001} {
		if got := nodeID(mappings, id); got != want {
			t.Errorf("%d: %d, want %d", id, got, want)
		}
	}
	if got := nodeID(nil, 7); got != 7 {
		t.Errorf("without a user namespace: %d", got)
	}
}
