package main

import (
	"fmt"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/images"
	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// rule is what the model knows about an RPC. An RPC without a rule must have no
// effect.
type rule struct {
	weight int
	// plain returns a request as a kubelet would send it; nil: an empty one.
	plain func(*planner) proto.Message
	// target returns the object that the request names; nil: it names none.
	target func(*model, proto.Message) (*object, address)
	// to is how far the verb takes its target.
	to stage
	// allowed returns the permitted codes of an answer.
	allowed func(*model, *call) answers
	// done records what an answer without an error means, and checks it.
	done func(*model, *call) error
}

// named returns the target of requests that name a container or a pod.
func named(m *model, req proto.Message) (*object, address) {
	switch r := req.(type) {
	case interface{ GetContainerId() string }:
		return resolve(m.containers, r.GetContainerId())
	case interface{ GetPodSandboxId() string }:
		return resolve(m.pods, r.GetPodSandboxId())
	}
	return nil, missing
}

// on returns the rule of a verb on an existing object.
func on(weight int, plain func(*planner) proto.Message, l life, to stage) rule {
	return rule{
		weight: weight, plain: plain, target: named, to: to,
		allowed: func(_ *model, c *call) answers { return l.of(c.target, c.how) },
		done: func(m *model, c *call) error {
			if c.target != nil && to > created {
				m.settle(c.target, to)
			}
			return nil
		},
	}
}

func whole(weight int, plain func(*planner) proto.Message, done func(*model, *call) error) rule {
	return rule{weight: weight, plain: plain, allowed: func(*model, *call) answers { return fine }, done: done}
}

// cannotCheckpoint: the node is configured without criu, so that nothing is written, and restores nothing.
func cannotCheckpoint(*model, *call) answers { return refusals }

// noProfile: the registry has no security profiles.
func noProfile(_ *model, c *call) answers {
	if c.unreached() {
		return refusals | answer(codes.Unknown)
	}
	return refusals
}

// mayForget: there are no profiles to remove, which is no error.
func mayForget(*model, *call) answers { return fine | answer(codes.InvalidArgument) }

// rules returns the rules by the name of the RPC.
func rules() map[string]rule {
	return map[string]rule{
		"RunPodSandbox": {weight: 7, plain: planPod, allowed: mayRun, done: hasRun},
		"CreateContainer": {weight: 10, plain: planContainer, allowed: mayCreate, done: hasCreated,
			target: func(m *model, req proto.Message) (*object, address) {
				return resolve(m.pods, req.(*cri.CreateContainerRequest).GetPodSandboxId())
			}},
		"StartContainer":   {weight: 16, plain: onContainer(func(id string) proto.Message { return &cri.StartContainerRequest{ContainerId: id} }), target: named, to: running, allowed: mayStart, done: hasStarted},
		"StopContainer":    on(4, onContainer(func(id string) proto.Message { return &cri.StopContainerRequest{ContainerId: id, Timeout: 30} }), always, ended),
		"RemoveContainer":  on(3, onContainer(func(id string) proto.Message { return &cri.RemoveContainerRequest{ContainerId: id} }), always, gone),
		"StopPodSandbox":   on(2, onPod(func(id string) proto.Message { return &cri.StopPodSandboxRequest{PodSandboxId: id} }), always, ended),
		"RemovePodSandbox": on(2, onPod(func(id string) proto.Message { return &cri.RemovePodSandboxRequest{PodSandboxId: id} }), always, gone),

		"ContainerStatus": on(3, onContainer(func(id string) proto.Message { return &cri.ContainerStatusRequest{ContainerId: id, Verbose: true} }), readable, created),
		"ContainerStats":  on(2, onContainer(func(id string) proto.Message { return &cri.ContainerStatsRequest{ContainerId: id} }), readable, created),
		"PodSandboxStatus": on(3, onPod(func(id string) proto.Message {
			return &cri.PodSandboxStatusRequest{PodSandboxId: id, Verbose: true}
		}), readable, created),
		"PodSandboxStats": on(2, onPod(func(id string) proto.Message { return &cri.PodSandboxStatsRequest{PodSandboxId: id} }), readable, created),

		"UpdateContainerResources":  on(3, onContainer(planUpdate), tunable, created),
		"UpdatePodSandboxResources": on(2, onPod(planPodUpdate), whileUp, created),
		"ReopenContainerLog":        on(2, onContainer(func(id string) proto.Message { return &cri.ReopenContainerLogRequest{ContainerId: id} }), whileUp, created),
		"ExecSync":                  withDone(on(4, onContainer(planExecSync), whileUp, created), hasExecuted),
		"Exec":                      on(2, onContainer(planExec), whileUp, created),
		"Attach":                    on(2, onContainer(func(id string) proto.Message { return &cri.AttachRequest{ContainerId: id, Stdout: true, Stderr: true} }), whileUp, created),
		"PortForward":               on(2, onPod(func(id string) proto.Message { return &cri.PortForwardRequest{PodSandboxId: id, Port: []int32{80}} }), whileUp, created),

		"ListPodSandbox":        whole(2, planPodFilter, listed),
		"StreamPodSandboxes":    whole(2, planPodFilter, listed),
		"ListContainers":        whole(2, planContainerFilter, listed),
		"StreamContainers":      whole(2, planContainerFilter, listed),
		"ListContainerStats":    whole(2, planContainerFilter, listed),
		"StreamContainerStats":  whole(2, planContainerFilter, listed),
		"ListPodSandboxStats":   whole(2, planPodFilter, listed),
		"StreamPodSandboxStats": whole(2, planPodFilter, listed),

		"Version": whole(1, nil, hasVersion),
		"Status":  whole(1, func(*planner) proto.Message { return &cri.StatusRequest{Verbose: true} }, isReady),
		"UpdateRuntimeConfig": whole(1, func(*planner) proto.Message {
			return &cri.UpdateRuntimeConfigRequest{RuntimeConfig: &cri.RuntimeConfig{NetworkConfig: &cri.NetworkConfig{PodCidr: podCIDR}}}
		}, nil),
		"RuntimeConfig":           whole(1, nil, nil),
		"ListMetricDescriptors":   whole(1, nil, nil),
		"ListPodSandboxMetrics":   whole(1, nil, nil),
		"StreamPodSandboxMetrics": whole(1, nil, nil),
		endless:                   whole(1, nil, nil),
		"CheckpointContainer":     {weight: 1, allowed: cannotCheckpoint},
		"CheckpointPod":           {weight: 1, allowed: cannotCheckpoint},
		"RestorePod":              {weight: 1, allowed: cannotCheckpoint},

		"ListImages":   whole(2, planImageFilter, hasImages),
		"StreamImages": whole(2, planImageFilter, hasImages),
		"ImageStatus":  whole(2, func(p *planner) proto.Message { return &cri.ImageStatusRequest{Image: p.image(), Verbose: true} }, hasImageStatus),
		"PullImage":    {weight: 3, plain: func(p *planner) proto.Message { return &cri.PullImageRequest{Image: p.image()} }, allowed: mayPull, done: hasPulled},
		"RemoveImage":  {weight: 2, plain: func(p *planner) proto.Message { return &cri.RemoveImageRequest{Image: p.image()} }, allowed: mayRemoveImage, done: hasRemovedImage},
		"ImageFsInfo":  whole(1, nil, nil),

		"PullSecurityProfile":   {weight: 1, allowed: noProfile},
		"ListSecurityProfiles":  whole(1, nil, hasNoProfiles),
		"RemoveSecurityProfile": {weight: 1, allowed: mayForget},
	}
}

func withDone(r rule, done func(*model, *call) error) rule {
	r.done = done
	return r
}

func onContainer(request func(id string) proto.Message) func(*planner) proto.Message {
	return func(p *planner) proto.Message { return request(p.name(p.containers())) }
}

func onPod(request func(id string) proto.Message) func(*planner) proto.Message {
	return func(p *planner) proto.Message { return request(p.name(p.pods())) }
}

// limit is a time limit, in seconds, that a command does not reach.
var limit = scene.LimitSeconds

func planUpdate(id string) proto.Message {
	return &cri.UpdateContainerResourcesRequest{ContainerId: id, Linux: &cri.LinuxContainerResources{CpuShares: 512, OomScoreAdj: 900}}
}

func planPodUpdate(id string) proto.Message {
	return &cri.UpdatePodSandboxResourcesRequest{PodSandboxId: id, Resources: &cri.LinuxContainerResources{CpuShares: 512}}
}

func planExecSync(id string) proto.Message {
	return &cri.ExecSyncRequest{ContainerId: id, Cmd: []string{"/probe", "echo", "hello"}, Timeout: limit}
}

func planExec(id string) proto.Message {
	return &cri.ExecRequest{ContainerId: id, Cmd: []string{"/probe", "echo", "hello"}, Stdout: true, Stderr: true}
}

// planPod plans a new pod, or an earlier one, perhaps with something changed.
func planPod(p *planner) proto.Message {
	if old := p.again(p.model.pods); old != nil {
		req := proto.CloneOf(old.sandbox)
		if p.IntN(3) == 0 {
			req.Config.Annotations = map[string]string{"changed": "yes"}
		}
		return req
	}
	config := kubelet.Pod(p.fresh("pod"), func(c *cri.PodSandboxConfig) {
		c.Metadata.Uid = "uid-of-" + c.Metadata.Name // the same for the same seed
		c.Labels["io.kubernetes.pod.uid"] = c.Metadata.Uid
		c.Labels["shade"] = p.shade()
		c.LogDirectory = p.logs + "/" + c.Metadata.Name
	})
	return &cri.RunPodSandboxRequest{Config: config, RuntimeHandler: scene.Handlers[p.IntN(len(scene.Handlers))]}
}

// planContainer does the same for a container.
func planContainer(p *planner) proto.Message {
	if old := p.again(p.model.containers); old != nil {
		req := proto.CloneOf(old.container)
		if p.IntN(3) == 0 {
			req.Config.Annotations = map[string]string{"changed": "yes"}
		}
		return req
	}
	program := []string{"sleep", "sleep", "exit 0", "exit 7"}[p.IntN(4)]
	image := images.Probe
	if p.IntN(4) == 0 {
		image = p.image().Image
	}
	req := &cri.CreateContainerRequest{
		PodSandboxId: p.name(p.pods()),
		Config: kubelet.Container(p.fresh("c"), image, scene.Steps(program), func(c *cri.ContainerConfig) {
			c.Labels["shade"] = p.shade()
		}),
	}
	if pod, how := resolve(p.model.pods, req.PodSandboxId); how == one {
		req.SandboxConfig = proto.CloneOf(pod.sandbox.Config)
	}
	return req
}

func planPodFilter(p *planner) proto.Message {
	var f cri.PodSandboxFilter
	switch p.IntN(4) {
	case 0:
		f.Id = p.name(p.pods())
	case 1:
		f.State = &cri.PodSandboxStateValue{State: cri.PodSandboxState(p.IntN(2))}
	case 2:
		f.LabelSelector = map[string]string{"shade": p.shade()}
	}
	return recast(p.request, &cri.ListPodSandboxRequest{Filter: &f})
}

func planContainerFilter(p *planner) proto.Message {
	var f cri.ContainerFilter
	switch p.IntN(5) {
	case 0:
		f.Id = p.name(p.containers())
	case 1:
		f.State = &cri.ContainerStateValue{State: cri.ContainerState(p.IntN(3))}
	case 2:
		f.LabelSelector = map[string]string{"shade": p.shade()}
	case 3:
		f.PodSandboxId = p.name(p.pods())
	}
	return recast(p.request, &cri.ListContainersRequest{Filter: &f})
}

func planImageFilter(p *planner) proto.Message {
	var f cri.ImageFilter
	if p.IntN(2) == 0 {
		f.Image = p.image()
	}
	return recast(p.request, &cri.ListImagesRequest{Filter: &f})
}

// hasExecuted checks the output of a command.
func hasExecuted(_ *model, c *call) error {
	resp := c.replies[0].(*cri.ExecSyncResponse)
	if resp.ExitCode == 137 && c.target.hi >= ended {
		return nil // the kernel has killed it with the container
	}
	if c.plain && c.target.plain && (string(resp.Stdout) != "hello\n" || resp.ExitCode != 0) {
		return fmt.Errorf("the command answered %d, %q and %q", resp.ExitCode, resp.Stdout, resp.Stderr)
	}
	return nil
}

func hasVersion(_ *model, c *call) error {
	if v := c.replies[0].(*cri.VersionResponse); v.RuntimeName != "crius" || v.RuntimeApiVersion != c.api {
		return fmt.Errorf("%s was asked and %v answered", c.api, v)
	}
	return nil
}

func isReady(_ *model, c *call) error {
	for _, condition := range c.replies[0].(*cri.StatusResponse).GetStatus().GetConditions() {
		if !condition.Status {
			return fmt.Errorf("the node has become %v", condition)
		}
	}
	return nil
}

// patience is how long an answer may take.
const patience = wait.Limit

// podCIDR is what a kubelet announces.
const podCIDR = "10.99.0.0/16"

// taken returns the objects that have a name, or may have it.
func taken(all []*object, same func(*object) bool) []*object {
	return slices.DeleteFunc(live(all), func(o *object) bool { return !same(o) })
}
