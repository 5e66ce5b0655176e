package main_test

import (
	"slices"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/scene"
)

// privileged is the kubelet's request for a privileged container.
func privileged(c *cri.ContainerConfig) {
	s := c.Linux.SecurityContext
	s.Privileged, s.MaskedPaths, s.ReadonlyPaths = true, nil, nil
}

// announce changes the pod's configuration to that of a pod with a privileged
// container, as the kubelet does when such an ephemeral container is added.
func announce(p *scene.Pod) {
	p.Config = proto.CloneOf(p.Config)
	p.Config.Linux.SecurityContext.Privileged = true
}

// namespaced sets a pod's namespaces, and those of its containers, which repeat
// them.
func namespaced(o *cri.NamespaceOption) (scene.PodChange, scene.ContainerChange) {
	return func(c *cri.PodSandboxConfig) {
			c.Linux.SecurityContext.NamespaceOptions = proto.CloneOf(o)
			if o.Network == cri.NamespaceMode_NODE {
				c.Hostname = ""
			}
		}, func(c *cri.ContainerConfig) {
			c.Linux.SecurityContext.NamespaceOptions = proto.CloneOf(o)
		}
}

// podsOfAnyKind are the possible namespaces of pods.
func podsOfAnyKind() map[string]*cri.NamespaceOption {
	const container, pod, host = cri.NamespaceMode_CONTAINER, cri.NamespaceMode_POD, cri.NamespaceMode_NODE
	return map[string]*cri.NamespaceOption{
		"plain":           {Pid: container},
		"shared process":  {Pid: pod},
		"host network":    {Network: host, Pid: container},
		"host PID":        {Pid: host},
		"host everything": {Network: host, Pid: host, Ipc: host},
	}
}

// sysIs checks whether the container may write to /sys, by trying.
func sysIs(t *testing.T, c *scene.Container, writable bool) {
	t.Helper()
	const file = "/sys/class/net/lo/ifalias"
	if !writable {
		c.Refuses(t, "open "+file+" w", "read-only file system")
		return
	}
	c.Exec(t, "open "+file+" w")
	for _, m := range c.Facts(t).Mounts {
		if m.Type == "cgroup" || m.Type == "cgroup2" {
			if slices.Contains(m.Options, "ro") {
				t.Errorf("%s is %+v", m.Point, m)
			}
		}
	}
}

// eachRuntime runs a test with the runtimes of the distribution and a current
// runc.
func eachRuntime(t *testing.T, test func(t *testing.T, w *scene.World, handler string)) {
	t.Helper()
	w := modern.World(t)
	for _, handler := range append([]string{current}, scene.Handlers...) {
		t.Run(handler, func(t *testing.T) {
			t.Parallel()
			test(t, w, handler)
		})
	}
}

// kubectl debug --profile=sysadmin: the sandbox was made when the pod had no privileged
// container.
func TestPrivilegedContainerComesToAPodWithoutOne(t *testing.T) {
	t.Parallel()
	eachRuntime(t, func(t *testing.T, w *scene.World, handler string) {
		for name, options := range podsOfAnyKind() {
			t.Run(name, func(t *testing.T) {
				forPod, forContainer := namespaced(options)
				p := w.Pod(t, handler, forPod)
				plain := p.Start(t, "sleep", forContainer)
				p.Untouched(t, func() {
					_, err := p.Try(t.Context(), "sleep", forContainer, privileged)
					scene.WantCode(t, err, codes.InvalidArgument, "privileged")
				})
				announce(p)
				debug := p.Start(t, "sleep", forContainer, privileged)
				sysIs(t, debug, true)
				sysIs(t, plain, false)
				scene.Equal(t, "seccomp mode", debug.Facts(t).Seccomp, 0)
				targeted := p.Start(t, "sleep", forContainer, privileged, func(c *cri.ContainerConfig) {
					c.Linux.SecurityContext.NamespaceOptions.Pid = cri.NamespaceMode_TARGET
					c.Linux.SecurityContext.NamespaceOptions.TargetId = plain.ID
				})
				sysIs(t, targeted, true)
				sysIs(t, p.Start(t, "sleep", forContainer), false)
			})
		}
	})
}

