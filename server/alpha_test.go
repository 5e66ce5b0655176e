package server

import (
	"reflect"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Every method and stream of v1 exists under its old name, served by the same
// function, and the generated descriptors stay unchanged.
func TestDescriptorsAgree(t *testing.T) {
	t.Parallel()
	for _, v1 := range []grpc.ServiceDesc{cri.RuntimeService_ServiceDesc, cri.ImageService_ServiceDesc} {
		alpha := alphaDesc(v1)
		if alpha.ServiceName != strings.Replace(v1.ServiceName, "runtime.v1.", "runtime.v1alpha2.", 1) || alpha.ServiceName == v1.ServiceName {
			t.Errorf("%s is served as %s", v1.ServiceName, alpha.ServiceName)
		}
		if alpha.HandlerType != v1.HandlerType || len(alpha.Methods) != len(v1.Methods) || len(alpha.Streams) != len(v1.Streams) {
			t.Errorf("%s differs: %+v", v1.ServiceName, alpha)
		}
		for i, m := range v1.Methods {
			if alpha.Methods[i].MethodName != m.MethodName || reflect.ValueOf(alpha.Methods[i].Handler).Pointer() != reflect.ValueOf(m.Handler).Pointer() {
				t.Errorf("method %s differs", m.MethodName)
			}
		}
		for i, s := range v1.Streams {
			if alpha.Streams[i].StreamName != s.StreamName || reflect.ValueOf(alpha.Streams[i].Handler).Pointer() != reflect.ValueOf(s.Handler).Pointer() {
				t.Errorf("stream %s differs", s.StreamName)
			}
		}
	}
	if name := cri.RuntimeService_ServiceDesc.ServiceName; name != "runtime.v1.RuntimeService" {
		t.Errorf("the generated descriptor became %s", name)
	}
}

// The 27 and 6 RPCs that every kubelet from 1.17 on may call.
func TestBothAPIsAreServed(t *testing.T) {
	t.Parallel()
	n := start(t)
	services := n.server.grpc.GetServiceInfo()
	old := map[string][]string{
		"RuntimeService": {
			"Version", "RunPodSandbox", "StopPodSandbox", "RemovePodSandbox", "PodSandboxStatus", "ListPodSandbox",
			"CreateContainer", "StartContainer", "StopContainer", "RemoveContainer", "ListContainers", "ContainerStatus",
			"UpdateContainerResources", "ReopenContainerLog", "ExecSync", "Exec", "Attach", "PortForward",
			"ContainerStats", "ListContainerStats", "PodSandboxStats", "ListPodSandboxStats", "UpdateRuntimeConfig", "Status",
		},
		"ImageService": {"ListImages", "ImageStatus", "PullImage", "RemoveImage", "ImageFsInfo"},
	}
	for service, methods := range old {
		for _, pkg := range []string{packageV1, packageAlpha} {
			served := map[string]bool{}
			for _, m := range services[pkg+service].Methods {
				served[m.Name] = true
			}
			for _, m := range methods {
				if !served[m] {
					t.Errorf("%s%s has no %s", pkg, service, m)
				}
			}
		}
		if got, want := len(services[packageAlpha+service].Methods), len(services[packageV1+service].Methods); got != want {
			t.Errorf("%s has %d methods under the old name, %d under the new", service, got, want)
		}
	}
}

func TestVersionOfEitherAPI(t *testing.T) {
	t.Parallel()
	n := start(t)
	for method, want := range map[string]string{
		"/runtime.v1.RuntimeService/Version":       "v1",
		"/runtime.v1alpha2.RuntimeService/Version": "v1alpha2",
	} {
		resp := &cri.VersionResponse{}
		if err := n.conn.Invoke(t.Context(), method, &cri.VersionRequest{Version: "0.1.0"}, resp); err != nil {
			t.Errorf("%s: %v", method, err)
		}
		wantFilled(t, resp)
		if resp.Version != "0.1.0" || resp.RuntimeName != "crius" || resp.RuntimeVersion != "1.2.3" || resp.RuntimeApiVersion != want {
			t.Errorf("%s: %v", method, resp)
		}
	}
}

// An old client sends bytes that crius's generated code never makes: the value
// of an environment variable is a string in its proto, and it does not know the
// newer fields of an answer.
func TestOldClientOnTheWire(t *testing.T) {
	t.Parallel()
	n := start(t)
	field := func(to []byte, number protowire.Number, content []byte) []byte {
		return protowire.AppendBytes(protowire.AppendTag(to, number, protowire.BytesType), content)
	}
	env := field(field(nil, 1, []byte("NAME")), 2, []byte("värde"))
	config := field(nil, 1, field(nil, 1, []byte("web")))       // metadata.name
	config = field(config, 2, field(nil, 1, []byte("nginx:1"))) // image.image
	config = field(config, 6, env)                              // envs
	config = field(config, 15, field(nil, 2, field(field(nil, 9, []byte("runtime/default")), 10, []byte("unconfined"))))
	raw := field(field(nil, 1, []byte(idOf(1))), 2, config)

	req, resp := &cri.CreateContainerRequest{}, &cri.CreateContainerResponse{}
	if err := proto.Unmarshal(raw, req); err != nil {
		t.Fatal(err)
	}
	if err := n.conn.Invoke(t.Context(), "/runtime.v1alpha2.RuntimeService/CreateContainer", req, resp); err != nil {
		t.Fatal(err)
	}
	got := n.engine.last().args[1].(*cri.ContainerConfig)
	sc := got.GetLinux().GetSecurityContext()
	if string(got.Envs[0].Value) != "värde" || sc.GetApparmorProfile() != "runtime/default" || sc.GetSeccompProfilePath() != "unconfined" {
		t.Errorf("the engine got %v", got)
	}
	if resp.ContainerId != idOf(2) {
		t.Errorf("response %v", resp)
	}
	err := n.conn.Invoke(t.Context(), "/runtime.v1alpha3.RuntimeService/Version", &cri.VersionRequest{}, &cri.VersionResponse{})
	wantCode(t, err, codes.Unimplemented)
}

func TestOldStreams(t *testing.T) {
	t.Parallel()
	n := start(t)
	n.engine.sandboxes = manySandboxes(3)
	stream, err := n.conn.NewStream(t.Context(), &grpc.StreamDesc{ServerStreams: true}, "/runtime.v1alpha2.RuntimeService/StreamPodSandboxes")
	if err != nil {
		t.Fatal(err)
	}
	resp := &cri.StreamPodSandboxesResponse{}
	if err := stream.SendMsg(&cri.StreamPodSandboxesRequest{}); err != nil {
		t.Fatal(err)
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if err := stream.RecvMsg(resp); err != nil || len(resp.PodSandboxes) != 3 {
		t.Errorf("%v, %v", resp, err)
	}
	if err := stream.RecvMsg(resp); err == nil {
		t.Error("the stream does not end")
	}
}
