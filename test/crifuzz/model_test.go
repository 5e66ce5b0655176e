package main

import (
	"errors"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// These tests check what the model detects: answers that no server may give.

// bench returns a model with a pod that is ready and has a container in each
// stage.
func bench() (m *model, pod *object, in map[stage]*object) {
	sandbox := &cri.RunPodSandboxRequest{Config: &cri.PodSandboxConfig{Metadata: &cri.PodSandboxMetadata{Name: "pod"}}}
	pod = &object{id: "aa", lo: running, hi: running, plain: true, exit: -1, sandbox: sandbox}
	m = &model{pods: []*object{pod}, pictures: []*picture{{id: "img", refs: []string{"r/i:1"}, tags: []string{"r/i:1"}, here: true}}}
	in = map[stage]*object{}
	for s, id := range []string{"b0", "b1", "b2", "b3"} {
		o := &object{id: id, pod: pod, lo: stage(s), hi: stage(s), plain: true, exit: -1, container: &cri.CreateContainerRequest{
			Config: &cri.ContainerConfig{Metadata: &cri.ContainerMetadata{Name: id}, Image: &cri.ImageSpec{Image: "r/i:1"}},
		}}
		in[stage(s)] = o
		m.containers = append(m.containers, o)
	}
	return m, pod, in
}

func made(name string, req, reply proto.Message, code codes.Code) *call {
	c := &call{rpc: &rpc{name: name}, rule: rules()[name], api: "v1", req: req, plain: true, wait: patience}
	if code == codes.OK {
		c.replies = []proto.Message{reply}
	} else {
		c.err = status.Error(code, "refused")
	}
	return c
}

func TestModelJudgesAnswers(t *testing.T) {
	t.Parallel()
	start := func(id string) proto.Message { return &cri.StartContainerRequest{ContainerId: id} }
	create := func(name, image string) proto.Message {
		return &cri.CreateContainerRequest{PodSandboxId: "aa", Config: &cri.ContainerConfig{
			Metadata: &cri.ContainerMetadata{Name: name}, Image: &cri.ImageSpec{Image: image}}}
	}
	run := func(change func(*cri.PodSandboxConfig)) proto.Message {
		config := &cri.PodSandboxConfig{Metadata: &cri.PodSandboxMetadata{Name: "pod"}}
		change(config)
		return &cri.RunPodSandboxRequest{Config: config}
	}
	labels := func(c *cri.PodSandboxConfig) { c.Labels = map[string]string{"shade": "red"} }
	hostname := func(c *cri.PodSandboxConfig) { c.Hostname = "other" }
	remove := func(image string) proto.Message {
		return &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: image}}
	}
	ctr := func(id string) proto.Message { return &cri.CreateContainerResponse{ContainerId: id} }
	for name, c := range map[string]struct {
		rpc        string
		req, reply proto.Message
		code       codes.Code
		wrong      string // empty: it is correct
	}{
		"remove image in use":       {"RemoveImage", remove("r/i:1"), &cri.RemoveImageResponse{}, codes.OK, "want FailedPrecondition"},
		"refuse to remove it":       {"RemoveImage", remove("r/i:1"), nil, codes.FailedPrecondition, ""},
		"remove missing image":      {"RemoveImage", remove("r/i:2"), &cri.RemoveImageResponse{}, codes.OK, ""},
		"start created":             {"StartContainer", start("b0"), nil, codes.OK, ""},
		"start created, refused":    {"StartContainer", start("b0"), nil, codes.FailedPrecondition, "want OK"},
		"start created, Unknown":    {"StartContainer", start("b0"), nil, codes.Unknown, "want OK"},
		"start running":             {"StartContainer", start("b1"), nil, codes.OK, "want FailedPrecondition"},
		"start gone":                {"StartContainer", start("b3"), nil, codes.FailedPrecondition, "want NotFound"},
		"start several":             {"StartContainer", start("b"), nil, codes.NotFound, "want InvalidArgument"},
		"remove gone":               {"RemoveContainer", &cri.RemoveContainerRequest{ContainerId: "b3"}, nil, codes.NotFound, "want OK"},
		"create":                    {"CreateContainer", create("new", "r/i:1"), ctr("cc"), codes.OK, ""},
		"create of a missing image": {"CreateContainer", create("new", "r/i:2"), ctr("cc"), codes.OK, "want NotFound"},
		"create again":              {"CreateContainer", create("b0", "r/i:1"), ctr("b0"), codes.OK, ""},
		"create a second":           {"CreateContainer", create("b0", "r/i:1"), ctr("cc"), codes.OK, "a second time"},
		"create a running one":      {"CreateContainer", create("b1", "r/i:1"), ctr("b1"), codes.OK, "want AlreadyExists"},
		"create a removed one":      {"CreateContainer", create("b3", "r/i:1"), ctr("b3"), codes.OK, "it answers with"},
		"run again, other labels":   {"RunPodSandbox", run(labels), &cri.RunPodSandboxResponse{PodSandboxId: "aa"}, codes.OK, ""},
		"run again, other hostname": {"RunPodSandbox", run(hostname), &cri.RunPodSandboxResponse{PodSandboxId: "aa"}, codes.OK, "want AlreadyExists"},
		"checkpoint":                {"CheckpointContainer", &cri.CheckpointContainerRequest{ContainerId: "b1"}, nil, codes.OK, "or Unimplemented"},
		"image that is there":       {"ImageStatus", &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: "r/i:1"}}, &cri.ImageStatusResponse{}, codes.OK, "not found"},
		"version":                   {"Version", &cri.VersionRequest{}, &cri.VersionResponse{RuntimeName: "crius", RuntimeApiVersion: "v1alpha2"}, codes.OK, "v1alpha2"},
		"list without b1":           {"ListContainers", &cri.ListContainersRequest{}, &cri.ListContainersResponse{Containers: []*cri.Container{{Id: "b0"}, {Id: "b2"}}}, codes.OK, "b1"},
		"list with b3": {"ListContainers", &cri.ListContainersRequest{}, &cri.ListContainersResponse{
			Containers: []*cri.Container{{Id: "b0"}, {Id: "b1"}, {Id: "b2"}, {Id: "b3"}}}, codes.OK, "b3"},
		"list of the running": {"ListContainers", &cri.ListContainersRequest{Filter: &cri.ContainerFilter{State: &cri.ContainerStateValue{State: cri.ContainerState_CONTAINER_RUNNING}}},
			&cri.ListContainersResponse{Containers: []*cri.Container{{Id: "b1"}}}, codes.OK, ""},
		"undecodable, Internal": {"Status", nil, nil, codes.Internal, "want InvalidArgument"},
	} {
		m, _, _ := bench()
		one := made(c.rpc, c.req, c.reply, c.code)
		m.begin([]*call{one})
		err := m.finish([]*call{one})
		if (err == nil) != (c.wrong == "") || err != nil && !strings.Contains(err.Error(), c.wrong) {
			t.Errorf("%s: %v, want %q", name, err, c.wrong)
		}
	}
}