// The first mount of sysfs in a network namespace decides whether it is
// read-only (containerd#8445, cri-tools#1747).
func TestSysIsWritableForPrivilegedContainersInAnyOrder(t *testing.T) {
	t.Parallel()
	eachRuntime(t, func(t *testing.T, w *scene.World, handler string) {
		for name, options := range podsOfAnyKind() {
			t.Run(name, func(t *testing.T) {
				forPod, forContainer := namespaced(options)
				p := w.Pod(t, handler, forPod, func(c *cri.PodSandboxConfig) { c.Linux.SecurityContext.Privileged = true })
				start := func(is bool) *scene.Container {
					if is {
						return p.Start(t, "sleep", forContainer, privileged)
					}
					return p.Start(t, "sleep", forContainer)
				}
				var all []*scene.Container
				order := []bool{true, false, true, false}
				for _, is := range order {
					all = append(all, start(is))
				}
				for i, c := range all {
					sysIs(t, c, order[i])
					c.Remove(t)
				}
				for _, is := range []bool{false, true} { // the last earlier mount is gone
					sysIs(t, start(is), is)
				}
			})
		}
	})
}

// A privileged container of a pod with a user namespace has all rights of that
// namespace.
func TestPrivilegedContainerInAUserNamespace(t *testing.T) {
	t.Parallel()
	eachMapping(t, func(t *testing.T, w *scene.World, handler string) {
		const host = 1_400_000
		p := w.Pod(t, handler, inUserNamespace(host))
		plain := p.Start(t, "sleep", mapped(host))
		announce(p)
		debug := p.Start(t, "sleep", mapped(host), privileged)
		// The kernel decides who may write to which file there.
		if m := plain.Facts(t).Mount("/sys"); m == nil || !slices.Contains(m.Options, "ro") {
			t.Errorf("/sys of a container that is not privileged is %+v", m)
		}
		if m := debug.Facts(t).Mount("/sys"); m == nil || slices.Contains(slices.Concat(m.Options, m.Super), "ro") {
			t.Errorf("/sys of a privileged container is %+v", m)
		}
		scene.Equal(t, "uid map", words(debug.Exec(t, "cat /proc/self/uid_map")), mapLine(host))
	})
}

func TestPrivilegedContainerComesByBothVersionsOfCRI(t *testing.T) {
	t.Parallel()
	eachVersion(t, func(t *testing.T, p *scene.Pod, v version) {
		announce(p)
		c, err := v.start(t, p, "sleep", privileged)
		if err != nil {
			t.Fatal(err)
		}
		sysIs(t, c, true)
	})
}

func TestPrivilegedContainerComesAfterARestart(t *testing.T) {
	t.Parallel()
	w := scene.Private(t, node.Options{})
	var pods []*scene.Pod
	var plain []*scene.Container
	forPod, forContainer := namespaced(&cri.NamespaceOption{Pid: cri.NamespaceMode_POD})
	for _, handler := range scene.Handlers {
		p := w.Pod(t, handler, forPod)
		pods, plain = append(pods, p), append(plain, p.Start(t, "sleep", forContainer))
	}
	if err := w.Crash(t.Context()); err != nil {
		t.Fatal(err)
	}
	for i, p := range pods {
		announce(p)
		sysIs(t, p.Start(t, "sleep", forContainer, privileged), true)
		sysIs(t, plain[i], false)
	}
}

// Other changes in the pod's configuration when a container is created do not
// count (docs/decisions/0055-current-pod.md).
func TestPodConfigurationOfTheSandboxCounts(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	p := w.Pod(t, "crun")
	first, stored := p.Start(t, "sleep").Facts(t), p.Config
	t.Cleanup(func() { p.Config = stored })
	p.Config = proto.CloneOf(stored)
	kubelet.HostNetwork(p.Config)
	p.Config.Hostname = "other"
	p.Config.Linux.CgroupParent = "/other"
	p.Config.LogDirectory = "/no/such/directory"
	p.Config.Linux.Sysctls = map[string]string{"net.ipv4.ip_unprivileged_port_start": "17"}
	later := p.Start(t, "sleep").Facts(t)
	scene.Equal(t, "network namespace", later.Namespaces["net"], first.Namespaces["net"])
	scene.Equal(t, "host name", later.Hostname, first.Hostname)
}
