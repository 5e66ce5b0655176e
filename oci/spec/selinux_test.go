package spec

import (
	"errors"
	"slices"
	"strings"
	"testing"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/opencontainers/runtime-spec/specs-go/features"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/selinux"
)

func targeted() *SELinux {
	return &SELinux{Contexts: selinux.Contexts{
		Process:    "system_u:system_r:container_t:s0",
		Init:       "system_u:system_r:container_init_t:s0",
		KVM:        "system_u:system_r:container_kvm_t:s0",
		Privileged: "system_u:system_r:spc_t:s0",
		File:       "system_u:object_r:container_file_t:s0",
	}}
}

func namespaceOptions(in *Input) *cri.NamespaceOption {
	return in.Request.Pod.Linux.SecurityContext.NamespaceOptions
}

// containerOptions sets the selinux_options of a container.
func containerOptions(o *cri.SELinuxOption) func(*Input) {
	return func(in *Input) { in.Request.Container.Linux.SecurityContext.SelinuxOptions = o }
}

func podOptions(o *cri.SELinuxOption) func(*Input) {
	return func(in *Input) { in.Request.Pod.Linux.SecurityContext.SelinuxOptions = o }
}

func TestSELinuxLabels(t *testing.T) {
	no := false
	const files = "system_u:object_r:container_file_t:s0:c1,c2"
	for name, c := range map[string]struct {
		with           []func(*Input)
		process, mount string
	}{
		"no SELinux on the node": {with: []func(*Input){func(in *Input) { in.Defaults.SELinux = nil }, containerOptions(&cri.SELinuxOption{Type: "x_t"})}},
		"at the pod's level":     {process: "system_u:system_r:container_t:s0:c1,c2", mount: files},
		"options, all of them": {
			with:    []func(*Input){containerOptions(&cri.SELinuxOption{User: "u", Role: "r", Type: "t", Level: "s0:c5"})},
			process: "u:r:t:s0:c5", mount: "system_u:object_r:container_file_t:s0:c5",
		},
		"the pod's options": {
			with:    []func(*Input){podOptions(&cri.SELinuxOption{Type: "t"}), containerOptions(nil)},
			process: "system_u:system_r:t:s0:c1,c2", mount: files,
		},
		"the container's options instead of the pod's": {
			with:    []func(*Input){podOptions(&cri.SELinuxOption{Type: "t"}), containerOptions(&cri.SELinuxOption{User: "u"})},
			process: "u:system_r:container_t:s0:c1,c2", mount: files,
		},
		"privileged": {with: []func(*Input){privilegedPod}, process: "system_u:system_r:spc_t:s0", mount: files},
		"privileged, with a type": {
			with:    []func(*Input){privilegedPod, containerOptions(&cri.SELinuxOption{Type: "t"})},
			process: "system_u:system_r:t:s0", mount: files,
		},
		"privileged, in a policy without a context for that": {
			with: []func(*Input){privilegedPod, func(in *Input) { in.Defaults.SELinux.Privileged = "" }}, mount: files,
		},
		"privileged, in such a policy, with a type": {
			with:    []func(*Input){privilegedPod, func(in *Input) { in.Defaults.SELinux.Privileged = "" }, containerOptions(&cri.SELinuxOption{Type: "t"})},
			process: "system_u:system_r:t:s0", mount: files,
		},
		"the node's PID namespace": {
			with:    []func(*Input){func(in *Input) { namespaceOptions(in).Pid = cri.NamespaceMode_NODE }},
			process: "system_u:system_r:spc_t:s0", mount: files,
		},
		"the node's IPC namespace": {
			with:    []func(*Input){func(in *Input) { namespaceOptions(in).Ipc = cri.NamespaceMode_NODE }},
			process: "system_u:system_r:spc_t:s0", mount: files,
		},
		"the node's network": {
			with:    []func(*Input){func(in *Input) { namespaceOptions(in).Network = cri.NamespaceMode_NODE }},
			process: "system_u:system_r:spc_t:s0", mount: files,
		},
		"the node's network, confined": {
			with: []func(*Input){func(in *Input) {
				namespaceOptions(in).Network, in.Defaults.SELinux.HostNetwork = cri.NamespaceMode_NODE, true
			}},
			process: "system_u:system_r:container_t:s0:c1,c2", mount: files,
		},
		"an init system": {
			with:    []func(*Input){func(in *Input) { in.Request.Container.Command = []string{"/usr/sbin/init"} }},
			process: "system_u:system_r:container_init_t:s0:c1,c2", mount: files,
		},
		"an init system of the image": {
			with: []func(*Input){func(in *Input) {
				in.Request.Container.Command, in.Request.Container.Args = nil, nil
				in.Request.Image = &imagespec.ImageConfig{Cmd: []string{"/lib/systemd/systemd"}}
			}},
			process: "system_u:system_r:container_init_t:s0:c1,c2", mount: files,
		},
		"a virtual machine": {
			with:    []func(*Input){func(in *Input) { in.Facts.OwnKernel, in.Facts.VirtualMachine = true, true }},
			process: "system_u:system_r:container_kvm_t:s0:c1,c2", mount: files,
		},
		"gVisor, which refuses a context": {with: []func(*Input){func(in *Input) { in.Facts.OwnKernel = true }}},
		"a runtime without SELinux": {with: []func(*Input){func(in *Input) {
			in.Facts.Features = &features.Features{Linux: &features.Linux{Selinux: &features.Selinux{Enabled: &no}}}
		}}},
	} {
		t.Run(name, func(t *testing.T) {
			s := mutate(t, func(in *Input) {
				in.Defaults.SELinux, in.Facts.SELinuxLevel = targeted(), "s0:c1,c2"
				for _, with := range c.with {
					with(in)
				}
			})
			if s.Process.SelinuxLabel != c.process || s.Linux.MountLabel != c.mount {
				t.Errorf("process %q, files %q", s.Process.SelinuxLabel, s.Linux.MountLabel)
			}
		})
	}
}

