package main_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/scene"
)

// tree is a directory with two file systems mounted below it, one in another.
func tree(t *testing.T, w *scene.World) string {
	t.Helper()
	top := w.Dir(t)
	for _, point := range []string{filepath.Join(top, "sub"), filepath.Join(top, "sub", "deep")} {
		if err := os.Mkdir(point, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount("tmpfs", point, "tmpfs", 0, "size=1m"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Unmount(point, unix.MNT_DETACH) })
	}
	return top
}

func TestRecursiveReadOnly(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	scene.Each(t, func(t *testing.T, handler string) {
		top := tree(t, w)
		p := w.Pod(t, handler)
		plain := p.Start(t, "sleep", mounted(&cri.Mount{ContainerPath: "/v", HostPath: top, Readonly: true}))
		plain.Refuses(t, "write /v/f x", "read-only file system")
		plain.Exec(t, "write /v/sub/f x") // the purpose of "recursive"
		scene.Equal(t, "recursive_read_only in the status", plain.Status(t).Mounts[0].RecursiveReadOnly, false)

		c, err := p.Try(t.Context(), "sleep", mounted(&cri.Mount{ContainerPath: "/v", HostPath: top, Readonly: true, RecursiveReadOnly: true}))
		if !features(t, w, handler).GetRecursiveReadOnlyMounts() {
			if err == nil {
				t.Error("accepted by a handler that cannot do it as Status says")
			}
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		c.Start(t)
		for _, file := range []string{"/v/f", "/v/sub/f", "/v/sub/deep/f"} {
			c.Refuses(t, "write "+file+" x", "read-only file system")
		}
		c.Exec(t, "cat /v/sub/f")
		m := c.Status(t).Mounts[0]
		scene.Equal(t, "readonly and recursive_read_only in the status", m.Readonly && m.RecursiveReadOnly, true)
		plain.Exec(t, "write /v/sub/g x") // only the mount is read-only, not what is mounted below
	})
}

// From api.proto: "when set to true, readonly must be explicitly set to true,
// and propagation must be PRIVATE (0)".
func TestRecursiveReadOnlyThatContradictsItself(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	p, top := w.Pod(t, "crun"), tree(t, w)
	p.Untouched(t, func() {
		for name, m := range map[string]*cri.Mount{
			"writable":      {},
			"slave":         {Readonly: true, Propagation: cri.MountPropagation_PROPAGATION_HOST_TO_CONTAINER},
			"shared":        {Readonly: true, Propagation: cri.MountPropagation_PROPAGATION_BIDIRECTIONAL},
			"both together": {Propagation: cri.MountPropagation_PROPAGATION_BIDIRECTIONAL},
		} {
			m.ContainerPath, m.HostPath, m.RecursiveReadOnly = "/v", top, true
			t.Run(name, func(t *testing.T) {
				_, err := p.Try(t.Context(), "sleep", mounted(m))
				scene.WantCode(t, err, codes.InvalidArgument, "recursive_read_only")
			})
		}
	})
}

// A runtime that does not list "rro" among its mount options would ignore it.
func TestRecursiveReadOnlyWithARuntimeThatCannot(t *testing.T) {
	t.Parallel()
	old := filepath.Join(t.TempDir(), "old-runc")
	runc, err := exec.LookPath("runc")
	if err != nil {
		t.Fatal(err)
	}
	script := "#!/bin/sh\nfor a; do [ \"$a\" != features ] || { " + runc + ` features | sed 's/"rro"/"none"/'; exit; }; done` + "\nexec " + runc + " \"$@\"\n"
	scene.WriteProgram(t, old, []byte(script))
	w := scene.Private(t, node.Options{Config: "[runtime.handlers.old]\npath = \"" + old + "\"\n"})
	scene.Equal(t, "recursive_read_only_mounts of the old runtime", features(t, w, "old").GetRecursiveReadOnlyMounts(), false)
	scene.Equal(t, "recursive_read_only_mounts of runc", features(t, w, "runc").GetRecursiveReadOnlyMounts(), true)
	p := w.Pod(t, "old")
	_, err = p.Try(t.Context(), "sleep", mounted(&cri.Mount{ContainerPath: "/v", HostPath: tree(t, w), Readonly: true, RecursiveReadOnly: true}))
	scene.WantOneOf(t, err, []codes.Code{codes.InvalidArgument, codes.FailedPrecondition, codes.Unimplemented}, "read-only", "/v")
	p.Finish(t, "echo fine", mounted(&cri.Mount{ContainerPath: "/v", HostPath: w.Dir(t), Readonly: true}))
}
