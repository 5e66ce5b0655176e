package main_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/scene"
)

// length is how many ids a pod gets.
const length = 65536

// idMap maps ids from 0 on to a range of the node's that begins at host.
func idMap(host uint32) []*cri.IDMapping {
	return []*cri.IDMapping{{HostId: host, ContainerId: 0, Length: length}}
}

func userNamespace(host uint32) *cri.UserNamespace {
	return &cri.UserNamespace{Mode: cri.NamespaceMode_POD, Uids: idMap(host), Gids: idMap(host)}
}

// inUserNamespace requests one for a pod (KEP-127).
func inUserNamespace(host uint32) scene.PodChange {
	return func(c *cri.PodSandboxConfig) {
		c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = userNamespace(host)
	}
}

// mapped is what the kubelet sends for the containers of such a pod: the same
// options, and the mappings on every mount.
func mapped(host uint32, mounts ...*cri.Mount) scene.ContainerChange {
	return func(c *cri.ContainerConfig) {
		c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = userNamespace(host)
		for _, m := range mounts {
			m.UidMappings, m.GidMappings = idMap(host), idMap(host)
		}
		c.Mounts = append(c.Mounts, mounts...)
	}
}

// mapLine returns such a map as shown in /proc.
func mapLine(host uint32) string { return fmt.Sprintf("0 %d %d", host, length) }

func words(text string) string { return strings.Join(strings.Fields(text), " ") }

// eachMapping runs a test with each handler that reports support.
func eachMapping(t *testing.T, test func(t *testing.T, w *scene.World, handler string)) {
	t.Helper()
	w := modern.World(t)
	for _, handler := range append([]string{current}, scene.Handlers...) {
		if handler != current && !features(t, w, handler).GetUserNamespaces() {
			continue
		}
		t.Run(handler, func(t *testing.T) {
			t.Parallel()
			test(t, w, handler)
		})
	}
}

func owner(t *testing.T, file string) string {
	t.Helper()
	st, err := os.Lstat(file)
	if err != nil {
		t.Fatal(err)
	}
	s := st.Sys().(*syscall.Stat_t)
	return fmt.Sprintf("%d:%d", s.Uid, s.Gid)
}

// inside returns the owner as seen by a container.
func inside(t *testing.T, c *scene.Container, file string) string {
	t.Helper()
	f := strings.Fields(c.Exec(t, "stat "+file))
	return f[1] + ":" + f[2]
}

func TestUserNamespace(t *testing.T) {
	t.Parallel()
	eachMapping(t, func(t *testing.T, w *scene.World, handler string) {
		p := w.Pod(t, handler, inUserNamespace(100_000))
		first, second := p.Start(t, "sleep", mapped(100_000)), p.Start(t, "sleep", mapped(100_000), asUser(1001, 1002))
		for _, file := range []string{"uid_map", "gid_map"} {
			scene.Equal(t, file+" of the container", words(first.Procfs(t, file)), mapLine(100_000))
			scene.Equal(t, file+" of an exec", words(first.Exec(t, "cat /proc/self/"+file)), mapLine(100_000))
		}
		scene.Equal(t, "uid inside", first.Facts(t).UID, 0)
		scene.Equal(t, "uids on the node", words(statusLine(first.Procfs(t, "status"), "Uid")), "100000 100000 100000 100000")
		scene.Equal(t, "a user's uids on the node", words(statusLine(second.Procfs(t, "status"), "Uid")), "101001 101001 101001 101001")
		scene.Equal(t, "a user's gids on the node", words(statusLine(second.Procfs(t, "status"), "Gid")), "101002 101002 101002 101002")
		scene.Equal(t, "user namespace of the second container", second.Facts(t).Namespaces["user"], first.Facts(t).Namespaces["user"])
		if host, err := os.Readlink("/proc/self/ns/user"); err != nil || host == first.Facts(t).Namespaces["user"] {
			t.Errorf("the user namespace is the node's: %s, %v", host, err)
		}
		// The pod's other namespaces belong to its user namespace.
		scene.Equal(t, "hostname by its root", strings.TrimSpace(p.Finish(t, "try sethostname", mapped(100_000),
			capabilities(&cri.Capability{AddCapabilities: []string{"SYS_ADMIN"}}), profiled(newForm, cri.SecurityProfile_Unconfined, ""))), "ok")
		got := p.Status(t).GetLinux().GetNamespaces().GetOptions().GetUsernsOptions()
		if got.GetMode() != cri.NamespaceMode_POD || len(got.GetUids()) != 1 || got.GetUids()[0].HostId != 100_000 {
			t.Errorf("PodSandboxStatus says %v", got)
		}
	})
}

