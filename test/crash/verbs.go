package main

import (
	"context"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// verb is an operation during which the server is killed.
type verb struct {
	name   string
	change podChange // makes the pod a more complex one; may be nil
	only   string    // the handler that can do it; empty: all

	prepare act // makes what exists before; nil: nothing
	run     act
	// settle does what a kubelet does next: it tries again, and checks the
	// result.
	settle act
}

type podChange = func(*cri.PodSandboxConfig)

type act func(*stage, context.Context) error

// in runs one after the other until one fails.
func in(all ...act) act {
	return func(s *stage, ctx context.Context) error {
		for _, a := range all {
			if err := a(s, ctx); err != nil {
				return err
			}
		}
		return nil
	}
}

// verbs returns all that change something. Their points are found by running
// them.
func verbs() []verb {
	return []verb{
		{name: "RunPodSandbox", run: (*stage).runPod, settle: (*stage).wantPod},
		{name: "RunPodSandbox-ports", change: hostPort, run: (*stage).runPod, settle: (*stage).wantPod},
		{name: "RunPodSandbox-pid", change: sharedPID, run: (*stage).runPod, settle: (*stage).wantPod},
		{name: "CreateContainer", prepare: (*stage).runPod, run: (*stage).create, settle: (*stage).wantContainer},
		{name: "CreateContainer-volume", prepare: in((*stage).pull, (*stage).runPod, (*stage).wantsVolume),
			run: (*stage).create, settle: (*stage).wantContainer},
		{name: "StartContainer", prepare: in((*stage).runPod, (*stage).create), run: (*stage).start, settle: (*stage).wantRunning},
		{name: "ExecSync", prepare: (*stage).running, run: (*stage).exec, settle: (*stage).wantExec},
		{name: "UpdateContainerResources", prepare: (*stage).running, run: (*stage).update, settle: (*stage).wantUpdated},
		{name: "UpdatePodSandboxResources", prepare: (*stage).runPod, run: (*stage).updatePod, settle: (*stage).wantPodUpdated},
		{name: "ReopenContainerLog", prepare: (*stage).running, run: (*stage).rotate, settle: (*stage).wantRotated},
		{name: "CheckpointContainer", only: criuHandler, prepare: (*stage).running, run: (*stage).checkpoint, settle: (*stage).wantCheckpoint},
		{name: "CheckpointPod", only: criuHandler, prepare: (*stage).running, run: (*stage).checkpointPod, settle: (*stage).wantPodCheckpoint},
		{name: "RestorePod", only: criuHandler, prepare: (*stage).dumped, run: (*stage).restorePod, settle: (*stage).wantRestored},
		{name: "StopContainer", prepare: (*stage).running, run: (*stage).stop, settle: (*stage).wantStopped},
		{name: "RemoveContainer", prepare: (*stage).running, run: (*stage).remove, settle: (*stage).wantRemoved},
		{name: "StopPodSandbox", change: hostPort, prepare: (*stage).running, run: (*stage).stopPod, settle: (*stage).wantPodStopped},
		{name: "StopPodSandbox-pid", change: sharedPID, prepare: (*stage).running, run: (*stage).stopPod, settle: (*stage).wantPodStopped},
		{name: "RemovePodSandbox", change: hostPort, prepare: (*stage).running, run: (*stage).removePod, settle: (*stage).wantPodRemoved},
		{name: "RemovePodSandbox-pid", change: sharedPID, prepare: (*stage).running, run: (*stage).removePod, settle: (*stage).wantPodRemoved},
		{name: "PullImage", run: (*stage).pull, settle: (*stage).wantPulled},
		{name: "RemoveImage", prepare: (*stage).pull, run: (*stage).removeImage, settle: (*stage).wantNoImage},
		{name: "PullImage-artifact", run: (*stage).pullArtifact, settle: (*stage).wantArtifact},
		{name: "RemoveImage-artifact", prepare: (*stage).pullArtifact, run: (*stage).removeArtifact, settle: (*stage).wantNoArtifact},
		{name: "PullSecurityProfile", run: (*stage).pullProfile, settle: (*stage).wantProfile},
		{name: "RemoveSecurityProfile", prepare: (*stage).pullProfile, run: (*stage).removeProfile, settle: (*stage).wantNoProfile},
		{name: "CreateContainer-profile", prepare: in((*stage).pullProfile, (*stage).runPod, (*stage).wantsProfile),
			run: (*stage).create, settle: (*stage).wantContainer},
		{name: "CreateContainer-artifact", prepare: in((*stage).pullArtifact, (*stage).runPod, (*stage).wantsArtifact),
			run: (*stage).create, settle: (*stage).wantContainer},
		{name: "RemoveContainer-artifact", prepare: (*stage).mountsArtifact, run: (*stage).remove, settle: (*stage).wantRemoved},
		{name: "Recover", prepare: (*stage).leaveHalfDone, run: (*stage).serve, settle: (*stage).wantOrder},
	}
}

func hostPort(c *cri.PodSandboxConfig) {
	c.PortMappings = []*cri.PortMapping{{HostPort: 8080, ContainerPort: 80}}
}

func sharedPID(c *cri.PodSandboxConfig) {
	c.Linux.SecurityContext.NamespaceOptions.Pid = cri.NamespaceMode_POD
}
