//go:build kubelet

package kubelet

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crius-run/crius/test/kit/wait"
)

func TestLifecycleHooks(t *testing.T) {
	each(t, func(t *testing.T, k *machine) {
		dir := k.Dir(t)
		p := k.run(t, `
  terminationGracePeriodSeconds: 100
  volumes: [{name: diary, hostPath: {path: `+dir+`}}]
  containers:
  - name: main
    image: registry.test/probe
    args: [note, /diary/main, begins, ;, trap, TERM, ;, note, /diary/main, ends]
    volumeMounts: [{name: diary, mountPath: /diary}]
    lifecycle:
      postStart: {exec: {command: [/probe, await, /diary/main, ;, note, /diary/main, post-start]}}
      preStop: {exec: {command: [/probe, note, /diary/main, pre-stop]}}
  - name: web
    image: registry.test/probe
    args: [serve, ":8080", hello]
    lifecycle:
      postStart: {sleep: {seconds: 1}}
      preStop: {httpGet: {port: 8080, path: "/get?url=http://127.0.0.1:8081/bye"}}
  - name: heard
    image: registry.test/probe
    args: [serve, ":8081", bye]
    lifecycle: {preStop: {sleep: {seconds: 3}}}
`)
		p.ready(t)
		sameLines(t, "the diary", read(t, dir, "main"), "begins", "post-start")
		p.end(t)
		sameLines(t, "the diary at the end", read(t, dir, "main"), "begins", "post-start", "pre-stop", "ends")
	})
}

// After a failed hook the container is killed and restarted.
func TestPostStartHookThatFails(t *testing.T) {
	each(t, func(t *testing.T, k *machine) {
		dir := k.Dir(t)
		p := k.run(t, `
  terminationGracePeriodSeconds: 1
  volumes: [{name: diary, hostPath: {path: `+dir+`}}]
  containers:
  - name: main
    image: registry.test/probe
    args: [note, /diary/main, begins, ;, sleep]
    volumeMounts: [{name: diary, mountPath: /diary}]
    lifecycle: {postStart: {exec: {command: [/probe, open, /diary/repaired, r]}}}
`)
		p.await(t, "the container to be started again", func(*podStatus) bool { return strings.Count(read(t, dir, "main"), "\n") > 1 })
		if err := os.WriteFile(filepath.Join(dir, "repaired"), nil, 0o644); err != nil {
			t.Fatal(err)
		}
		p.ready(t)
	})
}

func TestInitAndSidecarContainers(t *testing.T) {
	each(t, func(t *testing.T, k *machine) {
		dir := k.Dir(t)
		p := k.run(t, `
  restartPolicy: Never
  volumes: [{name: diary, hostPath: {path: `+dir+`}}, {name: shared, emptyDir: {}}]
  initContainers:
  - name: first
    image: registry.test/probe
    args: [note, /diary/all, first, ;, write, /shared/file, shared]
    volumeMounts: [{name: diary, mountPath: /diary}, {name: shared, mountPath: /shared}]
  - name: sidecar
    image: registry.test/probe
    restartPolicy: Always
    args: [note, /diary/all, sidecar, ;, tcp, ":8080", echo, ;, trap, TERM, ;, note, /diary/all, sidecar, ends]
    startupProbe: {tcpSocket: {port: 8080}, periodSeconds: 1, failureThreshold: 1000}
    volumeMounts: [{name: diary, mountPath: /diary}]
  - name: second
    image: registry.test/probe
    args: [note, /diary/all, second]
    volumeMounts: [{name: diary, mountPath: /diary}]
  containers:
  - name: main
    image: registry.test/probe
    args: [note, /diary/all, main, ;, cat, /shared/file, ;, await, /diary/enough, ;, note, /diary/all, main, ends]
    volumeMounts: [{name: diary, mountPath: /diary}, {name: shared, mountPath: /shared, readOnly: true}]
`)
		s := p.ready(t) // which it is as soon as its containers are started
		wait.For(t, "main to begin", func() bool { return strings.Contains(read(t, dir, "all"), "main") })
		sameLines(t, "the order of containers", read(t, dir, "all"), "first", "sidecar", "second", "main")
		for _, name := range []string{"first", "second"} {
			if ended := s.of(name).State.Terminated; ended == nil || ended.Reason != "Completed" {
				t.Errorf("%s is %+v", name, s.of(name))
			}
		}
		if s.of("sidecar").State.Running == nil || !s.of("sidecar").Ready {
			t.Errorf("the sidecar is %+v", s.of("sidecar"))
		}
		p.do(t, "sidecar", "/probe write /diary/enough yes")
		p.phase(t, "Succeeded")
		sameLines(t, "the order at the end", read(t, dir, "all"), "first", "sidecar", "second", "main", "main ends", "sidecar ends")
	})
}

func TestInitContainerThatFails(t *testing.T) {
	each(t, func(t *testing.T, k *machine) {
		s := k.run(t, `
  restartPolicy: Never
  initContainers: [{name: first, image: registry.test/probe, args: [exit, "3"]}]
  containers: [{name: main, image: registry.test/probe}]
`).phase(t, "Failed")
		if ended := s.of("first").State.Terminated; ended == nil || ended.ExitCode != 3 {
			t.Errorf("the init container is %+v", s.of("first"))
		}
		if main := s.of("main"); main.ContainerID != "" {
			t.Errorf("the main container is %+v", main)
		}
	})
}

