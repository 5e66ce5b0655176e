package main

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	crierrors "k8s.io/cri-api/pkg/errors"
)

// begin records the possible results of a turn, before any of its calls has
// been made.
func (m *model) begin(turn []*call) {
	for _, c := range turn {
		c.turn = turn
		if c.req == nil {
			continue
		}
		if c.rule.target != nil {
			c.target, c.how = c.rule.target(m, c.req)
		}
	}
	m.before = map[*object]object{}
	for _, o := range slices.Concat(m.pods, m.containers) {
		m.before[o] = *o
	}
}

// reach records how far a call may take its target.
func (m *model) reach(c *call) {
	if c.target == nil {
		return
	}
	m.raise(c.target, c.rule.to)
	if c.rule.to >= ended {
		m.disturb(c.target)
	}
	if c.rpc.name == "StartContainer" && (c.target.exit >= 0 || !c.target.plain) {
		c.target.volatile, c.target.hi = true, max(c.target.hi, ended)
	}
}

// after records how far the wanted calls may have come, from the state before
// the turn.
func (m *model) after(turn []*call, wanted func(*call) bool) {
	for o, was := range m.before {
		*o = was
	}
	for _, c := range turn {
		if wanted(c) {
			m.reach(c)
		}
	}
}

// effective reports whether a call may have an effect: a refused call has none,
// except for a failed start.
func effective(c *call) bool {
	return c.err == nil || late.has(status.Code(c.err)) || c.rpc.name == "StartContainer" && c.target != nil && !c.target.plain
}

func (m *model) disturb(o *object) {
	o.disturbed = true
	if o.pod == nil {
		for _, c := range m.members(o) {
			c.disturbed = true
		}
	}
}

// finish checks the answers of a turn and records what they mean.
func (m *model) finish(turn []*call) error {
	before := make([]picture, len(m.pictures))
	for i, p := range m.pictures {
		before[i] = *p
	}
	for _, c := range turn { // possible results while an image is added or removed
		switch req := c.req.(type) {
		case *cri.PullImageRequest:
			if p := m.picture(req.GetImage().GetImage()); p != nil {
				p.here = true
			}
		case *cri.RemoveImageRequest:
			if p := m.local(c, req.GetImage().GetImage()); p != nil {
				p.absent = true
			}
		}
	}
	for _, c := range turn {
		m.after(turn, func(other *call) bool { return other != c })
		if err := m.judge(c); err != nil {
			return err
		}
	}
	m.after(turn, effective)
	for i, p := range m.pictures {
		p.here, p.absent, p.tags = before[i].here, before[i].absent, before[i].tags
	}
	for _, takes := range []bool{false, true} { // calls that look at the objects first
		for _, c := range turn {
			if c.takes() != takes || c.err != nil || c.rule.done == nil || len(c.replies) == 0 && !c.rpc.streams {
				continue
			}
			if err := c.rule.done(m, c); err != nil {
				return fmt.Errorf("%s: %w", c, err)
			}
		}
	}
	for _, c := range turn {
		m.lingers(c)
	}
	for _, pod := range m.pods { // for a container that was created while its pod ended
		if pod.lo >= ended {
			m.settle(pod, pod.lo)
		}
	}
	return nil
}

// takes reports whether the call may remove what others of its turn have seen.
func (c *call) takes() bool { return c.rule.to > created || c.rpc.name == "RemoveImage" }

// largest is the size of the largest message that the server accepts
// (api.max_message_size).
const largest = 16 << 20

// judge compares the code of an answer with those that the model allows.
func (m *model) judge(c *call) error {
	code := status.Code(c.err)
	allowed := answer(codes.InvalidArgument) // for what cannot be decoded
	switch {
	case len(c.wire) > largest:
		allowed = answer(codes.ResourceExhausted)
	case c.req != nil:
		allowed = refusals
		if c.rule.allowed != nil {
			allowed = c.rule.allowed(m, c)
		}
		if !c.plain {
			allowed |= refusals
			if unfit(c.req.ProtoReflect()) && c.rpc.name != "Version" {
				allowed &^= fine
			}
		}
	}
	if code == codes.Unknown && byRuntime(c.err.Error()) && (!c.plain || c.target != nil && !c.target.plain) {
		return nil
	}
	if c.wait < patience || c.rpc.name == "ExecSync" && !c.plain {
		allowed |= late
	}
	if !allowed.has(code) {
		return fmt.Errorf("%s: %v, want %s (%s)", c, code, allowed, m.about(c))
	}
	return nil
}

// refusal matches the OCI runtime's own errors about a request. They have code
// Unknown, as in the kubelet's other runtimes: only the runtime's message says
// what they mean.
var refusal = regexp.MustCompile(`\b(runc|crun) (create|start|exec|update)( \(to run .*\))?: `)

