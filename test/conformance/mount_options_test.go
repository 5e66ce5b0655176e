package main_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/images/facts"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/tools"
	"github.com/crius-run/crius/test/scene"
)

// toolbox is a volume with the probe, the probe as root's setuid program, and a
// device.
func toolbox(t *testing.T, w *scene.World) string {
	t.Helper()
	repo, err := tools.Repository()
	if err != nil {
		t.Fatal(err)
	}
	probe, err := image.GoProgram(t.Context(), "probe", repo, "./test/images/probe")
	if err != nil {
		t.Fatal(err)
	}
	dir := w.Dir(t)
	scene.WriteProgram(t, filepath.Join(dir, "probe"), probe.Data)
	scene.WriteProgram(t, filepath.Join(dir, "setuid"), probe.Data)
	for _, err := range []error{
		os.Chmod(dir, 0o755),
		os.Chmod(filepath.Join(dir, "setuid"), 0o755|os.ModeSetuid),
		unix.Mknod(filepath.Join(dir, "null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))),
		os.Chmod(filepath.Join(dir, "null"), 0o666),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// effective returns CapEff of a program on the volume run by a user without
// rights.
func effective(t *testing.T, c *scene.Container) uint64 {
	t.Helper()
	f, err := facts.Parse([]byte(c.Exec(t, "run /v/setuid facts")))
	if err != nil {
		t.Fatal(err)
	}
	return f.Caps.Effective
}

// TestMountOptions tests KEP-5855: the three options that a pod may name are in
// force in the container, and those that are not named are not.
func TestMountOptions(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	scene.Equal(t, "mount_options in Status", nodeStatus(t, w).GetFeatures().GetMountOptions(), true)
	box := toolbox(t, w)
	scene.Each(t, func(t *testing.T, handler string) {
		p := w.Pod(t, handler)
		start := func(options ...string) *scene.Container {
			return p.Start(t, "sleep", asUser(1001, 1002), mounted(&cri.Mount{ContainerPath: "/v", HostPath: box, MountOptions: options}))
		}
		plain := start()
		scene.Equal(t, "output of a program on a plain volume", plain.Exec(t, "run /v/probe echo runs"), "runs\n")
		scene.Equal(t, "a device on it", plain.Exec(t, "open /v/null rw"), "ok\n")
		if effective(t, plain) == 0 {
			t.Error("a setuid program gains nothing on a plain volume, so the test shows nothing")
		}
		noexec, nosuid, nodev := start("noexec"), start("nosuid"), start("nodev")
		noexec.Refuses(t, "run /v/probe echo runs", "permission denied")
		scene.Equal(t, "a device with noexec", noexec.Exec(t, "open /v/null rw"), "ok\n")
		scene.Equal(t, "what a setuid program gains with nosuid", effective(t, nosuid), 0)
		scene.Equal(t, "a program with nosuid", nosuid.Exec(t, "run /v/probe echo runs"), "runs\n")
		nodev.Refuses(t, "open /v/null rw", "permission denied")
		all := start("noexec", "nosuid", "nodev")
		all.Refuses(t, "run /v/probe echo runs", "permission denied")
		all.Refuses(t, "open /v/null rw", "permission denied")
		if m := all.Facts(t).Mount("/v"); m == nil || !hasAll(m.Options, "noexec", "nosuid", "nodev", "rw") {
			t.Errorf("the mount inside is %v", m)
		}
		if got := all.Status(t).Mounts[0].MountOptions; !slices.Equal(got, []string{"noexec", "nosuid", "nodev"}) {
			t.Errorf("the status tells the options %q", got)
		}
	})
}

func hasAll(options []string, want ...string) bool {
	return !slices.ContainsFunc(want, func(o string) bool { return !slices.Contains(options, o) })
}

// Options combine with the other settings of a mount.
func TestMountOptionsTogetherWithOthers(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	box := toolbox(t, w)
	_, id := content(t, w)
	p := w.Pod(t, "crun")
	readonly := p.Start(t, "sleep", mounted(&cri.Mount{ContainerPath: "/v", HostPath: box, Readonly: true, MountOptions: []string{"noexec"}}))
	readonly.Refuses(t, "write /v/new x", "read-only file system")
	readonly.Refuses(t, "run /v/probe echo runs", "permission denied")
	slave := p.Start(t, "sleep", mounted(&cri.Mount{ContainerPath: "/v", HostPath: box,
		Propagation: cri.MountPropagation_PROPAGATION_HOST_TO_CONTAINER, MountOptions: []string{"nosuid"}}))
	m := slave.Facts(t).Mount("/v")
	if m == nil || !hasAll(m.Options, "nosuid") || !strings.HasPrefix(strings.Join(m.Optional, " "), "master:") {
		t.Errorf("the mount inside is %v", m)
	}
	t.Run("an image volume", func(t *testing.T) {
		c := p.Start(t, "sleep", imageVolume(id, "", func(m *cri.Mount) { m.MountOptions = []string{"noexec", "nodev"} }))
		if m := c.Facts(t).Mount("/v"); m == nil || !hasAll(m.Options, "noexec", "nodev", "ro") {
			t.Errorf("the mount inside is %v", m)
		}
	})
}

// Other options must not reach the runtime, for which they might mean something
// else.
func TestMountOptionsThatAreNone(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	p, dir := w.Pod(t, "crun"), w.Dir(t)
	p.Untouched(t, func() {
		for _, options := range [][]string{
			{"nonsense"}, {""}, {"noexec", "nonsense"}, {"noexec,nosuid"}, {"NOEXEC"}, {" noexec"}, {"size=1m"},
			{"shared"}, {"rshared"}, {"unbindable"}, {"idmap"}, {"tmpcopyup"}, {"uid=0"}, {"context=system_u:object_r:x"}, {"remount"}, {"move"},
		} {
			t.Run(strings.Join(options, "+"), func(t *testing.T) {
				_, err := p.Try(t.Context(), "sleep", mounted(&cri.Mount{ContainerPath: "/v", HostPath: dir, MountOptions: options}))
				scene.WantCode(t, err, codes.InvalidArgument, "mount_options")
			})
		}
	})
	t.Run("contradiction", func(t *testing.T) {
		_, err := p.Try(t.Context(), "sleep", mounted(&cri.Mount{ContainerPath: "/v", HostPath: dir, Readonly: true, MountOptions: []string{"rw"}}))
		scene.WantCode(t, err, codes.InvalidArgument, "mount_options")
	})
}