// The infra container is confined like the pod's other containers, and
// unconfined if they are.
func TestSELinuxLabelsOfInfra(t *testing.T) {
	in := typical()
	in.Defaults.SELinux, in.Facts.SELinuxLevel = targeted(), "s0:c1,c2"
	in.Request.Pod.Linux.SecurityContext.SelinuxOptions = &cri.SELinuxOption{Level: "s0:c7"}
	s, err := Sandbox(in, []string{"/pause"})
	if err != nil || s.Process.SelinuxLabel != "system_u:system_r:container_t:s0:c7" || s.Linux.MountLabel != "system_u:object_r:container_file_t:s0:c7" {
		t.Errorf("process %q, files %q, %v", s.Process.SelinuxLabel, s.Linux.MountLabel, err)
	}
}

// A volume gets a label only for containers that are confined.
func TestConfines(t *testing.T) {
	in := typical()
	pod, container := in.Request.Pod, in.Request.Container
	node := targeted()
	if !node.Confines(pod, container) || (*SELinux)(nil).Confines(pod, container) {
		t.Error("of an ordinary container")
	}
	privilegedPod(&in)
	if node.Confines(pod, container) {
		t.Error("of a privileged one")
	}
	containerOptions(&cri.SELinuxOption{Type: "t"})(&in)
	if !node.Confines(pod, container) {
		t.Error("of a privileged one with a type")
	}
	got := Relabels(&cri.ContainerConfig{Mounts: []*cri.Mount{
		{HostPath: "/a", SelinuxRelabel: true}, {HostPath: "/b"}, {Image: &cri.ImageSpec{Image: "i"}, SelinuxRelabel: true},
	}})
	if !slices.Equal(got, []string{"/a"}) {
		t.Errorf("to relabel: %q", got)
	}
}

// Options become parts of a context and of a mount option, and cannot add
// another option.
func TestSELinuxOptionsThatCannotBe(t *testing.T) {
	for _, options := range []*cri.SELinuxOption{
		{Level: `s0",upperdir="/etc`}, {Level: "s0:c1\x00"}, {Level: "s0 c1"}, {User: "u:r"}, {Role: "r,rw"}, {Type: "t\n"},
		{Level: strings.Repeat("c", maxContextPart+1)},
	} {
		in := typical()
		in.Defaults.SELinux, in.Facts.SELinuxLevel = targeted(), "s0:c1,c2"
		containerOptions(options)(&in)
		if s, err := Container(in); !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), "selinux_options: ") {
			t.Errorf("%.40v: %v, %v", options, s, err)
		}
	}
}
