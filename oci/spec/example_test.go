package spec_test

import (
	"fmt"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/oci/spec"
)

// The request, the image's configuration and facts about the node make a spec. Nothing is read
// or changed on the way.
func ExampleContainer() {
	in := spec.Input{
		Request: spec.Request{
			Pod: &cri.PodSandboxConfig{Metadata: &cri.PodSandboxMetadata{Name: "web", Namespace: "default", Uid: "1"}},
			Container: &cri.ContainerConfig{
				Metadata: &cri.ContainerMetadata{Name: "nginx"},
				Args:     []string{"-g", "daemon off;"},
				Envs:     []*cri.KeyValue{{Key: "PORT", Value: []byte("8080")}},
				Linux: &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{
					NamespaceOptions: &cri.NamespaceOption{Pid: cri.NamespaceMode_CONTAINER},
				}},
			},
			Image: &imagespec.ImageConfig{Entrypoint: []string{"nginx"}, WorkingDir: "/srv"},
		},
		Facts: spec.Facts{
			PodID: "pod", Rootfs: "/run/crius/rootfs", Hostname: "web",
			Namespaces: spec.Namespaces{Net: "/run/netns/pod", IPC: "/run/ipcns/pod", UTS: "/run/utsns/pod"},
		},
	}
	s, err := spec.Container(in)
	if err != nil {
		panic(err)
	}
	fmt.Printf("%q in %s of %s\n", s.Process.Args, s.Process.Cwd, s.Root.Path)
	fmt.Printf("%q\n", s.Process.Env)

	in.Request.Container.Linux.SecurityContext.Privileged = true
	_, err = spec.Container(in)
	fmt.Println(err)
	// Output:
	// ["nginx" "-g" "daemon off;"] in /srv of /run/crius/rootfs
	// ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" "HOSTNAME=web" "PORT=8080" "HOME=/srv"]
	// a privileged container needs a privileged pod: set privileged in the security context of sandbox_config too: invalid argument
}
