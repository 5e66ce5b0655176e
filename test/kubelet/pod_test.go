//go:build kubelet

package kubelet

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/client-go/rest"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	kit "github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/wait"
)

// pod is a static pod.
type pod struct {
	k        *machine
	name     string // the kubelet's name for it
	manifest string // file
}

// podStatus is the part of a pod's status that tests use.
type podStatus struct {
	Phase, Reason, Message, PodIP string
	Conditions                    []struct{ Type, Status string }
	InitContainerStatuses         []containerStatus
	ContainerStatuses             []containerStatus
}

type containerStatus struct {
	Name, ContainerID, ImageID string
	Ready                      bool
	Started                    *bool
	RestartCount               int
	State, LastState           containerState
}

type containerState struct {
	Waiting    *struct{ Reason, Message string }
	Running    *struct{ StartedAt time.Time }
	Terminated *struct {
		ExitCode                     int
		Reason, Message, ContainerID string
	}
}

// run starts a pod with a spec in YAML, indented by two spaces. The kubelet
// removes it when the test has ended.
func (k *machine) run(t *testing.T, spec string) *pod {
	t.Helper()
	name := fmt.Sprintf("t%.4x", sha256.Sum256([]byte(t.Name()+spec)))
	p := &pod{k: k, name: name + "-" + nodeName, manifest: k.Path("static", name+".yaml")}
	text := "apiVersion: v1\nkind: Pod\nmetadata:\n  name: " + name + "\n  labels: {test: it}\n  annotations: {note: hello}\nspec:\n" + spec
	aside := k.Path(name + ".new") // the kubelet reads a new file at once
	if err := os.WriteFile(aside, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(aside, p.manifest); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the pod: %+v\nthe kubelet's log about it:\n%s\nthe server's log about it:\n%s",
				p.status(t), k.kubeletAbout(strings.TrimSuffix(p.name, "-"+nodeName)), k.LogAbout(20, p.name))
		}
		p.end(t)
	})
	return p
}

// end makes the kubelet end the pod, unless that was requested before, and
// waits until none of its containers is running.
func (p *pod) end(t *testing.T) {
	t.Helper()
	if err := os.Remove(p.manifest); err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	wait.For(t, "the kubelet to end the pod", func() bool {
		for _, c := range p.containers(t) {
			if c.State == cri.ContainerState_CONTAINER_RUNNING {
				return false
			}
		}
		return p.status(t) == nil
	})
}

// containers returns crius's containers of the pod. It may be about to start.
func (p *pod) containers(t *testing.T) []*cri.Container {
	t.Helper()
	filter := &cri.ContainerFilter{LabelSelector: map[string]string{"io.kubernetes.pod.name": p.name}}
	var list *cri.ListContainersResponse
	var err error
	wait.For(t, "crius to answer", func() bool {
		list, err = p.k.Runtime().ListContainers(context.Background(), &cri.ListContainersRequest{Filter: filter})
		return status.Code(err) != codes.Unavailable
	})
	if err != nil {
		t.Fatal(err)
	}
	return list.Containers
}

// kubeletAbout returns the last lines of the kubelet's log that name a pod.
func (k *machine) kubeletAbout(name string) string {
	var out []string
	for _, line := range strings.Split(k.kubeletLog(1<<20), "\n") {
		if strings.Contains(line, name) {
			out = append(out, line)
		}
	}
	return strings.Join(out[max(0, len(out)-20):], "\n")
}

// get queries the kubelet's API.
func (k *machine) get(ctx context.Context, path string) ([]byte, error) {
	return k.ask(ctx, http.MethodGet, path)
}

func (k *machine) ask(ctx context.Context, method, path string) ([]byte, error) {
	client := http.Client{Transport: &http.Transport{
		DialContext: k.Dial, DisableKeepAlives: true,
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // the kubelet signs its certificate itself
	}}
	ctx, cancel := context.WithTimeout(ctx, wait.Limit)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, "https://"+address+path, nil)
	if err != nil {
		return nil, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s %s: %s: %s", method, path, resp.Status, body)
	}
	return body, err
}

// status returns the pod's status from the kubelet, nil if it does not know the
// pod.
func (p *pod) status(t *testing.T) *podStatus {
	t.Helper()
	body, err := p.k.get(context.Background(), "/pods")
	if err != nil {
		t.Fatalf("%v\nthe end of the kubelet's log:\n%s", err, p.k.kubeletLog(30))
	}
	var list struct {
		Items []struct {
			Metadata struct{ Name string }
			Status   podStatus
		}
	}
	if err := json.Unmarshal(body, &list); err != nil {
		t.Fatal(err)
	}
	for _, item := range list.Items {
		if item.Metadata.Name == p.name {
			return &item.Status
		}
	}
	return nil
}

// await waits until the pod's status is as wanted and returns it.
func (p *pod) await(t *testing.T, what string, is func(*podStatus) bool) *podStatus {
	t.Helper()
	var s *podStatus
	wait.For(t, what, func() bool {
		s = p.status(t)
		return s != nil && is(s)
	})
	return s
}

// ready waits until the pod is ready.
func (p *pod) ready(t *testing.T) *podStatus {
	t.Helper()
	return p.await(t, "the pod to be ready", func(s *podStatus) bool { return s.condition("Ready") })
}

// phase waits until the pod is in a phase.
func (p *pod) phase(t *testing.T, phase string) *podStatus {
	t.Helper()
	return p.await(t, "the pod to be "+phase, func(s *podStatus) bool { return s.Phase == phase })
}

func (s *podStatus) condition(name string) bool {
	for _, c := range s.Conditions {
		if c.Type == name {
			return c.Status == "True"
		}
	}
	return false
}

// of returns the status of a container, an empty one if the kubelet does not
// know it yet.
func (s *podStatus) of(name string) containerStatus {
	for _, c := range append(s.InitContainerStatuses, s.ContainerStatuses...) {
		if c.Name == name {
			return c
		}
	}
	return containerStatus{}
}

// path returns the path of a verb in the kubelet's API for a container, or for
// the pod if there is no name.
func (p *pod) path(verb, container string, query url.Values) string {
	out := "/" + verb + "/default/" + p.name
	if container != "" {
		out += "/" + container
	}
	return out + "?" + query.Encode()
}

// do runs a command in a container and returns its output.
func (p *pod) do(t *testing.T, container, command string) string {
	t.Helper()
	out, err := p.k.ask(t.Context(), http.MethodPost, p.path("run", container, url.Values{"cmd": {command}}))
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// logs returns a container's log, with the options of the kubelet's API.
func (p *pod) logs(t *testing.T, container string, options url.Values) string {
	t.Helper()
	out, err := p.k.get(t.Context(), p.path("containerLogs", container, options))
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// says waits until a container's log contains a line.
func (p *pod) says(t *testing.T, container, line string) {
	t.Helper()
	wait.For(t, fmt.Sprintf("%s to say %q", container, line), func() bool {
		out, err := p.k.get(t.Context(), p.path("containerLogs", container, nil))
		return err == nil && bytes.Contains(append([]byte("\n"), out...), []byte("\n"+line+"\n"))
	})
}

// session opens an exec, attach or port-forward with the kubelet.
func (p *pod) session(webSocket bool) kit.Streams {
	return kit.Streams{Within: p.k.Do, WebSocket: webSocket, TLS: rest.TLSClientConfig{Insecure: true}}
}

// read returns the content of a file, "" if it is missing.
func read(t *testing.T, elem ...string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(elem...))
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return string(data)
}