// Owners are the image's, never the overflow id, and what is written keeps its
// owner.
func TestUserNamespaceRootFileSystem(t *testing.T) {
	t.Parallel()
	w := modern.World(t)
	ref := w.Image(t, nil, image.Text("mine", "x").Owned(1001, 1002), image.Text("last", "x").Owned(length-1, length-1))
	eachMapping(t, func(t *testing.T, w *scene.World, handler string) {
		p := w.Pod(t, handler, inUserNamespace(100_000))
		c := p.Start(t, "sleep", mapped(100_000), func(c *cri.ContainerConfig) { c.Image.Image = ref })
		for file, want := range map[string]string{
			"/probe": "0:0", "/mine": "1001:1002", "/last": "65535:65535", "/": "0:0",
			"/etc/hostname": "0:0", "/etc/resolv.conf": "0:0", "/etc/passwd": "0:0",
		} {
			scene.Equal(t, "owner of "+file, inside(t, c, file), want)
		}
		c.Exec(t, "write /new x ; chown /new 1001 1002 ; chown /mine 5 6 ; write /mine y")
		scene.Equal(t, "owner of a new file", inside(t, c, "/new"), "1001:1002")
		scene.Equal(t, "owner of a changed file", inside(t, c, "/mine"), "5:6")
		// Another container sees the image unchanged.
		scene.Equal(t, "owner in the next container", inside(t, p.Start(t, "sleep", mapped(100_000), func(c *cri.ContainerConfig) { c.Image.Image = ref }), "/mine"), "1001:1002")
		user := p.Start(t, "sleep", mapped(100_000), asUser(1001, 1002))
		user.Exec(t, "write /tmp/f x ; write /dev/shm/f x")
		scene.Equal(t, "owner of a user's file", inside(t, user, "/tmp/f"), "1001:1002")
		user.Refuses(t, "write /etc/passwd x", "permission denied")
		for _, file := range []string{"/etc/resolv.conf", "/etc/hostname"} {
			c.Exec(t, "cat "+file)
		}
	})
}

// Two ranges and none concurrently on one image: each sees its owners, and the
// image itself is unchanged.
func TestUserNamespacesShareOneImage(t *testing.T) {
	t.Parallel()
	eachMapping(t, func(t *testing.T, w *scene.World, handler string) {
		a, b := w.Pod(t, handler, inUserNamespace(200_000)), w.Pod(t, handler, inUserNamespace(300_000))
		plain := w.Pod(t, handler)
		for what, c := range map[string]*scene.Container{
			"one range": a.Start(t, "sleep", mapped(200_000)), "another": b.Start(t, "sleep", mapped(300_000)), "none": plain.Start(t, "sleep"),
		} {
			scene.Equal(t, what+": owner of a file of root's", inside(t, c, "/etc/passwd"), "0:0")
			scene.Equal(t, what+": owner of a file of a user's", inside(t, c, "/home/app"), "1001:1001")
			c.Exec(t, "write /etc/passwd "+strings.ReplaceAll(what, " ", "-"))
		}
	})
}

