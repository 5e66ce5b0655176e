package main

import (
	"math/rand/v2"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// reachable adds the fields of a message and of all messages in it, by full
// name.
func reachable(d protoreflect.MessageDescriptor, into map[protoreflect.FullName]bool) {
	for i := range d.Fields().Len() {
		field := d.Fields().Get(i)
		if into[field.FullName()] {
			continue
		}
		into[field.FullName()] = true
		if field.Message() != nil && !field.IsMap() {
			reachable(field.Message(), into)
		}
	}
}

// setFields removes the fields that m has from off.
func setFields(m protoreflect.Message, off map[protoreflect.FullName]bool) {
	for _, s := range slots(m) {
		if s.in.Has(s.field) {
			delete(off, s.field.FullName())
		}
	}
}

// Every field of every request is set sooner or later, however a request is
// made, including one that a later cri-api adds.
func TestGeneratorReachesEveryField(t *testing.T) {
	t.Parallel()
	all, err := surface()
	if err != nil {
		t.Fatal(err)
	}
	if len(all) != 46 {
		t.Errorf("CRI has %d RPCs: see whether rules has the new ones", len(all))
	}
	g := &generator{Rand: rand.New(rand.NewPCG(1, 1)), dir: "/node/fuzz", cgroup: "/pods"}
	for _, r := range all {
		filled := map[protoreflect.FullName]bool{}
		reachable(r.request.Descriptor(), filled)
		mutated := map[protoreflect.FullName]bool{}
		reachable(r.request.Descriptor(), mutated)
		step := r.new()
		for n := range 3000 {
			if len(filled)+len(mutated) == 0 {
				break
			}
			whole := r.new()
			g.fill(whole.ProtoReflect(), 0.3)
			setFields(whole.ProtoReflect(), filled)
			if n%12 == 0 {
				step = r.new()
			}
			g.mutate(step) // a message must exist before its fields do
			setFields(step.ProtoReflect(), mutated)
		}
		if len(filled)+len(mutated) > 0 {
			t.Errorf("%s: never filled: %v, never mutated: %v", r.name, filled, mutated)
		}
	}
}

func TestGeneratorMakesEveryKindOfValue(t *testing.T) {
	t.Parallel()
	g := &generator{Rand: rand.New(rand.NewPCG(2, 2)), dir: "/node/fuzz", cgroup: "/pods"}
	seen := map[string]bool{}
	for i := 0; i < 50000 && len(seen) < 7; i++ {
		m := &cri.RunPodSandboxRequest{Config: &cri.PodSandboxConfig{Linux: &cri.LinuxPodSandboxConfig{SecurityContext: &cri.LinuxSandboxSecurityContext{}}}}
		g.mutate(m)
		linux := m.GetConfig().GetLinux()
		for kind, is := range map[string]bool{
			"no UTF-8":     strings.Contains(m.GetRuntimeHandler(), invalidUTF8),
			"NUL":          strings.Contains(m.GetRuntimeHandler(), "\x00"),
			"empty":        m.GetConfig().GetDnsConfig() != nil && proto.Size(m.GetConfig().GetDnsConfig()) == 0,
			"missing":      m.GetConfig() == nil,
			"huge":         proto.Size(m) > huge,
			"overlong":     len(linux.GetSecurityContext().GetSupplementalGroups()) == overlong,
			"unknown enum": linux.GetSecurityContext().GetSeccomp().GetProfileType() == 99,
		} {
			if is {
				seen[kind] = true
			}
		}
		if c := linux.GetCgroupParent(); c != "" && !strings.HasPrefix(c, "/pods/") || strings.Contains(c, "..") {
			t.Fatalf("cgroup_parent %q leads out of the node", c)
		}
		if dir := m.GetConfig().GetLogDirectory(); dir != "" && (!strings.HasPrefix(dir, "/node/fuzz/") || strings.Contains(dir, "../..")) {
			t.Fatalf("log_directory %q leads out of the node", dir)
		}
	}
	wire, err := encode(&cri.RunPodSandboxRequest{RuntimeHandler: invalidUTF8})
	if err != nil || proto.Unmarshal(wire, new(cri.RunPodSandboxRequest)) == nil {
		t.Errorf("text that is no UTF-8 is sent as %q, which can be read (%v)", wire, err)
	}
	for _, kind := range []string{"no UTF-8", "NUL", "empty", "missing", "huge", "overlong", "unknown enum"} {
		if !seen[kind] {
			t.Errorf("nothing is ever %s", kind)
		}
	}
}

// A field that the generator does not know to be a path of the host cannot lead
// it out of the node.
func TestHostPathsStayBelowTheNode(t *testing.T) {
	t.Parallel()
	all, err := surface()
	if err != nil {
		t.Fatal(err)
	}
	fields := map[protoreflect.FullName]bool{}
	for _, r := range all {
		reachable(r.request.Descriptor(), fields)
	}
	elsewhere := []string{ // in the container, below log_directory, or not a path
		"container_path", "log_path", "image_sub_path", "working_dir", "masked_paths", "readonly_paths", "image_ref",
		"checkpoint_path", "output_path", "seccomp_profile_path",
	}
	for full := range fields {
		name := full.Name()
		known := isHostPath(name)
		for _, e := range elsewhere {
			known = known || string(name) == e
		}
		if text := string(name); (strings.Contains(text, "path") || strings.Contains(text, "dir")) && !known {
			t.Errorf("%s may be a path of the host: tell isHostPath, or this test", full)
		}
	}
}

func TestInvalidFieldValues(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		m    proto.Message
		want bool
	}{
		{&cri.RunPodSandboxRequest{}, false},
		{&cri.RunPodSandboxRequest{RuntimeHandler: "a\x00"}, true},
		{&cri.StopContainerRequest{ContainerId: "a\x00"}, false},
		{&cri.ContainerConfig{Annotations: map[string]string{"\x00": "\x00"}}, false},
		{&cri.ContainerConfig{Args: []string{"a", "\x00"}}, true},
		{&cri.ContainerConfig{Envs: []*cri.KeyValue{{Value: []byte{0}}}}, true},
		{&cri.ContainerConfig{Mounts: []*cri.Mount{{Propagation: 3}}}, true},
		{&cri.ContainerConfig{Mounts: []*cri.Mount{{Propagation: 2}}}, false},
		{&cri.LinuxContainerResources{Unified: map[string]string{"a.b": "\x00"}}, true},
	} {
		if got := unfit(c.m.ProtoReflect()); got != c.want {
			t.Errorf("unfit(%v) = %v", c.m, got)
		}
	}
}
