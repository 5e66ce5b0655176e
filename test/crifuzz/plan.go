package main

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/scene"
)

// call is an RPC with its result.
type call struct {
	rpc  *rpc
	rule rule
	api  string // v1 or v1alpha2
	conn int    // of the sequence's clients
	wire raw
	req  proto.Message // as the server decodes it; nil: it cannot
	// plain: it is what a kubelet would send.
	plain bool
	// wait is how long the client waits for an answer.
	wait time.Duration

	target *object
	how    address
	turn   []*call // all concurrent calls

	replies []proto.Message
	err     error
}

// String returns the call in one short line.
func (c *call) String() string {
	text := "what cannot be decoded"
	if c.req != nil {
		text = strings.Join(strings.Fields(fmt.Sprint(c.req)), " ")
	}
	const most = 600
	if len(text) > most {
		text = text[:most] + " ..."
	}
	if c.err != nil {
		return fmt.Sprintf("%s.%s(%s) = %.300v", c.api, c.rpc.name, text, c.err)
	}
	return fmt.Sprintf("%s.%s(%s)", c.api, c.rpc.name, text)
}

// Populations that are large enough for every case, and small enough for
// objects to be used again.
const (
	mostPods       = 4
	mostContainers = 7
)

// clients is the number of connections of a sequence.
const clients = 3

// planner chooses the calls of a turn. Its choice depends on the seed, the
// number of the turn and the existing objects, and not on their progress, which
// depends on timing.
type planner struct {
	*rand.Rand
	model   *model
	surface []*rpc
	rules   map[string]rule
	gen     *generator
	logs    string

	turn    int
	made    int     // names in this turn
	request *rpc    // the RPC for which a request is planned
	focus   *object // the pod of the turn; nil: all
	meeting bool    // several calls run concurrently
}

// calls returns those of a turn: one, or some concurrent ones.
func (p *planner) calls(seed uint64, turn int) []*call {
	p.Rand = rand.New(rand.NewPCG(seed, uint64(turn)))
	p.turn, p.made, p.focus, p.meeting = turn, 0, nil, p.IntN(4) == 0
	p.gen.Rand, p.gen.words = p.Rand, p.words()
	if !p.meeting {
		one := p.call()
		if one.rule.to == created && one.rpc.name != "RunPodSandbox" && one.rpc.name != "CreateContainer" || p.IntN(10) > 0 {
			return []*call{one}
		}
		again := *one // like a kubelet that has stopped waiting
		one.wait = time.Duration(p.IntN(40)) * time.Millisecond
		return []*call{one, &again}
	}
	if pods := live(p.model.pods); len(pods) > 0 {
		p.focus = pods[p.IntN(len(pods))]
	}
	var all []*call
	for range 2 + p.IntN(4) {
		all = append(all, p.call())
	}
	return all
}

// call returns one call, in every third case with something malformed.
func (p *planner) call() *call {
	c := &call{rpc: p.choose(), api: "v1", conn: p.IntN(clients), plain: true, wait: patience}
	c.rule = p.rules[c.rpc.name]
	if p.IntN(4) == 0 {
		c.api = "v1alpha2"
	}
	req := c.rpc.new()
	p.request = c.rpc
	if c.rule.plain != nil {
		req = c.rule.plain(p)
	}
	cut := false
	switch p.IntN(12) {
	case 0, 1, 2:
		c.plain = false
		for range 1 + p.IntN(2) {
			p.gen.mutate(req)
		}
	case 3:
		c.plain = false
		req = c.rpc.new()
		p.gen.fill(req.ProtoReflect(), p.Float64())
	case 4:
		cut = p.IntN(3) == 0
	}
	wire, err := encode(req)
	if err != nil {
		panic(fmt.Sprintf("%s: %v", c.rpc.name, err)) // the generator has made something that cannot be sent
	}
	if cut && len(wire) > 0 {
		c.plain = false
		wire = wire[:p.IntN(len(wire))]
	}
	c.wire, c.req = wire, c.rpc.new()
	if proto.Unmarshal(wire, c.req) != nil {
		c.req = nil
	}
	if c.rpc.name == "StopContainer" && !c.plain {
		c.wait = 3 * time.Second // because the grace period may be ages
	}
	return c
}

