//go:build kubelet

package kubelet

import (
	"testing"
)

// One container has a probe of each kind, whose answers are files that the test
// makes and removes.
func TestProbes(t *testing.T) {
	each(t, func(t *testing.T, k *machine) {
		p := k.run(t, `
  terminationGracePeriodSeconds: 1
  containers:
  - name: web
    image: registry.test/probe
    args: [write, /tmp/alive, "", ;, serve, ":8080", hello]
    startupProbe: {exec: {command: [/probe, open, /tmp/started, r]}, periodSeconds: 1, failureThreshold: 1000}
    readinessProbe: {httpGet: {port: 8080, path: "/exists?file=/tmp/ready"}, periodSeconds: 1, failureThreshold: 1}
    livenessProbe: {grpc: {port: 8080, service: /tmp/alive}, periodSeconds: 1, failureThreshold: 2, timeoutSeconds: 30}
  - name: open
    image: registry.test/probe
    args: [tcp, ":8081", echo, ;, sleep]
    livenessProbe: {tcpSocket: {port: 8081}, periodSeconds: 1, failureThreshold: 3, timeoutSeconds: 30, initialDelaySeconds: 5}
  - name: closed
    image: registry.test/probe
    args: [sleep]
    livenessProbe: {tcpSocket: {port: 8082}, periodSeconds: 1, failureThreshold: 1}
`)
		is := func(name string, want func(containerStatus) bool) func(*podStatus) bool {
			return func(s *podStatus) bool { return want(s.of(name)) }
		}
		p.await(t, "web to run", is("web", func(c containerStatus) bool { return c.State.Running != nil }))
		p.await(t, "closed to be restarted", is("closed", func(c containerStatus) bool { return c.RestartCount > 0 }))
		s := p.await(t, "open to be ready", is("open", func(c containerStatus) bool { return c.Ready }))
		if web := s.of("web"); web.Started == nil || *web.Started || web.Ready || web.RestartCount > 0 {
			t.Errorf("before its startup probe succeeds web is %+v", web)
		}
		p.do(t, "web", "/probe write /tmp/started yes")
		s = p.await(t, "web to have started", is("web", func(c containerStatus) bool { return c.Started != nil && *c.Started }))
		equal(t, "web is ready", s.of("web").Ready, false)
		p.do(t, "web", "/probe write /tmp/ready yes")
		p.await(t, "web to be ready", is("web", func(c containerStatus) bool { return c.Ready }))
		p.do(t, "web", "/probe remove /tmp/ready")
		s = p.await(t, "web not to be ready", is("web", func(c containerStatus) bool { return !c.Ready }))
		equal(t, "restarts of web before its liveness probe fails", s.of("web").RestartCount, 0)
		p.do(t, "web", "/probe remove /tmp/alive")
		s = p.await(t, "web to be restarted", is("web", func(c containerStatus) bool { return c.RestartCount > 0 }))
		equal(t, "restarts of open", s.of("open").RestartCount, 0)
	})
}

// A command that exceeds its probe's time limit is ended, and later probes run
// nevertheless.
func TestExecProbeThatHangs(t *testing.T) {
	each(t, func(t *testing.T, k *machine) {
		p := k.run(t, `
  terminationGracePeriodSeconds: 1
  containers:
  - name: main
    image: registry.test/probe
    args: [sleep]
    livenessProbe: {exec: {command: [/probe, sleep]}, periodSeconds: 1, failureThreshold: 2, timeoutSeconds: 1}
`)
		s := p.await(t, "the container to be restarted", func(s *podStatus) bool { return s.of("main").RestartCount > 0 })
		if last := s.of("main").LastState.Terminated; last == nil || last.ExitCode != 128+15 {
			t.Errorf("the container ended as %+v", last)
		}
	})
}
