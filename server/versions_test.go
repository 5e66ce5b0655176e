package server

import (
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/pod/usage"
)

// since038 are the fields that CRI 0.38 added to messages of 0.37.
var since038 = []string{
	"NamespaceOption.cgroupns_options", "LinuxContainerSecurityContext.cgroup_mount_mode", "SecurityProfile.oci_ref", "SecurityProfile.base_profile",
	"RuntimeHandlerFeatures.cgroup_namespaces", "RuntimeFeatures.cgroup_mount_mode", "RuntimeFeatures.seccomp_profile_oci", "Metric.double_value",
}

// messagesOf037 returns the messages of CRI as clients that were built with 0.37 have them.
func messagesOf037(t *testing.T) protoreflect.MessageDescriptors {
	t.Helper()
	file := protodesc.ToFileDescriptorProto((&cri.VersionRequest{}).ProtoReflect().Descriptor().ParentFile())
	removed := 0
	for _, m := range file.MessageType {
		m.Field = slices.DeleteFunc(m.Field, func(f *descriptorpb.FieldDescriptorProto) bool {
			isNew := slices.Contains(since038, m.GetName()+"."+f.GetName())
			if isNew {
				removed++
			}
			return isNew
		})
	}
	if removed != len(since038) {
		t.Fatalf("%d of %d fields found", removed, len(since038))
	}
	old, err := protodesc.NewFile(file, protoregistry.GlobalFiles)
	if err != nil {
		t.Fatal(err)
	}
	return old.Messages()
}

// Kubelets of two versions of CRI, one of them older than the server's, get from one server what
// they know, and are not disturbed by what they do not.
func TestClientsOf037And038(t *testing.T) {
	t.Parallel()
	n := start(t)
	n.engine.delegates = true
	n.engine.handlers[0].Features = &cri.RuntimeHandlerFeatures{UserNamespaces: true, CgroupNamespaces: true}
	p := somePodMetrics()
	*p.Details.CPU.Total = 1_750_000_000
	n.engine.metrics = []*usage.PodMetrics{p}
	old := messagesOf037(t)

	// call sends a request as a client of that version has it, and returns the answer as it reads it
	// and the number of fields in it that it does not know.
	call := func(t *testing.T, is037 bool, method string, req, resp proto.Message) (unknown int) {
		t.Helper()
		sent, got := req, resp
		if is037 {
			sent = dynamicpb.NewMessage(old.ByName(req.ProtoReflect().Descriptor().Name()))
			got = dynamicpb.NewMessage(old.ByName(resp.ProtoReflect().Descriptor().Name()))
			wire, err := proto.Marshal(req)
			if err != nil {
				t.Fatal(err)
			}
			if err := (proto.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(wire, sent); err != nil {
				t.Fatal(err)
			}
		}
		if err := n.conn.Invoke(t.Context(), "/runtime.v1.RuntimeService/"+method, sent, got); err != nil {
			t.Fatalf("%s: %v", method, err)
		}
		if is037 {
			unknown = len(unknownFields(got))
			wire, err := proto.Marshal(got)
			if err != nil {
				t.Fatal(err)
			}
			if err := (proto.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(wire, resp); err != nil {
				t.Fatal(err)
			}
		}
		return unknown
	}
	for name, is037 := range map[string]bool{"0.37": true, "0.38": false} {
		t.Run(name, func(t *testing.T) {
			config := maximalContainerConfig()
			created := &cri.CreateContainerResponse{}
			call(t, is037, "CreateContainer", &cri.CreateContainerRequest{PodSandboxId: idOf(1), Config: config, SandboxConfig: maximalSandboxConfig()}, created)
			if is037 {
				sc := config.Linux.SecurityContext
				sc.CgroupMountMode, sc.NamespaceOptions.CgroupnsOptions = 0, nil
			}
			if got := n.engine.last().args[1].(*cri.ContainerConfig); created.ContainerId == "" || !proto.Equal(got, config) {
				t.Errorf("created %q of %v, want %v", created.ContainerId, got, config)
			}

			status := &cri.StatusResponse{}
			unknown := call(t, is037, "Status", &cri.StatusRequest{}, status)
			if is037 != (unknown == 3) || !status.Features.GetMountOptions() || !status.RuntimeHandlers[0].Features.GetUserNamespaces() {
				t.Errorf("%d unknown fields in the status %v", unknown, status)
			}
			if !status.Features.GetCgroupMountMode() || !status.Features.GetSeccompProfileOci() || !status.RuntimeHandlers[0].Features.GetCgroupNamespaces() {
				t.Errorf("no features of 0.38 in the status %v", status)
			}

			metrics := &cri.ListPodSandboxMetricsResponse{}
			unknown = call(t, is037, "ListPodSandboxMetrics", &cri.ListPodSandboxMetricsRequest{}, metrics)
			if is037 != (unknown > 0) {
				t.Errorf("%d unknown fields in the metrics", unknown)
			}
			i := slices.IndexFunc(metrics.PodMetrics[0].Metrics, func(m *cri.Metric) bool { return m.Name == "container_cpu_usage_seconds_total" })
			if m := metrics.PodMetrics[0].Metrics[i]; m.Value.GetValue() != 1 || m.DoubleValue.GetValue() != 1.75 {
				t.Errorf("1.75 s are %v", m)
			}
		})
	}
}
