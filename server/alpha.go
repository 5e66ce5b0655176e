package server

import (
	"context"
	"strings"

	"google.golang.org/grpc"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// CRI v1 kept every message, field number and method of v1alpha2, which
// kubelets up to 1.25 and old crictl speak; only the name differs. (KeyValue.value
// went from string to bytes, which read the same on the wire.)
const (
	packageV1    = "runtime.v1."
	packageAlpha = "runtime.v1alpha2."
)

// alphaDesc returns a v1 service under its v1alpha2 name.
func alphaDesc(v1 grpc.ServiceDesc) *grpc.ServiceDesc {
	v1.ServiceName = packageAlpha + strings.TrimPrefix(v1.ServiceName, packageV1)
	return &v1
}

// registerCRI serves both objects under both names.
func registerCRI(r grpc.ServiceRegistrar, runtime *runtimeService, images *imageService) {
	runtimeDesc := decoded(withListings(cri.RuntimeService_ServiceDesc))
	imageDesc := decoded(cri.ImageService_ServiceDesc)
	r.RegisterService(&runtimeDesc, runtime)
	r.RegisterService(&imageDesc, images)
	r.RegisterService(alphaDesc(runtimeDesc), runtime)
	r.RegisterService(alphaDesc(imageDesc), images)
}

// apiVersion returns the API version by which the running RPC was called. It
// asks the transport: the method name in the generated code, which interceptors
// see, is a constant of v1.
func apiVersion(ctx context.Context) string {
	if method, _ := grpc.Method(ctx); strings.HasPrefix(method, "/"+packageAlpha) {
		return "v1alpha2"
	}
	return "v1"
}