// Id-mapped mounts (KEP-127): inside, files of a volume have the owners that
// they have on the node, and what the pod writes belongs to the ids that it
// sees, so that a volume may move from pod to pod.
func TestUserNamespaceVolumes(t *testing.T) {
	t.Parallel()
	eachMapping(t, func(t *testing.T, w *scene.World, handler string) {
		dir := w.Dir(t)
		if err := os.Chmod(dir, 0o777); err != nil {
			t.Fatal(err)
		}
		for name, id := range map[string]int{"root": 0, "user": 1001} {
			scene.Write(t, filepath.Join(dir, name), "x")
			if err := os.Chown(filepath.Join(dir, name), id, id); err != nil {
				t.Fatal(err)
			}
		}
		volume := func() *cri.Mount { return &cri.Mount{ContainerPath: "/v", HostPath: dir} }
		p := w.Pod(t, handler, inUserNamespace(100_000))
		c := p.Start(t, "sleep", mapped(100_000, volume()))
		scene.Equal(t, "owner of root's file", inside(t, c, "/v/root"), "0:0")
		scene.Equal(t, "owner of a user's file", inside(t, c, "/v/user"), "1001:1001")
		c.Exec(t, "write /v/by-root x ; write /v/user y ; write /v/given x ; chown /v/given 7 8")
		p.Start(t, "sleep", mapped(100_000, volume()), asUser(1001, 1002)).Exec(t, "write /v/by-user x")
		for name, want := range map[string]string{"by-root": "0:0", "by-user": "1001:1002", "given": "7:8", "user": "1001:1001"} {
			scene.Equal(t, "owner on the node of "+name, owner(t, filepath.Join(dir, name)), want)
		}
		m := c.Status(t).Mounts[0]
		if len(m.UidMappings) != 1 || m.UidMappings[0].HostId != 100_000 || len(m.GidMappings) != 1 {
			t.Errorf("the status tells the mappings %v and %v", m.UidMappings, m.GidMappings)
		}
		file := filepath.Join(dir, "root") // a volume may be a file, and read-only
		single := p.Start(t, "sleep", mapped(100_000, &cri.Mount{ContainerPath: "/etc/hosts", HostPath: file, Readonly: true}))
		scene.Equal(t, "owner of a file volume", inside(t, single, "/etc/hosts"), "0:0")
		single.Refuses(t, "write /etc/hosts x", "read-only")
	})
}

