// Package criserver serves fake CRI services to clients under test.
package criserver

import (
	"context"
	"net"
	"path/filepath"
	"testing"

	"google.golang.org/grpc"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Serve serves at the returned socket until the end of the test. images may be
// nil.
func Serve(t testing.TB, runtime cri.RuntimeServiceServer, images cri.ImageServiceServer) (socket string) {
	t.Helper()
	socket = filepath.Join(t.TempDir(), "crius.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	srv := grpc.NewServer()
	cri.RegisterRuntimeServiceServer(srv, runtime)
	if images != nil {
		cri.RegisterImageServiceServer(srv, images)
	}
	served := make(chan struct{})
	go func() { defer close(served); _ = srv.Serve(l) }()
	t.Cleanup(func() { srv.Stop(); <-served })
	return socket
}

// OnePod has the pod default/web, with the id p1, and in it the container main,
// with the id c1, of the image i1.
type OnePod struct {
	cri.UnimplementedRuntimeServiceServer
}

// ListPodSandbox implements cri.RuntimeServiceServer.
func (OnePod) ListPodSandbox(context.Context, *cri.ListPodSandboxRequest) (*cri.ListPodSandboxResponse, error) {
	return &cri.ListPodSandboxResponse{Items: []*cri.PodSandbox{{Id: "p1", Metadata: &cri.PodSandboxMetadata{Namespace: "default", Name: "web"}}}}, nil
}

// ListContainers implements cri.RuntimeServiceServer.
func (OnePod) ListContainers(context.Context, *cri.ListContainersRequest) (*cri.ListContainersResponse, error) {
	return &cri.ListContainersResponse{Containers: []*cri.Container{{Id: "c1", PodSandboxId: "p1", Metadata: &cri.ContainerMetadata{Name: "main"}, ImageId: "i1"}}}, nil
}
