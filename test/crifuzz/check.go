package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/scene"
)

// This file compares the server's answers with the model.

// podStage and containerStage convert a state to a stage.
func podStage(s cri.PodSandboxState) stage {
	if s == cri.PodSandboxState_SANDBOX_READY {
		return running
	}
	return ended
}

func containerStage(s cri.ContainerState) stage {
	switch s {
	case cri.ContainerState_CONTAINER_CREATED:
		return created
	case cri.ContainerState_CONTAINER_RUNNING:
		return running
	default:
		return ended
	}
}

// observe queries everything between two turns.
func (m *model) observe(ctx context.Context, w *scene.World) error {
	pods, err := w.Runtime().ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	if err != nil {
		return err
	}
	containers, err := w.Runtime().ListContainers(ctx, &cri.ListContainersRequest{})
	if err != nil {
		return err
	}
	images, err := w.Images().ListImages(ctx, &cri.ListImagesRequest{})
	if err != nil {
		return err
	}
	podStages, containerStages := map[string]stage{}, map[string]stage{}
	for _, p := range pods.Items {
		podStages[p.Id] = podStage(p.State)
	}
	for _, c := range containers.Containers {
		containerStages[c.Id] = containerStage(c.State)
	}
	return errors.Join(narrow(m.pods, podStages), narrow(m.containers, containerStages), m.narrowImages(images.Images), m.statuses(ctx, w))
}

// narrow compares the stages of listed objects with the possible ones, and
// records them.
func narrow(all []*object, listed map[string]stage) error {
	known := map[string]bool{}
	for _, o := range all {
		known[o.id] = true
		now, there := listed[o.id]
		if !there {
			now = gone
		}
		if !o.mayBe(now) {
			return fmt.Errorf("%s is %v, want from %v to %v", o.what(), now, o.lo, o.hi)
		}
		o.lo = now
		if !o.volatile || now >= ended {
			o.hi = now
		} else {
			o.hi = ended
		}
	}
	for id, s := range listed {
		if !known[id] {
			return fmt.Errorf("the list has %s, %v, which nobody has made", id, s)
		}
	}
	return nil
}

func (m *model) narrowImages(listed []*cri.Image) error {
	tags := map[string][]string{}
	for _, i := range listed {
		tags[i.Id] = i.RepoTags
	}
	for _, p := range m.pictures {
		_, there := tags[p.id]
		if there && !p.here || !there && !p.absent {
			return fmt.Errorf("image %v is listed: %v, want %v", p.refs, there, p.here)
		}
		for _, tag := range tags[p.id] {
			if !slices.Contains(p.refs, tag) {
				return fmt.Errorf("image %v is listed as %s", p.refs, tag)
			}
		}
		for _, tag := range p.tags {
			if there && !slices.Contains(tags[p.id], tag) {
				return fmt.Errorf("image %v is not listed as %s", p.refs, tag)
			}
		}
		p.here, p.absent, p.tags = there, !there, tags[p.id]
		delete(tags, p.id)
	}
	if len(tags) > 0 {
		return fmt.Errorf("images that nobody has pulled: %v", tags)
	}
	return nil
}

// statuses requests the status of each pod and each container.
func (m *model) statuses(ctx context.Context, w *scene.World) error {
	for _, pod := range live(m.pods) {
		resp, err := w.Runtime().PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: pod.id})
		if err != nil {
			return fmt.Errorf("PodSandboxStatus of a pod that is listed: %w", err)
		}
		if err := m.checkPod(pod, resp); err != nil {
			return fmt.Errorf("PodSandboxStatus: %s: %w: %v", pod.what(), err, resp)
		}
	}
	for _, c := range live(m.containers) {
		resp, err := w.Runtime().ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: c.id})
		if err != nil {
			return fmt.Errorf("ContainerStatus of a container that is listed: %w", err)
		}
		if err := checkContainer(c, resp.Status); err != nil {
			return fmt.Errorf("ContainerStatus: %s: %w: %v", c.what(), err, resp)
		}
	}
	return nil
}

func (m *model) checkPod(pod *object, resp *cri.PodSandboxStatusResponse) error {
	s, config := resp.Status, pod.sandbox.GetConfig()
	switch {
	case !pod.mayBe(podStage(s.State)):
		return fmt.Errorf("want from %v to %v", pod.lo, pod.hi)
	case s.Id != pod.id || !proto.Equal(s.Metadata, config.Metadata) || !maps.Equal(s.Labels, config.Labels) || !maps.Equal(s.Annotations, config.Annotations):
		return errors.New("it is not what was asked for")
	case pod.sandbox.RuntimeHandler != "" && s.RuntimeHandler != pod.sandbox.RuntimeHandler:
		return errors.New("it has another handler")
	case s.CreatedAt <= 0:
		return errors.New("it has no time of creation")
	}
	var ids, want []string
	for _, c := range resp.ContainersStatuses {
		ids = append(ids, c.Id)
	}
	for _, c := range live(m.members(pod)) {
		want = append(want, c.id)
	}
	slices.Sort(ids)
	slices.Sort(want)
	if !slices.Equal(ids, want) {
		return fmt.Errorf("it has the containers %v, want %v", ids, want)
	}
	return nil
}

