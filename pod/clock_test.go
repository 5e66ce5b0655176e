package pod

import (
	"testing"
	"time"
)

// Kubelets take the newest attempt for the current one.
func TestClockThatIsSetBack_kubernetes_83050_kubernetes_127948(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	e := b.engine()
	first := b.run(e, "a")
	one := b.start(e, first, "c")
	s, err := e.sandboxes.Find(first)
	if err != nil {
		t.Fatal(err)
	}
	c, err := e.containers.Find(one)
	if err != nil {
		t.Fatal(err)
	}
	then := time.Now().AddDate(1, 0, 0) // before the clock was set back
	s.plan.CreatedAt, c.plan.CreatedAt = then, then
	for _, err := range []error{s.Put(t.Context()), c.Put(t.Context())} {
		if err != nil {
			t.Fatal(err)
		}
	}
	b.close(e)
	e = b.engine()

	again := containerConfig("c")
	again.Metadata.Attempt = 1
	two, err := e.CreateContainer(t.Context(), first, again, nil)
	if err != nil {
		t.Fatal(err)
	}
	next := podConfig("a")
	next.Metadata.Attempt = 1
	second, err := e.RunSandbox(t.Context(), "", next)
	if err != nil {
		t.Fatal(err)
	}
	three := b.start(e, second, "c")
	other := b.start(e, second, "d")
	for _, what := range []string{"before a restart", "after it"} {
		created := func(id string) time.Time {
			v, err := e.Container(id)
			if err != nil {
				t.Fatal(err)
			}
			return v.CreatedAt
		}
		ofPod := func(id string) time.Time {
			v, err := e.Sandbox(id)
			if err != nil {
				t.Fatal(err)
			}
			return v.CreatedAt
		}
		now := time.Now()
		if !ofPod(second).After(ofPod(first)) || !created(two).After(created(one)) || !created(three).After(created(two)) {
			t.Errorf("%s: pods of %v and %v, containers of %v, %v and %v; want each after the one before",
				what, ofPod(first), ofPod(second), created(one), created(two), created(three))
		}
		// Kubelets never collect what is from the future.
		if ofPod(second).After(now) || created(three).After(now) || created(other).After(now) {
			t.Errorf("%s: a pod of %v, containers of %v and %v", what, ofPod(second), created(three), created(other))
		}
		b.close(e)
		e = b.engine()
	}
	b.removeAll(e)
}
