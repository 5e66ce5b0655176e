package integration

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/testkit/kubelet"
)

// Kubelets 1.17 to 1.25 speak runtime.v1alpha2, whose messages are the same on
// the wire.
func TestV1Alpha2(t *testing.T) {
	t.Parallel()
	w := shared(t)
	call := func(t *testing.T, method string, req, reply proto.Message) {
		t.Helper()
		if err := w.Conn().Invoke(t.Context(), "/runtime.v1alpha2."+method, req, reply); err != nil {
			t.Fatalf("%s: %v", method, err)
		}
	}
	var version cri.VersionResponse
	call(t, "RuntimeService/Version", &cri.VersionRequest{}, &version)
	equal(t, "API version", version.RuntimeApiVersion, "v1alpha2")
	equal(t, "version", version.Version, "0.1.0")

	var images cri.ListImagesResponse
	call(t, "ImageService/ListImages", &cri.ListImagesRequest{}, &images)
	if len(images.Images) == 0 {
		t.Error("no images")
	}

	each(t, func(t *testing.T, handler string) {
		p := &pod{w: w, handler: handler, config: w.podConfig(t)}
		var run cri.RunPodSandboxResponse
		call(t, "RuntimeService/RunPodSandbox", &cri.RunPodSandboxRequest{Config: p.config, RuntimeHandler: handler}, &run)
		p.id, p.made = run.PodSandboxId, []string{run.PodSandboxId}
		t.Cleanup(func() { p.vanish(t) })

		config := kubelet.Container("c1", probe, steps("echo from-long-ago"))
		config.Linux.SecurityContext.Seccomp = nil
		config.Linux.SecurityContext.SeccompProfilePath = "runtime/default" //nolint:staticcheck // what they send
		var created cri.CreateContainerResponse
		call(t, "RuntimeService/CreateContainer", &cri.CreateContainerRequest{PodSandboxId: p.id, Config: config, SandboxConfig: p.config}, &created)
		c := &container{pod: p, id: created.ContainerId, config: config}
		p.made = append(p.made, c.id)
		call(t, "RuntimeService/StartContainer", &cri.StartContainerRequest{ContainerId: c.id}, &cri.StartContainerResponse{})
		c.wait(t)
		equal(t, "output", c.output(t), "from-long-ago\n")

		// What one version made the other one sees.
		var status cri.ContainerStatusResponse
		call(t, "RuntimeService/ContainerStatus", &cri.ContainerStatusRequest{ContainerId: c.id}, &status)
		if !proto.Equal(status.Status, c.status(t)) {
			t.Errorf("v1alpha2 says %v, v1 says %v", status.Status, c.status(t))
		}
		err := w.Conn().Invoke(t.Context(), "/runtime.v1alpha2.RuntimeService/ContainerStatus",
			&cri.ContainerStatusRequest{ContainerId: strings.Repeat("0", 64)}, &status)
		wantCode(t, err, codes.NotFound)
	})
}