func byRuntime(text string) bool { return refusal.MatchString(text) }

// about returns what the model knows about the object that a call names.
func (m *model) about(c *call) string {
	if c.target == nil {
		return "it names nothing that there is"
	}
	return fmt.Sprintf("%s was between %v and %v", c.target.what(), c.target.lo, c.target.hi)
}

// lingers records what continues after a call: a stop whose client did not
// wait, limits under which a container may die.
func (m *model) lingers(c *call) {
	o := c.target
	if o == nil || o.pod == nil {
		return
	}
	switch c.rpc.name {
	case "StopContainer":
		if late.has(status.Code(c.err)) {
			o.volatile = true
		}
	case "UpdateContainerResources":
		if !c.plain && c.err == nil {
			o.plain, o.volatile = false, true
		}
	}
}

// siblings reports whether the turn has other calls to the same RPC for which
// same returns true.
func siblings(c *call, same func(proto.Message) bool) bool {
	return slices.ContainsFunc(c.turn, func(other *call) bool {
		return other != c && other.req != nil && other.rpc == c.rpc && same(other.req)
	})
}

// mayTake returns the possible answers of a verb that creates something if its
// name is, or may be, taken by these objects; equal recognizes the object that
// it would create, which is returned until it has passed the stage until, and
// alike those that differ from it only in what may differ in a retry.
func mayTake(same []*object, equal, alike func(*object) bool, until stage) (a answers, free bool) {
	free = true
	for _, o := range same {
		free = free && o.hi == gone
		if alike(o) && o.lo <= until {
			a |= fine
		}
		if !equal(o) || o.hi > until {
			a |= answer(codes.AlreadyExists)
		}
	}
	return a, free
}

func samePod(req *cri.RunPodSandboxRequest) func(*object) bool {
	return func(o *object) bool {
		return proto.Equal(o.sandbox.GetConfig().GetMetadata(), req.GetConfig().GetMetadata())
	}
}

func equalPod(req *cri.RunPodSandboxRequest) func(*object) bool {
	return func(o *object) bool { return proto.Equal(o.sandbox, req) }
}

// alikePod ignores labels and annotations: network plugins annotate a pod while
// they attach it, and the kubelet's retry has these annotations.
func alikePod(req *cri.RunPodSandboxRequest) func(*object) bool {
	bare := func(req *cri.RunPodSandboxRequest) *cri.RunPodSandboxRequest {
		req = proto.CloneOf(req)
		if config := req.GetConfig(); config != nil {
			config.Labels, config.Annotations = nil, nil
		}
		return req
	}
	return func(o *object) bool { return proto.Equal(bare(o.sandbox), bare(req)) }
}

func mayRun(m *model, c *call) answers {
	req := c.req.(*cri.RunPodSandboxRequest)
	a, free := mayTake(taken(m.pods, samePod(req)), equalPod(req), alikePod(req), running)
	if free {
		a |= fine
	}
	if siblings(c, func(other proto.Message) bool {
		return proto.Equal(other.(*cri.RunPodSandboxRequest).GetConfig().GetMetadata(), req.GetConfig().GetMetadata())
	}) {
		a |= fine | answer(codes.AlreadyExists)
	}
	return a
}

func hasRun(m *model, c *call) error {
	req, id := c.req.(*cri.RunPodSandboxRequest), c.replies[0].(*cri.RunPodSandboxResponse).PodSandboxId
	same := taken(m.pods, samePod(req))
	if old := m.byID(id); old != nil {
		if !slices.Contains(same, old) || old.lo > running {
			return fmt.Errorf("it answers with %s, which is %v and was made by %v", old.what(), old.lo, old.sandbox)
		}
		return nil
	}
	for _, o := range same {
		if o.hi < gone {
			return fmt.Errorf("it makes %s a second time, as %s", o.what(), id)
		}
	}
	m.pods = append(m.pods, &object{id: id, lo: running, hi: running, plain: c.plain, exit: -1, sandbox: req})
	return nil
}

func sameContainer(req *cri.CreateContainerRequest) func(*object) bool {
	return func(o *object) bool {
		return proto.Equal(o.container.GetConfig().GetMetadata(), req.GetConfig().GetMetadata())
	}
}

func equalContainer(req *cri.CreateContainerRequest) func(*object) bool {
	return func(o *object) bool { return proto.Equal(o.container.GetConfig(), req.GetConfig()) }
}

