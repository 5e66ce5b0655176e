//go:build kubelet

package kubelet

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/url"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/crius-run/crius/test/kit/wait"
)

// steady is a pod that no restart of anything may affect.
const steady = `
  terminationGracePeriodSeconds: 1
  containers:
  - name: main
    image: registry.test/probe
    args: [lines, "1000000", 100ms]
    livenessProbe: {exec: {command: [/probe, echo, alive]}, periodSeconds: 1, timeoutSeconds: 60}
    readinessProbe: {tcpSocket: {port: 8080}, periodSeconds: 1, timeoutSeconds: 60}
  - {name: web, image: registry.test/probe, args: [serve, ":8080", hello]}
`

// Whatever is stopped, killed and restarted beside it, a pod runs on with the
// same containers, a log without a gap, and an API that answers.
func TestPodsOutliveRestarts(t *testing.T) {
	eachPrivate(t, nil, func(t *testing.T, k *machine) {
		p := k.run(t, steady)
		before := p.ready(t)
		for _, step := range []struct {
			name    string
			restart func() error
		}{
			{"crius is restarted", func() error { return k.Restart(t.Context()) }},
			{"crius is killed", func() error { return k.Crash(t.Context()) }},
			{"the kubelet is restarted", func() error { return k.restartKubelet(t, syscall.SIGTERM) }},
			{"the kubelet is killed", func() error { return k.restartKubelet(t, syscall.SIGKILL) }},
			{"both are killed", func() error {
				if err := k.Kill(); err != nil {
					return err
				}
				if err := k.endKubelet(syscall.SIGKILL); err != nil {
					return err
				}
				if err := k.Start(t.Context()); err != nil {
					return err
				}
				return k.startKubelet(t.Context())
			}},
		} {
			if err := step.restart(); err != nil {
				t.Fatalf("%s: %v", step.name, err)
			}
			fresh := k.run(t, steady+"  # when "+step.name+"\n")
			fresh.ready(t)
			after := p.ready(t)
			for _, name := range []string{"main", "web"} {
				equal(t, name+" after "+step.name, after.of(name).ContainerID, before.of(name).ContainerID)
				equal(t, "restarts of "+name+" after "+step.name, after.of(name).RestartCount, 0)
			}
			equal(t, "address after "+step.name, after.PodIP, before.PodIP)
			if out := p.do(t, "main", "/probe echo hello"); out != "hello\n" {
				t.Errorf("a command after %s prints %q", step.name, out)
			}
			fresh.end(t)
		}
		p.withoutGap(t)
	})
}

func (k *machine) restartKubelet(t *testing.T, signal syscall.Signal) error {
	if err := k.endKubelet(signal); err != nil {
		return err
	}
	return k.startKubelet(t.Context())
}

// withoutGap checks that the container has continued to write, and that no line
// is missing in the rest of its log.
func (p *pod) withoutGap(t *testing.T) {
	t.Helper()
	seen := len(p.logs(t, "main", nil))
	wait.For(t, "the container to write on", func() bool { return len(p.logs(t, "main", nil)) != seen })
	var last int
	for line := range strings.Lines(p.logs(t, "main", url.Values{"tailLines": {"100"}})) {
		var n int
		if _, err := fmt.Sscanf(line, "line %d\n", &n); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		if last != 0 && n != last+1 {
			t.Errorf("line %d comes after line %d", n, last)
		}
		last = n
	}
}

// crius is killed again and again while pods come and go. The kubelet repeats
// what has failed, all pods become ready once, and nothing is left of any.
func TestPodsComeAndGoWhileCriusIsKilled(t *testing.T) {
	eachPrivate(t, nil, func(t *testing.T, k *machine) {
		stop, stopped := make(chan struct{}), make(chan error, 1)
		var wg sync.WaitGroup
		wg.Go(func() { stopped <- k.killAgainAndAgain(t.Context(), stop) })
		defer func() {
			close(stop)
			wg.Wait()
			if err := <-stopped; err != nil {
				t.Error(err)
			}
		}()
		for round := range 3 {
			var pods []*pod
			for i := range 4 {
				pods = append(pods, k.run(t, fmt.Sprintf(`
  terminationGracePeriodSeconds: 1
  initContainers: [{name: first, image: registry.test/probe, args: [echo, "%d %d"]}]
  containers:
  - {name: main, image: registry.test/probe, args: [lines, "3", ;, sleep]}
  - {name: web, image: registry.test/probe, args: [serve, ":8080", hello], readinessProbe: {httpGet: {port: 8080}, periodSeconds: 1}}
`, round, i)))
			}
			for _, p := range pods {
				p.ready(t)
			}
			for _, p := range pods {
				p.says(t, "main", "line 3")
			}
			for _, p := range pods {
				p.end(t)
			}
		}
	})
}

// killAgainAndAgain kills and restarts crius at random moments until stop is
// closed.
func (k *machine) killAgainAndAgain(ctx context.Context, stop <-chan struct{}) error {
	for {
		select {
		case <-stop:
			return nil
		case <-time.After(time.Duration(rand.Int64N(int64(4 * time.Second)))):
		}
		if err := k.Crash(ctx); err != nil {
			return err
		}
	}
}