// Concurrent calls may take effect in any order; afterwards the object is where
// the last of them left it.
func TestModelAllowsEveryOrder(t *testing.T) {
	t.Parallel()
	stop := func() *call {
		return made("StopPodSandbox", &cri.StopPodSandboxRequest{PodSandboxId: "aa"}, &cri.StopPodSandboxResponse{}, codes.OK)
	}
	start := func(code codes.Code) *call {
		return made("StartContainer", &cri.StartContainerRequest{ContainerId: "b0"}, &cri.StartContainerResponse{}, code)
	}
	for _, code := range []codes.Code{codes.OK, codes.FailedPrecondition} {
		m, pod, in := bench()
		turn := []*call{start(code), stop()}
		m.begin(turn)
		if err := m.finish(turn); err != nil {
			t.Errorf("%v: %v", code, err)
		}
		if pod.lo != ended || in[created].lo != ended || in[running].lo != ended {
			t.Errorf("the pod was stopped, and is %v, its containers %v and %v", pod.lo, in[created].lo, in[running].lo)
		}
		listed := map[string]stage{"b0": running, "b1": ended, "b2": ended}
		if err := narrow(m.containers, listed); err == nil || !strings.Contains(err.Error(), "b0 is running") {
			t.Errorf("a container runs in a pod that was stopped: %v", err)
		}
	}
	m, _, _ := bench()
	turn := []*call{start(codes.NotFound), stop()}
	m.begin(turn)
	if err := m.finish(turn); err == nil {
		t.Error("a container that nobody removes may be gone")
	}
	killed := func() *call {
		return made("ExecSync", &cri.ExecSyncRequest{ContainerId: "b1", Cmd: []string{"/probe", "echo", "hello"}}, &cri.ExecSyncResponse{ExitCode: 137}, codes.OK)
	}
	for _, turn := range [][]*call{{killed()}, {killed(), stop()}} {
		m, _, _ = bench()
		m.begin(turn)
		if err := m.finish(turn); (err == nil) != (len(turn) == 2) {
			t.Errorf("a command was killed, and %d calls were made: %v", len(turn), err)
		}
	}
	image := &cri.ImageSpec{Image: "r/i:1"}
	for _, found := range []*cri.Image{nil, {Id: "img"}} {
		m, _, _ = bench()
		turn = []*call{
			made("RemoveImage", &cri.RemoveImageRequest{Image: image}, &cri.RemoveImageResponse{}, codes.OK),
			made("ImageStatus", &cri.ImageStatusRequest{Image: image}, &cri.ImageStatusResponse{Image: found}, codes.OK),
		}
		m.begin(turn)
		if err := m.finish(turn); err != nil {
			t.Errorf("while an image is removed: %v", err)
		}
		if m.pictures[0].here {
			t.Error("the image was removed, and is there")
		}
	}
}