func checkContainer(c *object, s *cri.ContainerStatus) error {
	config := c.container.GetConfig()
	now := containerStage(s.State)
	switch {
	case !c.mayBe(now):
		return fmt.Errorf("want from %v to %v", c.lo, c.hi)
	case s.Id != c.id || !proto.Equal(s.Metadata, config.Metadata) || !maps.Equal(s.Labels, config.Labels) || !maps.Equal(s.Annotations, config.Annotations):
		return errors.New("it is not what was asked for")
	case s.CreatedAt <= 0 || now == running && s.StartedAt < s.CreatedAt || now == ended && s.FinishedAt < max(s.StartedAt, s.CreatedAt):
		return errors.New("its times are not one after the other")
	case now < ended && (s.FinishedAt != 0 || s.ExitCode != 0 || s.Reason != ""):
		return errors.New("it has an end, and goes on")
	case now == ended && c.plain && !c.disturbed && c.exit >= 0 && s.ExitCode != c.exit:
		return fmt.Errorf("want code %d", c.exit)
	case c.plain && s.LogPath != filepath.Join(c.pod.sandbox.Config.LogDirectory, config.LogPath):
		return errors.New("its log is elsewhere")
	}
	return nil
}

// filter is what CRI's filters have in common.
type filter interface{ GetLabelSelector() map[string]string }

// matches reports whether a filter may and whether it must select an object.
func matches(f filter, o *object, labels map[string]string) (may, must bool) {
	may, must = o.lo < gone, o.hi < gone
	both := func(is bool) { may, must = may && is, must && is }
	if f, ok := f.(interface{ GetId() string }); ok {
		both(strings.HasPrefix(o.id, f.GetId()))
	}
	if f, ok := f.(interface{ GetPodSandboxId() string }); ok && o.pod != nil {
		both(strings.HasPrefix(o.pod.id, f.GetPodSandboxId()))
	}
	both(hasLabels(labels, f.GetLabelSelector()))
	want, filtered := wantedStage(f)
	if filtered {
		may, must = may && o.mayBe(want), must && o.lo == want && o.hi == want
	}
	return may, must
}

// unknown never occurs here: no monitor is lost.
const unknown stage = -1

func wantedStage(f filter) (stage, bool) {
	switch f := f.(type) {
	case *cri.PodSandboxFilter:
		return podStage(f.GetState().GetState()), f.GetState() != nil
	case *cri.ContainerFilter:
		if f.GetState().GetState() == cri.ContainerState_CONTAINER_UNKNOWN {
			return unknown, true
		}
		return containerStage(f.GetState().GetState()), f.GetState() != nil
	}
	return 0, false
}

// listed compares a list with what its filter selects in the model.
func listed(m *model, c *call) error {
	request := c.req.ProtoReflect()
	f, ok := request.Get(request.Descriptor().Fields().ByName("filter")).Message().Interface().(filter)
	if !ok {
		return fmt.Errorf("the filter is a %T", f)
	}
	ids := map[string]bool{}
	for _, reply := range c.replies {
		for _, id := range idsIn(reply.ProtoReflect()) {
			if ids[id] {
				return fmt.Errorf("it lists %s twice", id)
			}
			ids[id] = true
		}
	}
	all := m.pods
	if strings.Contains(c.rpc.name, "Container") {
		all = m.containers
	}
	for _, o := range all {
		labels := o.sandbox.GetConfig().GetLabels()
		if o.pod != nil {
			labels = o.container.GetConfig().GetLabels()
		}
		may, must := matches(f, o, labels)
		if _, old := m.before[o]; !old { // created during the listing
			must = false
		}
		if ids[o.id] && !may || !ids[o.id] && must {
			return fmt.Errorf("%s, from %v to %v, is listed: %v", o.what(), o.lo, o.hi, ids[o.id])
		}
		delete(ids, o.id)
	}
	for id := range ids {
		if !meets(c, "RunPodSandbox") && !meets(c, "CreateContainer") {
			return fmt.Errorf("it lists %s, which nobody has made", id)
		}
	}
	return nil
}

// idsIn returns the ids in a list, or in a part of one: each element has its
// own, or attributes that have.
func idsIn(reply protoreflect.Message) (ids []string) {
	items := reply.Get(reply.Descriptor().Fields().ByNumber(1)).List()
	for i := range items.Len() {
		item := items.Get(i).Message()
		if attributes := item.Descriptor().Fields().ByName("attributes"); attributes != nil {
			item = item.Get(attributes).Message()
		}
		ids = append(ids, item.Get(item.Descriptor().Fields().ByName("id")).String())
	}
	return ids
}

// hasImages checks a list of images.
func hasImages(m *model, c *call) error {
	req := c.req.(interface{ GetFilter() *cri.ImageFilter })
	ref := req.GetFilter().GetImage().GetImage()
	ids := map[string]bool{}
	for _, reply := range c.replies {
		for _, id := range idsIn(reply.ProtoReflect()) {
			ids[id] = true
		}
	}
	for _, p := range m.pictures {
		wanted := ref == "" || m.local(c, ref) == p
		if changing := meets(c, "PullImage") || meets(c, "RemoveImage"); !changing && ids[p.id] != (wanted && p.here) {
			return fmt.Errorf("image %v is listed: %v", p.refs, ids[p.id])
		}
	}
	return nil
}

func hasImageStatus(m *model, c *call) error {
	ref, found := c.req.(*cri.ImageStatusRequest).GetImage().GetImage(), c.replies[0].(*cri.ImageStatusResponse).GetImage()
	p := m.local(c, ref)
	changing := meets(c, "PullImage") || meets(c, "RemoveImage")
	switch {
	case found == nil && p != nil && !p.absent && !changing:
		return errors.New("the image is not found")
	case found != nil && (p == nil || found.Id != p.id || !p.here && !changing):
		return fmt.Errorf("image %s is found", found.Id)
	}
	return nil
}
