package server

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/pod"
)

func (s *containerAPI) CheckpointContainer(ctx context.Context, req *cri.CheckpointContainerRequest) (*cri.CheckpointContainerResponse, error) {
	timeout, err := checkTimeout("timeout", req.GetTimeout())
	if err != nil {
		return nil, err
	}
	if err := checkCheckpointContainer(req); err != nil {
		return nil, err
	}
	if err := s.engine.CheckpointContainer(ctx, req.GetContainerId(), filepath.Clean(req.GetLocation()), timeout); err != nil {
		return nil, err
	}
	return &cri.CheckpointContainerResponse{}, nil
}

func checkCheckpointContainer(req *cri.CheckpointContainerRequest) error {
	return cmp.Or(
		wellFormed(req),
		checkID("container_id", req.GetContainerId()),
		checkOutput("location", req.GetLocation()),
	)
}

// checkOutput checks the path of a file or directory that crius writes for the caller.
func checkOutput(field, path string) error {
	switch {
	case path == "":
		return in(field, bad("is empty; send an absolute path"))
	case !filepath.IsAbs(path):
		return in(field, bad("is %q; send an absolute path", brief(path)))
	case len(path) > maxPath:
		return in(field, bad("is longer than %d bytes", maxPath))
	case strings.HasSuffix(path, "/") && field == "location" || filepath.Clean(path) == "/":
		return in(field, bad("is %q, which names no file", brief(path)))
	case slices.Contains(strings.Split(path, "/"), ".."):
		return in(field, bad(`is %q; send a path without ".."`, brief(path)))
	}
	return nil
}

func (s *sandboxAPI) CheckpointPod(ctx context.Context, req *cri.CheckpointPodRequest) (*cri.CheckpointPodResponse, error) {
	if err := checkCheckpointPod(ctx, req); err != nil {
		return nil, err
	}
	if err := s.engine.CheckpointSandbox(ctx, req.GetPodSandboxId(), filepath.Clean(req.GetOutputPath()), req.GetContainerIds()); err != nil {
		return nil, err
	}
	return &cri.CheckpointPodResponse{}, nil
}

func checkCheckpointPod(ctx context.Context, req *cri.CheckpointPodRequest) error {
	err := cmp.Or(
		wellFormed(req),
		checkID("pod_sandbox_id", req.GetPodSandboxId()),
		checkOutput("output_path", req.GetOutputPath()),
		each("container_ids", req.GetContainerIds(), maxEntries, func(id string) error { return checkID("", id) }),
	)
	if err != nil {
		return err
	}
	if len(req.GetContainerIds()) == 0 {
		return in("container_ids", bad("is empty; send the containers to checkpoint"))
	}
	ids := slices.Sorted(slices.Values(req.GetContainerIds()))
	if len(slices.Compact(ids)) < len(req.GetContainerIds()) {
		return in("container_ids", bad("has an id twice"))
	}
	if options := slices.Sorted(maps.Keys(req.GetOptions())); len(options) > 0 {
		return in("options", bad("has %q; there are no options", brief(options[0])))
	}
	return checkCall(ctx)
}

// checkCall checks what both calls for pods have in common.
func checkCall(ctx context.Context) error {
	if _, ok := ctx.Deadline(); !ok {
		return bad("the call has no deadline; set one")
	}
	return nil
}

func (s *sandboxAPI) RestorePod(ctx context.Context, req *cri.RestorePodRequest) (*cri.RestorePodResponse, error) {
	if err := checkRestorePod(ctx, req); err != nil {
		return nil, err
	}
	id, err := s.engine.RestoreSandbox(ctx, pod.RestoreRequest{
		Dir: filepath.Clean(req.GetCheckpointPath()), Manifest: req.GetOptions()[pod.OptionManifest], Handler: req.GetRuntimeHandler(),
		Pod: req.GetConfig(), Containers: req.GetContainerConfigs(),
	})
	if err != nil {
		return nil, createFault(err)
	}
	views, err := s.engine.SandboxContainers(id)
	if err != nil {
		return nil, err
	}
	resp := &cri.RestorePodResponse{PodSandboxId: id}
	for _, c := range req.GetContainerConfigs() {
		name := c.GetMetadata().GetName()
		for _, v := range views {
			if v.Config.GetMetadata().GetName() == name {
				resp.RestoredContainers = append(resp.RestoredContainers, &cri.RestoredContainer{Name: name, ContainerId: v.ID})
			}
		}
	}
	return resp, nil
}

func checkRestorePod(ctx context.Context, req *cri.RestorePodRequest) error {
	each := func() error {
		names := map[string]bool{}
		for i, c := range req.GetContainerConfigs() {
			name := c.GetMetadata().GetName()
			err := cmp.Or(checkProgram(c), checkContainerConfig(c))
			if err == nil && names[name] {
				err = in("metadata.name", bad("is %q, as that of another container", brief(name)))
			}
			if err != nil {
				return in(fmt.Sprintf("container_configs[%d]", i), err)
			}
			names[name] = true
		}
		return nil
	}
	if n := len(req.GetContainerConfigs()); n == 0 || n > maxRestored {
		return in("container_configs", bad("has %d entries; send at least 1 and at most %d", n, maxRestored))
	}
	return cmp.Or(
		each(),
		wellFormed(req),
		checkOutput("checkpoint_path", req.GetCheckpointPath()),
		in("config", checkSandboxConfig(req.GetConfig())),
		in("options", checkRestoreOptions(req.GetOptions())),
		checkCall(ctx),
	)
}

func checkRestoreOptions(options map[string]string) error {
	for _, key := range slices.Sorted(maps.Keys(options)) {
		if key != pod.OptionManifest {
			return bad("has %q; the only option is %s", brief(key), pod.OptionManifest)
		}
		if sum, err := hex.DecodeString(options[key]); err != nil || len(sum) != sha256.Size || strings.ToLower(options[key]) != options[key] {
			return bad("%s is %q, not a SHA-256 in hexadecimal", key, brief(options[key]))
		}
	}
	return nil
}

// maxRestored bounds the containers of a pod that is restored.
const maxRestored = 256
