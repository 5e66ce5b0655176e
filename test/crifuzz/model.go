package main

import (
	"fmt"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// stage is how far the life of a pod or a container has come. It only goes
// forward, which makes concurrent calls easy to check: an object is between the
// earliest and the latest stage in which it can be.
type stage int

const (
	created stage = iota // a container that has not been started
	running              // or a pod that is ready
	ended
	gone
)

func (s stage) String() string { return []string{"created", "running", "ended", "gone"}[s] }

// object is a pod or a container.
type object struct {
	id     string
	pod    *object // that contains the container; nil: this is a pod
	lo, hi stage
	// plain: it was requested as by a kubelet, so that it behaves as its request
	// says.
	plain bool
	// volatile: it may end by itself.
	volatile bool
	// exit is the code with which the program ends; -1: only if it is ended.
	exit int32
	// disturbed: it, or its pod, was stopped or removed.
	disturbed bool

	sandbox   *cri.RunPodSandboxRequest   // of a pod
	container *cri.CreateContainerRequest // of a container
}

// what returns the object's name in a message.
func (o *object) what() string {
	kind := "pod"
	if o.pod != nil {
		kind = "container"
	}
	return fmt.Sprintf("%s %.12s", kind, o.id)
}

func (o *object) mayBe(s stage) bool { return o.lo <= s && s <= o.hi }

// picture is an image in the registry.
type picture struct {
	id     string
	refs   []string
	tags   []string // its references on the node
	here   bool     // it may be on the node
	absent bool     // it may be absent
}

// model is the expected state.
type model struct {
	pods, containers []*object
	pictures         []*picture
	before           map[*object]object // objects before the turn
}

// live returns the objects that may still exist, in order of creation.
func live(all []*object) []*object {
	return slices.DeleteFunc(slices.Clone(all), func(o *object) bool { return o.lo == gone })
}

// members returns the containers of a pod.
func (m *model) members(pod *object) []*object {
	return slices.DeleteFunc(slices.Clone(m.containers), func(o *object) bool { return o.pod != pod })
}

func (m *model) byID(id string) *object {
	for _, o := range slices.Concat(m.pods, m.containers) {
		if o.id == id {
			return o
		}
	}
	return nil
}

// address is the kind of an id in a request.
type address int

const (
	one     address = iota
	none            // an id without an object
	several         // a prefix of several
	missing         // empty
)

// resolve finds the object with an id, or with a prefix of one.
func resolve(all []*object, id string) (*object, address) {
	if id == "" {
		return nil, missing
	}
	var found []*object
	for _, o := range all {
		if o.id == id {
			return o, one
		}
		if o.lo < gone && strings.HasPrefix(o.id, id) {
			found = append(found, o)
		}
	}
	switch len(found) {
	case 0:
		return nil, none
	case 1:
		return found[0], one
	default:
		return nil, several
	}
}

// raise records that the object may come as far as s.
func (m *model) raise(o *object, s stage) {
	o.hi = max(o.hi, s)
	if o.pod != nil {
		return
	}
	for _, c := range m.members(o) {
		if s >= ended {
			c.hi, c.disturbed = max(c.hi, s), true
		}
	}
}

// settle records that the object has come as far as s.
func (m *model) settle(o *object, s stage) {
	o.lo, o.hi = max(o.lo, s), max(o.hi, s)
	if o.pod != nil || s < ended {
		return
	}
	for _, c := range m.members(o) {
		m.settle(c, s)
	}
}

// picture finds an image by one of its names or its id.
func (m *model) picture(ref string) *picture {
	for _, p := range m.pictures {
		if slices.Contains(p.refs, ref) || p.id == strings.TrimPrefix(ref, "sha256:") {
			return p
		}
	}
	return nil
}

// local finds an image of the node, or one that may be there during the turn of
// c.
func (m *model) local(c *call, ref string) *picture {
	p := m.picture(ref)
	if p == nil || !slices.Contains(p.refs, ref) || slices.Contains(p.tags, ref) || meets(c, "PullImage") {
		return p
	}
	return nil
}

// answers is a set of codes.
type answers uint32

func answer(all ...codes.Code) (a answers) {
	for _, code := range all {
		a |= 1 << code
	}
	return a
}

func (a answers) has(code codes.Code) bool { return a&(1<<code) != 0 }

func (a answers) String() string {
	var names []string
	for code := codes.OK; code <= codes.Unauthenticated; code++ {
		if a.has(code) {
			names = append(names, code.String())
		}
	}
	return strings.Join(names, " or ")
}

var (
	fine = answer(codes.OK)
	// refusals are the permitted ways to refuse what a kubelet would not request.
	// Unknown and Internal are not among them: they mean an unclassified error or
	// a bug.
	refusals = answer(codes.InvalidArgument, codes.NotFound, codes.FailedPrecondition, codes.Unimplemented)
	// late are the codes from a client that stops waiting.
	late = answer(codes.DeadlineExceeded, codes.Canceled)
)

// life has the answers of a verb in each stage.
type life [gone + 1]answers

// of returns the possible answers of the verb about an object between its
// stages; how is how it was named.
func (l life) of(o *object, how address) (a answers) {
	switch how {
	case missing, several:
		return answer(codes.InvalidArgument)
	case none:
		return l[gone]
	}
	for s := o.lo; s <= o.hi; s++ {
		a |= l[s]
	}
	return a
}

var (
	unfound   = answer(codes.NotFound)
	untimely  = answer(codes.FailedPrecondition)
	always    = life{fine, fine, fine, fine}
	readable  = life{fine, fine, fine, unfound}
	startable = life{fine, untimely, untimely, unfound}
	whileUp   = life{untimely, fine, untimely, unfound}
	tunable   = life{fine, fine, untimely, unfound}
)
