package network

import (
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
)

// Whatever pods come, go and die, and whenever the server does: the rules are
// those of a server that starts with only the records. Ports are few, so that
// several pods want the same. FULL=1 takes a thousand steps.
func TestRulesFollowTheRecords_crio_2342(t *testing.T) {
	t.Parallel()
	steps := 40
	if os.Getenv("FULL") != "" {
		steps = 1000
	}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	n := newNode(t, map[string]string{"10-pods.conflist": plainConf(range4)})
	n.world()
	pods, live := map[string]Pod{}, map[string]*Attachment{}
	pick := func() string {
		ids := slices.Sorted(maps.Keys(live))
		return ids[random.IntN(len(ids))]
	}
	add := func() {
		p := n.pod()
		protocol := []cri.Protocol{cri.Protocol_TCP, cri.Protocol_UDP}[random.IntN(2)]
		p.PortMappings = []*cri.PortMapping{mapping(protocol, 8000+int32(random.IntN(20)), 80, "")}
		plan := n.plan(p)
		a, err := n.tryAttach(p, plan)
		if errors.Is(err, fault.Precondition) { // another pod's port, for which no rule is left
			n.detach(p, plan)
			return
		}
		if err == nil {
			a = recorded(t, a)
			err = n.do(func() error { return n.Expose(context.Background(), p, a) })
		}
		if err != nil {
			t.Fatal(err)
		}
		pods[p.ID], live[p.ID] = p, a
	}
	remove := func(id string) {
		n.detach(pods[id], live[id])
		delete(live, id)
	}
	for step := range steps {
		did := "add"
		switch choice := random.IntN(6); {
		case choice == 0 && len(live) > 0:
			did = "remove"
			remove(pick())
		case choice == 1 && len(live) > 0:
			did = "remove, the server killed before the record went"
			id := pick()
			a := live[id]
			remove(id)
			n.recover(live)
			n.detach(pods[id], a) // which is repeated
		case choice == 2:
			did = "crash"
			n.recover(live)
		case choice == 3 && len(live) > 0:
			did = "reboot of one pod: its record is there, it is not live"
			id := pick()
			a := live[id]
			delete(live, id)
			n.recover(live)
			n.detach(pods[id], a)
		case len(live) < 12:
			add()
		default:
			did = "remove"
			remove(pick())
		}
		got := sorted(n.ruleset())
		n.run(n.host.Net, "nft flush ruleset")
		n.recover(live)
		if want := sorted(n.ruleset()); got != want {
			t.Fatalf("step %d, %s: rules\n%s\nof the records follow\n%s", step, did, got, want)
		}
	}
	for _, id := range slices.Sorted(maps.Keys(live)) {
		remove(id)
	}
	if left := n.ruleset(); left != "" {
		t.Errorf("left\n%s", left)
	}
}
