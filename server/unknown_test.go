package server

import (
	"os"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// asking adds field 4711 to a message, as a newer client does.
func asking[M proto.Message](m M) M {
	field := protowire.AppendVarint(protowire.AppendTag(nil, 4711, protowire.VarintType), 1)
	m.ProtoReflect().SetUnknown(append(m.ProtoReflect().GetUnknown(), field...))
	return m
}

// CRI 0.38 has options of namespaces that a runtime must refuse if it does not know them. To
// ignore them would run the pod with less isolation than it asks for.
func TestUnknownFieldsOfSecurityContextsAreRefused(t *testing.T) {
	t.Parallel()
	n := start(t)
	for path, m := range map[string]proto.Message{
		"config.linux.security_context": &cri.RunPodSandboxRequest{Config: &cri.PodSandboxConfig{Linux: &cri.LinuxPodSandboxConfig{
			SecurityContext: asking(&cri.LinuxSandboxSecurityContext{})}}},
		"config.linux.security_context.namespace_options": &cri.RunPodSandboxRequest{Config: &cri.PodSandboxConfig{Linux: &cri.LinuxPodSandboxConfig{
			SecurityContext: &cri.LinuxSandboxSecurityContext{NamespaceOptions: asking(&cri.NamespaceOption{})}}}},
		"config.linux.security_context.namespace_options.userns_options.uids": &cri.CreateContainerRequest{Config: &cri.ContainerConfig{Linux: &cri.LinuxContainerConfig{
			SecurityContext: &cri.LinuxContainerSecurityContext{NamespaceOptions: &cri.NamespaceOption{UsernsOptions: &cri.UserNamespace{
				Uids: []*cri.IDMapping{{Length: 1}, asking(&cri.IDMapping{})}}}}}}},
		"config.linux.security_context.seccomp": &cri.CreateContainerRequest{Config: &cri.ContainerConfig{Linux: &cri.LinuxContainerConfig{
			SecurityContext: &cri.LinuxContainerSecurityContext{Seccomp: asking(&cri.SecurityProfile{})}}}},
		"sandbox_config.linux.security_context": &cri.CreateContainerRequest{SandboxConfig: &cri.PodSandboxConfig{Linux: &cri.LinuxPodSandboxConfig{
			SecurityContext: asking(&cri.LinuxSandboxSecurityContext{})}}},
		"config.windows.security_context": &cri.CreateContainerRequest{Config: &cri.ContainerConfig{Windows: &cri.WindowsContainerConfig{
			SecurityContext: asking(&cri.WindowsContainerSecurityContext{})}}},
	} {
		var err error
		switch m := m.(type) {
		case *cri.RunPodSandboxRequest:
			_, err = n.runtime.RunPodSandbox(t.Context(), m)
		case *cri.CreateContainerRequest:
			_, err = n.runtime.CreateContainer(t.Context(), m)
		}
		wantCode(t, err, codes.InvalidArgument)
		if text := status.Convert(err).Message(); !strings.HasPrefix(text, path+" has field 4711 of ") {
			t.Errorf("%s: %s", path, text)
		}
	}
	if c := n.engine.last(); c.verb != "" {
		t.Errorf("the engine was called: %v", c)
	}
}

// Anything else that a newer client asks for is ignored, which its operator must learn: once, not
// with every pod.
func TestUnknownFieldsAreReportedOncePerClient(t *testing.T) {
	t.Parallel()
	name, err := os.ReadFile("/proc/self/comm")
	if err != nil {
		t.Fatal(err)
	}
	n := start(t)
	config := maximalSandboxConfig()
	config.DnsConfig = asking(config.DnsConfig)
	// A field number of this test's own finds its lines.
	field := protowire.AppendVarint(protowire.AppendTag(nil, 47110, protowire.VarintType), 1)
	config.PortMappings[0].ProtoReflect().SetUnknown(field)
	for range 3 {
		if _, err := n.runtime.RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: config}); err != nil {
			t.Fatal(err)
		}
	}
	lines := logs.about("47110 of ")
	if len(lines) != 1 {
		t.Fatalf("%d lines: %v", len(lines), lines)
	}
	if l := lines[0]; l["level"] != "WARN" || l["field"] != "config.port_mappings has field 47110 of PortMapping" || l["client"] != strings.TrimSpace(string(name)) {
		t.Errorf("%v", l)
	}
	filter := &cri.PodSandboxFilter{}
	filter.ProtoReflect().SetUnknown(protowire.AppendVarint(protowire.AppendTag(nil, 47111, protowire.VarintType), 1))
	for range 2 {
		stream, err := n.runtime.StreamPodSandboxes(t.Context(), &cri.StreamPodSandboxesRequest{Filter: filter})
		if err != nil {
			t.Fatal(err)
		}
		for err == nil {
			_, err = stream.Recv()
		}
	}
	if lines := logs.about("47111 of "); len(lines) != 1 || lines[0]["field"] != "filter has field 47111 of PodSandboxFilter" {
		t.Errorf("of a stream: %v", lines)
	}
}

// A client must not fill the log or the memory with numbers that it makes up.
func TestUnknownFieldsAreBounded(t *testing.T) {
	t.Parallel()
	var many []byte
	for number := range protowire.Number(10 * maxUnknown) {
		many = protowire.AppendVarint(protowire.AppendTag(many, 1000+number, protowire.VarintType), 1)
	}
	req := &cri.StopContainerRequest{}
	req.ProtoReflect().SetUnknown(many)
	if found := unknownFields(req); len(found) != maxUnknown || found[0].String() != "request has field 1000 of StopContainerRequest" {
		t.Errorf("%d fields: %v", len(found), found[0])
	}
	create := &cri.CreateContainerRequest{Config: &cri.ContainerConfig{Linux: &cri.LinuxContainerConfig{SecurityContext: asking(&cri.LinuxContainerSecurityContext{})}}}
	create.ProtoReflect().SetUnknown(many)
	create.Config.ProtoReflect().SetUnknown(many)
	if found := unknownFields(create); len(found) != maxUnknown || !slices.ContainsFunc(found, func(f unknownField) bool { return f.strict }) {
		t.Errorf("%d fields, without that of the security context: %v", len(found), found)
	}
	var g unknownGuard
	reported := 0
	for number := range protowire.Number(10 * maxTold) {
		if g.first(toldUnknown{number: number}) {
			reported++
		}
	}
	if reported != maxTold {
		t.Errorf("%d fields reported", reported)
	}
}
