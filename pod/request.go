package pod

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"slices"

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
// matter. The functions below return what two copies have in common.

// requestOfPod identifies a request for a pod. Its labels and annotations do not count: network
// plugins annotate a pod while they attach it, and the kubelet's retry has these annotations.
func requestOfPod(handler string, cfg *cri.PodSandboxConfig) (request, error) {
	c := canonicalPod(cfg)
	c.Labels, c.Annotations = nil, nil
	return requestOf(records.NameOfPod(cfg.GetMetadata()), c, &cri.RuntimeHandler{Name: handler})
}

// canonicalPod returns cfg with its DNS options sorted: kubelets collect them in a map.
func canonicalPod(cfg *cri.PodSandboxConfig) *cri.PodSandboxConfig {
	c := proto.CloneOf(cfg)
	slices.Sort(c.GetDnsConfig().GetOptions())
	return c
}

// terminationMessagePath is the kubelet's annotation of a container with the path at which it
// mounts the file for the termination message.
const terminationMessagePath = "io.kubernetes.container.terminationMessagePath"

// canonicalContainer returns cfg with sorted lists, since kubelets collect variables, mounts and
// devices in maps, and without the host's path of the termination message, which is a new file in
// each request. The kubelet reads the file that the container's status names.
func canonicalContainer(cfg *cri.ContainerConfig) *cri.ContainerConfig {
	c := proto.CloneOf(cfg)
	// Stable: of two entries for one path or variable, the last one counts.
	slices.SortStableFunc(c.GetEnvs(), func(a, b *cri.KeyValue) int { return cmp.Compare(a.GetKey(), b.GetKey()) })
	slices.SortStableFunc(c.GetMounts(), func(a, b *cri.Mount) int { return cmp.Compare(a.GetContainerPath(), b.GetContainerPath()) })
	slices.SortStableFunc(c.GetDevices(), func(a, b *cri.Device) int { return cmp.Compare(a.GetContainerPath(), b.GetContainerPath()) })
	slices.SortStableFunc(c.GetCDIDevices(), func(a, b *cri.CDIDevice) int { return cmp.Compare(a.GetName(), b.GetName()) })
	message := c.GetAnnotations()[terminationMessagePath]
	for _, m := range c.GetMounts() {
		if message != "" && m.GetContainerPath() == message {
			m.HostPath = ""
		}
	}
	return c
}