// A refused call has no effect: its intended result must not be seen.
func TestModelTakesBackRefusals(t *testing.T) {
	t.Parallel()
	m, _, in := bench()
	c := made("StopContainer", &cri.StopContainerRequest{ContainerId: "b1", Timeout: -1}, nil, codes.InvalidArgument)
	c.plain = false
	m.begin([]*call{c})
	if err := m.finish([]*call{c}); err != nil {
		t.Fatal(err)
	}
	if o := in[running]; o.hi != running || o.disturbed {
		t.Errorf("after a refused stop it may be %v", o.hi)
	}
	if err := narrow(m.containers, map[string]stage{"b0": created, "b1": ended, "b2": ended}); err == nil {
		t.Error("a refused stop has stopped it")
	}
}

func TestFailureIsFound(t *testing.T) {
	t.Parallel()
	var f *failure
	if err := errors.Join(error(&failure{3, errors.New("x")}), nil); !errors.As(err, &f) || f.turns != 3 {
		t.Errorf("%v", err)
	}
}

func TestWordsOfTheRuntime(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]bool{
		"exec in container 12: crun exec: exit status 255: executable file `:` not found":          true,
		"container c of pod 12: runc create (to run \":\"): exec: not found":                       true,
		"start container 12: runc start: exit status 1: cannot start a container that has stopped": true,
		"pod runc: mount pod files: input/output error":                                            false,
	} {
		if byRuntime(text) != want {
			t.Errorf("byRuntime(%q) = %v", text, !want)
		}
	}
}

func TestFilterOfUnknownContainersSelectsNone(t *testing.T) {
	t.Parallel()
	filter := &cri.ContainerFilter{State: &cri.ContainerStateValue{State: cri.ContainerState_CONTAINER_UNKNOWN}}
	for _, at := range []stage{created, running, ended} {
		if may, must := matches(filter, &object{pod: &object{}, lo: at, hi: at}, nil); may || must {
			t.Errorf("a container that is %v: %v, %v", at, may, must)
		}
	}
}
