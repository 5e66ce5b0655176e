//go:build kubelet

package kubelet

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/crius-run/crius/test/images/facts"
	"github.com/crius-run/crius/test/kit/image"
)

// Volumes that need no API server.
func TestVolumes(t *testing.T) {
	each(t, func(t *testing.T, k *machine) {
		dir := k.Dir(t)
		if err := os.Mkdir(dir+"/below", 0o755); err != nil {
			t.Fatal(err)
		}
		content := k.Image(t, nil, image.Text("model/weights", "heavy\n"))
		p := k.run(t, `
  volumes:
  - {name: disk, emptyDir: {}}
  - {name: memory, emptyDir: {medium: Memory, sizeLimit: 1Mi}}
  - {name: host, hostPath: {path: `+dir+`, type: Directory}}
  - {name: image, image: {reference: `+content+`}}
  - name: names
    downwardAPI: {items: [{path: labels, fieldRef: {fieldPath: metadata.labels}}]}
  containers:
  - name: main
    image: registry.test/probe
    args: [write, /disk/file, disk, ;, write, /memory/file, memory, ;, write, /below/file, below, ;, echo, done, ;, sleep]
    env:
    - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
    - {name: LIMIT, valueFrom: {resourceFieldRef: {resource: limits.memory}}}
    resources: {limits: {memory: 64Mi}}
    volumeMounts:
    - {name: disk, mountPath: /disk}
    - {name: memory, mountPath: /memory}
    - {name: host, mountPath: /below, subPath: below}
    - {name: host, mountPath: /ro, readOnly: true, recursiveReadOnly: IfPossible}
    - {name: image, mountPath: /image}
    - {name: names, mountPath: /names}
`)
		s := p.ready(t)
		p.says(t, "main", "done")
		equal(t, "the file below", read(t, dir, "below", "file"), "below")
		for command, want := range map[string]string{
			"cat /disk/file":            "disk",
			"cat /memory/file":          "memory",
			"cat /image/model/weights":  "heavy\n",
			"cat /ro/below/file":        "below",
			"cat /names/labels":         `test="it"`,
			"run /probe cat /disk/file": "disk",
		} {
			equal(t, command, p.do(t, "main", "/probe "+command), want)
		}
		env := p.facts(t, "main").Env
		for _, want := range []string{"POD_IP=" + s.PodIP, "LIMIT=67108864"} {
			if !slices.Contains(env, want) {
				t.Errorf("the environment lacks %s: %q", want, env)
			}
		}
	})
}

// Namespaces that pods share with each other, with the node, or not at all.
func TestNamespaces(t *testing.T) {
	each(t, func(t *testing.T, k *machine) {
		p := k.run(t, `
  shareProcessNamespace: true
  hostname: web
  containers:
  - {name: main, image: registry.test/probe, args: [pose, beside]}
  - {name: other, image: registry.test/probe, args: [sleep]}
`)
		host := k.run(t, `
  hostNetwork: true
  hostPID: true
  hostIPC: true
  containers: [{name: main, image: registry.test/probe, args: [serve, "127.0.0.1:18080", hello]}]
`)
		port := k.run(t, `
  containers: [{name: main, image: registry.test/probe, args: [serve, ":8080", hello], ports: [{containerPort: 8080, hostPort: 18081}]}]
`)
		p.ready(t)
		p.says(t, "main", "ready")
		seen := p.facts(t, "other")
		equal(t, "host name", seen.Hostname, "web")
		if processes := slices.Collect(maps.Values(seen.Processes)); !slices.ContainsFunc(processes, func(line string) bool { return strings.HasPrefix(line, "beside") }) {
			t.Errorf("the pod's processes are %q", processes)
		}
		host.ready(t)
		var ours syscall.Stat_t
		if err := syscall.Stat("/proc/self/ns/ipc", &ours); err != nil {
			t.Fatal(err)
		}
		equal(t, "IPC namespace of a pod in the node's", host.facts(t, "main").Namespaces["ipc"], fmt.Sprintf("ipc:[%d]", ours.Ino))
		for address, of := range map[string]*pod{"127.0.0.1:18080": host, nodeAddress + ":18081": port} {
			of.ready(t)
			if body, err := k.Get(t.Context(), address, "/"); err != nil || body != "hello\n" {
				t.Errorf("%s answers %q, %v", address, body, err)
			}
		}
	})
}

// facts returns what a process in a container sees.
func (p *pod) facts(t *testing.T, container string) *facts.Facts {
	t.Helper()
	out, err := facts.Parse([]byte(p.do(t, container, "/probe facts")))
	if err != nil {
		t.Fatal(err)
	}
	return out
}