// Devices, and the mounts of CDI files, are what they are for other pods. Runtimes mount what the node has at
// the path that a device has in the container, with owners of the node.
func TestUserNamespaceDevices_runc_5137_runc_2121_kubernetes_134604(t *testing.T) {
	t.Parallel()
	o, err := modern.Prepare(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	w := scene.Private(t, node.Options{Config: o.Config + "[pod]\ncdi_spec_dirs = [\"{{.Path \"cdi\"}}\"]\n"})
	device := w.Path("zero") // as in the directory of a driver that runs in a container
	for _, err := range []error{
		os.Mkdir(w.Path("cdi"), 0o755), os.Mkdir(w.Path("volume"), 0o700),
		syscall.Mknod(device, syscall.S_IFCHR, 1<<8|5), os.Chown(device, 0, 1002), os.Chmod(device, 0o660),
		w.Write("cdi/driver.json", `{"cdiVersion": "0.6.0", "kind": "driver.test/dev", "devices": [{"name": "one", "containerEdits": {
			"deviceNodes": [{"path": "/dev/of-driver", "hostPath": "{{.Path "zero"}}"}],
			"mounts": [
				{"containerPath": "/of-driver", "hostPath": "{{.Path "volume"}}", "options": ["bind"]},
				{"containerPath": "/no-owners", "hostPath": "/sys/kernel", "options": ["ro", "bind"]}
			]}}]}`),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	scene.Write(t, w.Path("volume", "f"), "of the driver")
	asked := func(c *cri.ContainerConfig) {
		c.Devices = []*cri.Device{{HostPath: device, ContainerPath: "/dev/renamed", Permissions: "rw"}, {HostPath: "/dev/zero", ContainerPath: "/dev/fuse", Permissions: "r"}}
	}
	p := w.Pod(t, current, inUserNamespace(100_000))
	c := p.Start(t, "sleep", mapped(100_000), asked, cdi("driver.test/dev=one"))
	scene.Equal(t, "the file of CDI", c.Exec(t, "cat /of-driver/f"), "of the driver")
	scene.Equal(t, "its owner", inside(t, c, "/of-driver/f"), "0:0")
	c.Exec(t, "open /dev/renamed rw ; open /dev/of-driver rw ; open /dev/fuse r ; ls /no-owners")
	scene.Equal(t, "owner of a device", inside(t, c, "/dev/renamed"), "0:1002")
	user := p.Start(t, "sleep", mapped(100_000), asked, asUser(1001, 1002))
	user.Exec(t, "open /dev/renamed rw")
	p.Start(t, "sleep", mapped(100_000), asked, asUser(1001, 1001)).Refuses(t, "open /dev/renamed r", "denied")
	_, err = p.Try(t.Context(), "sleep", mapped(100_000), func(c *cri.ContainerConfig) {
		c.Devices = []*cri.Device{{HostPath: "/dev/zero", ContainerPath: "/proc/self/attr/exec", Permissions: "r"}}
	})
	scene.WantCode(t, err, codes.InvalidArgument, "/proc")
}

func TestUserNamespaceWithSysctlsAndPIDs(t *testing.T) {
	t.Parallel()
	eachMapping(t, func(t *testing.T, w *scene.World, handler string) {
		p := w.Pod(t, handler, inUserNamespace(100_000), func(c *cri.PodSandboxConfig) {
			c.Linux.Sysctls = map[string]string{"net.ipv4.ip_unprivileged_port_start": "81", "kernel.shm_rmid_forced": "1"}
			c.Linux.SecurityContext.NamespaceOptions.Pid = cri.NamespaceMode_POD
		})
		c := p.Start(t, "sleep", mapped(100_000), func(c *cri.ContainerConfig) { c.Linux.SecurityContext.NamespaceOptions.Pid = cri.NamespaceMode_POD })
		scene.Equal(t, "network sysctl", words(c.Exec(t, "cat /proc/sys/net/ipv4/ip_unprivileged_port_start")), "81")
		scene.Equal(t, "IPC sysctl", words(c.Exec(t, "cat /proc/sys/kernel/shm_rmid_forced")), "1")
		if c.Facts(t).PID == 1 {
			t.Error("the container is process 1 of a namespace that it shares")
		}
	})
}

// A pod on the node's network does not have the node's rights over it.
func TestUserNamespaceOnTheHostsNetwork(t *testing.T) {
	t.Parallel()
	eachMapping(t, func(t *testing.T, w *scene.World, handler string) {
		p, err := w.TryPod(t, handler, kubelet.HostNetwork, inUserNamespace(100_000))
		if !nodeStatus(t, w).GetFeatures().GetUserNamespacesHostNetwork() {
			scene.WantOneOf(t, err, []codes.Code{codes.InvalidArgument, codes.Unimplemented, codes.FailedPrecondition}, "network")
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		c := p.Start(t, "sleep", mapped(100_000), func(c *cri.ContainerConfig) {
			c.Linux.SecurityContext.NamespaceOptions.Network = cri.NamespaceMode_NODE
			c.Linux.SecurityContext.Capabilities = &cri.Capability{AddCapabilities: []string{"NET_RAW"}}
		})
		scene.Equal(t, "uid_map", words(c.Procfs(t, "uid_map")), mapLine(100_000))
		scene.Equal(t, "a raw socket", strings.TrimSpace(c.Exec(t, "try raw-socket")), "EPERM")
	})
}

func TestUserNamespacesThatCannotBe(t *testing.T) {
	t.Parallel()
	one := func(container, host, length uint32) *cri.IDMapping {
		return &cri.IDMapping{ContainerId: container, HostId: host, Length: length}
	}
	list := func(m ...*cri.IDMapping) []*cri.IDMapping { return m }
	wrong := map[string]*cri.UserNamespace{
		"mode CONTAINER":   {Mode: cri.NamespaceMode_CONTAINER, Uids: idMap(100_000), Gids: idMap(100_000)},
		"mode TARGET":      {Mode: cri.NamespaceMode_TARGET, Uids: idMap(100_000), Gids: idMap(100_000)},
		"no mapping":       {Mode: cri.NamespaceMode_POD},
		"no gids":          {Mode: cri.NamespaceMode_POD, Uids: idMap(100_000)},
		"no uids":          {Mode: cri.NamespaceMode_POD, Gids: idMap(100_000)},
		"two mappings":     {Mode: cri.NamespaceMode_POD, Uids: list(one(0, 100_000, 10), one(10, 200_000, 10)), Gids: list(one(0, 100_000, 10), one(10, 200_000, 10))},
		"no length":        {Mode: cri.NamespaceMode_POD, Uids: list(one(0, 100_000, 0)), Gids: list(one(0, 100_000, 0))},
		"no root":          {Mode: cri.NamespaceMode_POD, Uids: list(one(1, 100_000, length)), Gids: list(one(1, 100_000, length))},
		"past the last id": {Mode: cri.NamespaceMode_POD, Uids: list(one(0, 4_294_967_290, length)), Gids: list(one(0, 4_294_967_290, length))},
		"an empty one":     {Mode: cri.NamespaceMode_POD, Uids: list(&cri.IDMapping{}), Gids: list(&cri.IDMapping{})},
	}
	eachMapping(t, func(t *testing.T, w *scene.World, handler string) {
		for name, options := range wrong {
			t.Run(name, func(t *testing.T) {
				_, err := w.TryPod(t, handler, func(c *cri.PodSandboxConfig) { c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = options })
				scene.WantCode(t, err, codes.InvalidArgument, "userns_options")
			})
		}
		p := w.Pod(t, handler, inUserNamespace(100_000))
		p.Untouched(t, func() {
			for name, options := range map[string]*cri.UserNamespace{
				"a container in another range":    userNamespace(200_000),
				"a container in the node's":       {Mode: cri.NamespaceMode_NODE},
				"a container in one of its own":   {Mode: cri.NamespaceMode_CONTAINER},
				"a container in half of the pods": {Mode: cri.NamespaceMode_POD, Uids: idMap(100_000)},
			} {
				t.Run(name, func(t *testing.T) {
					_, err := p.Try(t.Context(), "sleep", func(c *cri.ContainerConfig) { c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = options })
					scene.WantCode(t, err, codes.InvalidArgument, "userns_options")
				})
			}
		})
		t.Run("a privileged container", func(t *testing.T) { // of a pod that is not privileged
			p.Untouched(t, func() {
				if _, err := p.Try(t.Context(), "sleep", mapped(100_000), func(c *cri.ContainerConfig) { c.Linux.SecurityContext.Privileged = true }); err == nil {
					t.Error("it was accepted")
				}
			})
		})
	})
}

// Mode NODE is what the kubelet sends for every other pod.
func TestUserNamespaceOfTheNode(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	node := &cri.UserNamespace{Mode: cri.NamespaceMode_NODE}
	p := w.Pod(t, "crun", func(c *cri.PodSandboxConfig) { c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = node })
	c := p.Start(t, "sleep", func(c *cri.ContainerConfig) { c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = node })
	host, err := os.Readlink("/proc/self/ns/user")
	if err != nil {
		t.Fatal(err)
	}
	scene.Equal(t, "user namespace", c.Facts(t).Namespaces["user"], host)
}

// Debian's runc supports user namespaces, but not id-mapped mounts, and the
// feature means both.
func TestUserNamespaceWithARuntimeThatCannot(t *testing.T) {
	t.Parallel()
	w := modern.World(t)
	scene.Equal(t, "user_namespaces of Debian's runc", features(t, w, "runc").GetUserNamespaces(), false)
	scene.Equal(t, "user_namespaces of a current runc", features(t, w, current).GetUserNamespaces(), true)
	for _, handler := range scene.Handlers {
		if features(t, w, handler).GetUserNamespaces() {
			continue
		}
		_, err := w.TryPod(t, handler, inUserNamespace(100_000))
		scene.WantOneOf(t, err, []codes.Code{codes.InvalidArgument, codes.FailedPrecondition, codes.Unimplemented}, "user namespace")
	}
}

func TestUserNamespaceSurvivesARestart(t *testing.T) {
	t.Parallel()
	o, err := modern.Prepare(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	w := scene.Private(t, node.Options{Config: o.Config})
	p := w.Pod(t, current, inUserNamespace(100_000))
	c := p.Start(t, "sleep", mapped(100_000))
	before := c.Facts(t).Namespaces["user"]
	for _, again := range []func(context.Context) error{w.Restart, w.Crash} {
		if err := again(t.Context()); err != nil {
			t.Fatal(err)
		}
		scene.Equal(t, "user namespace of an exec", c.Facts(t).Namespaces["user"], before)
		next := p.Start(t, "sleep", mapped(100_000))
		scene.Equal(t, "user namespace of a new container", next.Facts(t).Namespaces["user"], before)
		scene.Equal(t, "owner in a new container", inside(t, next, "/home/app"), "1001:1001")
		if got := p.Status(t).GetLinux().GetNamespaces().GetOptions().GetUsernsOptions(); got.GetMode() != cri.NamespaceMode_POD || len(got.GetUids()) != 1 {
			t.Errorf("PodSandboxStatus says %v", got)
		}
	}
}
