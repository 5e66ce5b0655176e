package pod

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"path"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/pod/records"
)

// request identifies work that makes an object. The same name with another content is another
// request, not a retry of the first.
type request struct {
	name    any
	content [sha256.Size]byte
}

func requestOf(name any, parts ...proto.Message) (request, error) {
	h := sha256.New()
	for _, part := range parts {
		text, err := proto.MarshalOptions{Deterministic: true}.Marshal(part)
		if err != nil {
			return request{}, err
		}
		fmt.Fprintf(h, "%d\n", len(text))
		h.Write(text)
	}
	return request{name: name, content: [sha256.Size]byte(h.Sum(nil))}, nil
}

// beingCreated refuses a request for a name that an unfinished request with other content has.
func beingCreated(noun string, name fmt.Stringer, owner string) error {
	return fmt.Errorf("%s %s is still being created as %s, by a request with other content; crius status --stuck shows the step: %w", noun, name, owner, fault.Exists)
}

// A kubelet that retries a request builds it from scratch, and the copies differ in what does not
// matter. The functions below return what two copies have in common. Sorts are stable, and by what
// an entry is for: of two entries for the same path, variable or option, the last one counts.

// requestOfPod identifies a request for a pod.
func requestOfPod(handler string, cfg *cri.PodSandboxConfig) (request, error) {
	return requestOf(records.NameOfPod(cfg.GetMetadata()), canonicalPod(cfg), &cri.RuntimeHandler{Name: handler})
}

// canonicalPod returns cfg with sorted lists, since kubelets collect DNS options and the groups of
// volumes in maps, and without labels and annotations: network plugins annotate a pod while they
// attach it, and the kubelet's retry has these annotations.
func canonicalPod(cfg *cri.PodSandboxConfig) *cri.PodSandboxConfig {
	c := proto.CloneOf(cfg)
	c.Labels, c.Annotations = nil, nil
	sortBy(c.GetDnsConfig().GetOptions(), func(option string) string {
		name, _, _ := strings.Cut(option, ":")
		return name
	})
	slices.Sort(c.GetLinux().GetSecurityContext().GetSupplementalGroups())
	return c
}

// terminationMessagePath is the kubelet's annotation of a container with the path at which it
// mounts the file for the termination message, as it is in the pod. The path of the mount is
// absolute, and clean or not by the version of the kubelet.
const terminationMessagePath = "io.kubernetes.container.terminationMessagePath"

// canonicalContainer returns cfg with sorted lists, since kubelets collect variables, mounts,
// devices and the groups of volumes in maps, and without the host's path of the termination
// message, which is a new file in each request. The kubelet reads the file that the container's
// status names.
func canonicalContainer(cfg *cri.ContainerConfig) *cri.ContainerConfig {
	c := proto.CloneOf(cfg)
	sortBy(c.GetEnvs(), (*cri.KeyValue).GetKey)
	sortBy(c.GetMounts(), func(m *cri.Mount) string { return path.Clean(m.GetContainerPath()) })
	sortBy(c.GetDevices(), func(d *cri.Device) string { return path.Clean(cmp.Or(d.GetContainerPath(), d.GetHostPath())) })
	sortBy(c.GetCDIDevices(), (*cri.CDIDevice).GetName)
	slices.Sort(c.GetLinux().GetSecurityContext().GetSupplementalGroups())
	if message := c.GetAnnotations()[terminationMessagePath]; message != "" {
		for _, m := range slices.Backward(c.GetMounts()) {
			if path.Clean(m.GetContainerPath()) == path.Join("/", message) {
				m.HostPath = ""
				break // a volume at the same path is another mount
			}
		}
	}
	return c
}

func sortBy[E any](list []E, key func(E) string) {
	slices.SortStableFunc(list, func(a, b E) int { return cmp.Compare(key(a), key(b)) })
}