func TestRestartPolicies(t *testing.T) {
	each(t, func(t *testing.T, k *machine) {
		const spec = `
  containers:
  - {name: fails, image: registry.test/probe, args: [exit, "7"]}
  - {name: ends, image: registry.test/probe, args: [exit, "0"]}
  restartPolicy: `
		never, onFailure, always := k.run(t, spec+"Never\n"), k.run(t, spec+"OnFailure\n"), k.run(t, spec+"Always\n")
		s := never.phase(t, "Failed")
		for name, code := range map[string]int{"fails": 7, "ends": 0} {
			if c := s.of(name); c.RestartCount != 0 || c.State.Terminated == nil || c.State.Terminated.ExitCode != code {
				t.Errorf("with Never %s is %+v", name, c)
			}
		}
		s = onFailure.await(t, "restarts on failure", func(s *podStatus) bool { return s.of("fails").RestartCount >= 2 })
		equal(t, "restarts of what ended with 0", s.of("ends").RestartCount, 0)
		s = always.await(t, "restarts", func(s *podStatus) bool { return s.of("fails").RestartCount >= 2 && s.of("ends").RestartCount >= 2 })
		if last := s.of("fails").LastState.Terminated; last == nil || last.ExitCode != 7 || last.Reason != "Error" {
			t.Errorf("the last state is %+v", last)
		}
		always.await(t, "back-off", func(s *podStatus) bool {
			waiting := s.of("fails").State.Waiting
			return waiting != nil && waiting.Reason == "CrashLoopBackOff"
		})
	})
}

// An error in the image or the manifest is the container's failure, and a pod
// that is never restarted fails with it.
func TestProgramThatIsMissing(t *testing.T) {
	each(t, func(t *testing.T, k *machine) {
		s := k.run(t, `
  restartPolicy: Never
  containers: [{name: main, image: registry.test/probe, command: [/there/is/none]}]
`).phase(t, "Failed")
		ended := s.of("main").State.Terminated
		if ended == nil || ended.ExitCode != 128 || ended.Reason != "StartError" || !strings.Contains(ended.Message, "/there/is/none") {
			t.Errorf("the container ended as %+v", ended)
		}
	})
}

func TestImageThatIsMissing(t *testing.T) {
	each(t, func(t *testing.T, k *machine) {
		p := k.run(t, `
  containers: [{name: main, image: registry.test/none}]
`)
		for _, reason := range []string{"ErrImagePull", "ImagePullBackOff"} {
			p.await(t, reason, func(s *podStatus) bool { w := s.of("main").State.Waiting; return w != nil && w.Reason == reason })
		}
	})
}

func TestTerminationMessages(t *testing.T) {
	each(t, func(t *testing.T, k *machine) {
		s := k.run(t, `
  restartPolicy: Never
  containers:
  - {name: file, image: registry.test/probe, args: [write, /dev/termination-log, from the file]}
  - {name: log, image: registry.test/probe, args: [lines, "3", ;, exit, "1"], terminationMessagePolicy: FallbackToLogsOnError}
  - {name: fine, image: registry.test/probe, args: [lines, "3"], terminationMessagePolicy: FallbackToLogsOnError}
`).phase(t, "Failed")
		for name, want := range map[string]string{"file": "from the file", "log": "line 1\nline 2\nline 3\n", "fine": ""} {
			if c := s.of(name).State.Terminated; c == nil || c.Message != want {
				t.Errorf("%s ended as %+v, want the message %q", name, c, want)
			}
		}
	})
}

// The grace period is the pod's; a process that ignores SIGTERM is killed when
// it is over.
func TestTerminationGracePeriod(t *testing.T) {
	each(t, func(t *testing.T, k *machine) {
		dir := k.Dir(t)
		p := k.run(t, `
  terminationGracePeriodSeconds: 2
  volumes: [{name: diary, hostPath: {path: `+dir+`}}]
  containers:
  - name: polite
    image: registry.test/probe
    args: [trap, TERM, ;, note, /diary/polite, asked]
    volumeMounts: [{name: diary, mountPath: /diary}]
  - {name: deaf, image: registry.test/probe, args: [ignore, TERM, ;, sleep]}
`)
		p.ready(t)
		p.says(t, "polite", "ready")
		p.end(t)
		sameLines(t, "what the polite one heard", read(t, dir, "polite"), "asked")
	})
}

func TestMemoryLimit(t *testing.T) {
	each(t, func(t *testing.T, k *machine) {
		p := k.run(t, `
  restartPolicy: Never
  containers:
  - {name: greedy, image: registry.test/probe, args: [alloc, "100"], resources: {limits: {memory: 50Mi, cpu: 500m}}}
  - {name: modest, image: registry.test/probe, args: [alloc, "10", ;, echo, done, ;, sleep], resources: {limits: {memory: 50Mi}}}
`)
		s := p.await(t, "greedy to end", func(s *podStatus) bool { return s.of("greedy").State.Terminated != nil })
		ended := s.of("greedy").State.Terminated
		equal(t, "reason", ended.Reason, "OOMKilled")
		equal(t, "exit code", ended.ExitCode, 137)
		p.says(t, "modest", "done")
	})
}
