package main_test

import (
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/scene"
)

func withDevice(c *cri.ContainerConfig) {
	c.Devices = append(c.Devices, &cri.Device{HostPath: "/dev/zero", ContainerPath: "/dev/mine", Permissions: "rw"})
}

// A user without rights can use a device plugin's device only if it belongs to
// that user.
func TestDeviceOwnershipFromSecurityContext(t *testing.T) {
	t.Parallel()
	w := scene.Private(t, node.Options{Config: "[pod]\ndevice_ownership_from_security_context = true\n"})
	before := owner(t, "/dev/zero")
	p := w.Pod(t, "crun")
	for name, test := range map[string]struct {
		user scene.ContainerChange
		want string
	}{
		"user and group": {asUser(1001, 1002), "1001:1002"},
		"user alone":     {func(c *cri.ContainerConfig) { c.Linux.SecurityContext.RunAsUser = &cri.Int64Value{Value: 1001} }, "1001:0"},
		"nobody":         {func(*cri.ContainerConfig) {}, "0:0"},
		"root":           {asUser(0, 0), "0:0"},
	} {
		t.Run(name, func(t *testing.T) {
			c := p.Start(t, "sleep", withDevice, test.user)
			scene.Equal(t, "owner of the device", inside(t, c, "/dev/mine"), test.want)
			scene.Equal(t, "opening it", c.Exec(t, "open /dev/mine rw"), "ok\n")
			scene.Equal(t, "owner of a device that was not asked for", inside(t, c, "/dev/full"), "0:0")
		})
	}
	scene.Equal(t, "owner of the node's own device", owner(t, "/dev/zero"), before)
}

func TestDeviceOwnershipIsTheHostsOtherwise(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	c := w.Pod(t, "crun").Start(t, "sleep", withDevice, asUser(1001, 1002))
	scene.Equal(t, "owner of the device", inside(t, c, "/dev/mine"), owner(t, "/dev/zero"))
}
