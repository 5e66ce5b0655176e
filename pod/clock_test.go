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
	then := time.Now().Add(time.Hour) // before the clock was set back
	s.plan.CreatedAt, c.plan.CreatedAt = then, then

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

	created := func(id string) time.Time {
		v, err := e.Container(id)
		if err != nil {
			t.Fatal(err)
		}
		return v.CreatedAt
	}
	pod, err := e.Sandbox(second)
	if err != nil {
		t.Fatal(err)
	}
	if !pod.CreatedAt.After(then) || !created(two).After(then) || !created(three).After(created(two)) {
		t.Errorf("pod of %v, containers of %v and %v; want them after %v, in this order", pod.CreatedAt, created(two), created(three), then)
	}
	if created(other).After(time.Now()) {
		t.Errorf("a container of another name is of %v", created(other))
	}
	b.removeAll(e)
}