// choose picks an RPC by its weight, and keeps the population within its
// bounds.
func (p *planner) choose() *rpc {
	sum := 0
	weight := func(r *rpc) int { return max(p.rules[r.name].weight, 1) }
	for _, r := range p.surface {
		sum += weight(r)
	}
	n := p.IntN(sum)
	i := slices.IndexFunc(p.surface, func(r *rpc) bool { n -= weight(r); return n < 0 })
	chosen := p.surface[i]
	switch few := p.IntN(2) == 0; {
	case few && len(live(p.model.pods)) == 0:
		return p.rpc("RunPodSandbox")
	case few && len(live(p.model.containers)) < 2:
		return p.rpc("CreateContainer")
	case chosen.name == "RunPodSandbox" && len(live(p.model.pods)) >= mostPods:
		return p.rpc("RemovePodSandbox")
	case chosen.name == "CreateContainer" && len(live(p.model.containers)) >= mostContainers:
		return p.rpc("RemoveContainer")
	}
	return chosen
}

func (p *planner) rpc(name string) *rpc {
	return p.surface[slices.IndexFunc(p.surface, func(r *rpc) bool { return r.name == name })]
}

// words returns the texts with a meaning on this node.
func (p *planner) words() []string {
	words := slices.Clone(scene.Handlers)
	for _, o := range slices.Concat(p.model.pods, p.model.containers) {
		words = append(words, o.id)
	}
	for _, picture := range p.model.pictures {
		words = append(append(words, picture.refs...), picture.id)
	}
	return words
}

// fresh returns an unused name.
func (p *planner) fresh(kind string) string {
	p.made++
	return fmt.Sprintf("%s-%d-%d", kind, p.turn, p.made)
}

// shade returns a label that some objects have in common.
func (p *planner) shade() string { return []string{"red", "green"}[p.IntN(2)] }

func (p *planner) pods() []*object {
	if p.focus != nil {
		return []*object{p.focus}
	}
	return live(p.model.pods)
}

func (p *planner) containers() []*object {
	if p.focus != nil {
		return live(p.model.members(p.focus))
	}
	return live(p.model.containers)
}

// again returns one of the latest objects, in every sixth case.
func (p *planner) again(all []*object) *object {
	if p.IntN(6) > 0 || len(all) == 0 {
		return nil
	}
	all = all[max(0, len(all)-5):]
	return all[p.IntN(len(all))]
}

// name returns an id: mostly that of one of these, sometimes a prefix of one,
// or an unused one.
func (p *planner) name(all []*object) string {
	n := p.IntN(20)
	if len(all) == 0 || n == 0 {
		return strings.Repeat(fmt.Sprintf("%x", p.IntN(16)), 64)
	}
	id := all[p.IntN(len(all))].id
	switch {
	case p.meeting:
	case n == 1:
		return id[:12]
	case n == 2:
		return id[:1]
	case n == 3:
		return "no-id"
	}
	return id
}

// image returns a reference to an image in the registry.
func (p *planner) image() *cri.ImageSpec {
	picture := p.model.pictures[p.IntN(len(p.model.pictures))]
	ref := picture.refs[p.IntN(len(picture.refs))]
	return &cri.ImageSpec{Image: ref, UserSpecifiedImage: ref}
}

// recast returns a request of r with the fields that it shares with from.
func recast(r *rpc, from proto.Message) proto.Message {
	to := r.new()
	text, err := protojson.Marshal(from)
	if err == nil {
		err = protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(text, to)
	}
	if err != nil {
		panic(fmt.Sprintf("%s: %v", r.name, err)) // one of our own requests has become impossible
	}
	return to
}

// hasLabels reports whether labels have all that are wanted.
func hasLabels(labels, want map[string]string) bool {
	for key := range maps.Keys(want) {
		if value, ok := labels[key]; !ok || value != want[key] {
			return false
		}
	}
	return true
}