func mayCreate(m *model, c *call) answers {
	req := c.req.(*cri.CreateContainerRequest)
	var inPod []*object
	if c.target != nil {
		inPod = m.members(c.target)
	}
	equal := equalContainer(req)
	up, free := mayTake(taken(inPod, sameContainer(req)), equal, equal, created)
	if siblings(c, func(other proto.Message) bool {
		return proto.Equal(other.(*cri.CreateContainerRequest).GetConfig().GetMetadata(), req.GetConfig().GetMetadata())
	}) {
		free = true
		up |= answer(codes.AlreadyExists)
	}
	if p := m.local(c, req.GetConfig().GetImage().GetImage()); free {
		if p != nil && p.here {
			up |= fine
		}
		if p == nil || p.absent {
			up |= unfound
		}
		if meets(c, "PullImage") || meets(c, "RemoveImage") {
			up |= fine | unfound
		}
	}
	a := life{running: up, created: up, ended: untimely, gone: unfound}.of(c.target, c.how)
	if c.target != nil && !c.target.plain {
		a |= refusals
	}
	return a
}

func hasCreated(m *model, c *call) error {
	req, id := c.req.(*cri.CreateContainerRequest), c.replies[0].(*cri.CreateContainerResponse).ContainerId
	same := taken(m.members(c.target), sameContainer(req))
	if old := m.byID(id); old != nil {
		if !slices.Contains(same, old) || old.lo > created {
			return fmt.Errorf("it answers with %s, which is %v and was made by %v", old.what(), old.lo, old.container)
		}
		return nil
	}
	for _, o := range same {
		if o.hi < gone {
			return fmt.Errorf("it makes %s a second time, as %s", o.what(), id)
		}
	}
	o := &object{id: id, pod: c.target, plain: c.plain && c.target.plain, exit: -1, container: req}
	if !o.plain {
		o.volatile = true // it may even be dead before it is started
		o.hi = ended
	}
	if c.target.hi >= ended {
		o.hi, o.disturbed = c.target.hi, true
	}
	if args := req.GetConfig().GetArgs(); len(args) == 2 && args[0] == "exit" {
		_, _ = fmt.Sscan(args[1], &o.exit)
	}
	m.containers = append(m.containers, o)
	return nil
}

func mayStart(_ *model, c *call) answers {
	a := startable.of(c.target, c.how)
	if c.target != nil && !c.target.plain {
		a |= refusals
	}
	return a
}

func hasStarted(m *model, c *call) error {
	m.settle(c.target, running)
	return nil
}

// known are the reasons that the kubelet recognizes only in errors of code
// Unknown.
var known = []error{crierrors.ErrRegistryUnavailable, crierrors.ErrSignatureValidationFailed}

func mayPull(_ *model, c *call) answers {
	a := fine
	if !c.plain && c.unreached() {
		a |= answer(codes.Unknown)
	}
	return a
}

// unreached reports whether the call has failed for one of the known reasons.
func (c *call) unreached() bool {
	text := status.Convert(c.err).Message()
	return slices.ContainsFunc(known, func(reason error) bool { return strings.HasPrefix(text, reason.Error()+": ") })
}

func hasNoProfiles(_ *model, c *call) error {
	if list := c.replies[0].(*cri.ListSecurityProfilesResponse).GetProfiles(); len(list) > 0 {
		return fmt.Errorf("it lists %v", list)
	}
	return nil
}

func hasPulled(m *model, c *call) error {
	ref := c.req.(*cri.PullImageRequest).GetImage().GetImage()
	p, id := m.picture(ref), c.replies[0].(*cri.PullImageResponse).ImageRef
	if p == nil || p.id != id {
		return fmt.Errorf("it answers with image %s", id)
	}
	p.here = true
	if !meets(c, "RemoveImage") {
		p.absent = false
		p.tags = append(p.tags, ref)
	}
	return nil
}

// mayRemoveImage: an image that a container uses stays. Containers whose configuration is unknown
// may have any image, also as a volume.
func mayRemoveImage(m *model, c *call) answers {
	a := fine
	if meets(c, "CreateContainer") {
		a |= untimely
	}
	p := m.local(c, c.req.(*cri.RemoveImageRequest).GetImage().GetImage())
	for _, o := range live(m.containers) {
		switch {
		case !o.plain:
			a |= untimely
		case p == nil || m.picture(o.container.GetConfig().GetImage().GetImage()) != p:
		case o.hi < gone && len(c.turn) == 1:
			return untimely
		default:
			a |= untimely
		}
	}
	return a
}

func hasRemovedImage(m *model, c *call) error {
	if p := m.local(c, c.req.(*cri.RemoveImageRequest).GetImage().GetImage()); p != nil {
		p.absent, p.tags = true, nil
		if !meets(c, "PullImage") {
			p.here = false
		}
	}
	return nil
}

// meets reports whether an RPC of the name is under way at the same time.
func meets(c *call, name string) bool {
	return slices.ContainsFunc(c.turn, func(other *call) bool { return other.rpc.name == name })
}
