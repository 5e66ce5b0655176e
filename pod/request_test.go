package pod

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
)

// rebuilt returns the pod and the container of a request as a kubelet builds them for its nth
// attempt to send it.
func rebuilt(n int) (*cri.PodSandboxConfig, *cri.ContainerConfig) {
	p, c := podConfig("a"), containerConfig("c")
	p.DnsConfig = &cri.DNSConfig{Options: turned(n, "ndots:2", "rotate", "timeout:1")}
	p.Annotations = map[string]string{"cni.projectcalico.org/podIP": fmt.Sprint("10.0.0.", n)}
	c.Envs = turned(n, &cri.KeyValue{Key: "A", Value: []byte("1")}, &cri.KeyValue{Key: "B", Value: []byte("2")})
	groups := turned(n, int64(1001), int64(1002)) // of volumes
	p.Linux.SecurityContext.SupplementalGroups, c.Linux.SecurityContext.SupplementalGroups = groups, groups
	return p, c
}

// turned returns a list that begins with another item for each n.
func turned[T any](n int, list ...T) []T {
	n %= len(list)
	return slices.Concat(list[n:], list[:n])
}

// A kubelet that has waited for as long as it does retries with a request that it has built from
// scratch, and gets the pod or container of the first one. It would have to wait for as long again if
// that were refused: it finds a container that nobody has started, and has another one created.
func TestRetryIsBuiltFromScratch_containerd_8882_crio_7044(t *testing.T) {
	timeless(t, func(t *testing.T, b *bench) {
		e, attempts := b.engine(), 0
		pod := ""
		run := func(ctx context.Context) (string, error) {
			attempts++
			p, _ := rebuilt(attempts)
			return e.RunSandbox(ctx, "", p)
		}
		create := func(ctx context.Context) (string, error) {
			attempts++
			_, c := rebuilt(attempts)
			return e.CreateContainer(ctx, pod, c, nil)
		}
		retried := func(step string, ask func(context.Context) (string, error)) (id string) {
			release := make(chan struct{})
			b.node.set(func() { b.node.block[step] = release })
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			if _, err := ask(ctx); !errors.Is(err, context.DeadlineExceeded) {
				t.Fatalf("%s: the first attempt: %v", step, err)
			}
			b.node.set(func() { delete(b.node.block, step) })
			time.AfterFunc(time.Minute, func() { close(release) })
			id, err := ask(t.Context())
			if err != nil {
				t.Fatalf("%s: the retry: %v", step, err)
			}
			if n := b.node.count(step); n != 1 {
				t.Errorf("%s happened %d times", step, n)
			}
			return id
		}
		pod = retried("attach", run)
		ctr := retried("create", create)
		for want, ask := range map[string]func(context.Context) (string, error){pod: run, ctr: create} {
			for range 2 {
				if again, err := ask(t.Context()); again != want || err != nil {
					t.Errorf("a retry that comes late: %s, %v, want %s", again, err, want)
				}
			}
		}
		b.remove(e, pod)
		b.nothingLeft()
	})
}

// A container whose creation ends while its kubelet is between two attempts is not shown before the second one: the
// kubelet would have the next attempt created instead. Without a second one, it is shown all the same.
func TestCreationThatEndsBetweenAttempts_kubernetes_94085(t *testing.T) {
	ends := map[string]func(t *testing.T, b *bench, e *Engine, pod string){
		"retry": func(t *testing.T, b *bench, e *Engine, pod string) {
			time.Sleep(15 * time.Second)
			if all := e.Containers(); len(all) > 0 {
				t.Errorf("shown before the retry: %s", all[0].State)
			}
			b.start(e, pod, "c")
		},
		"no retry": func(t *testing.T, _ *bench, e *Engine, _ string) { time.Sleep(retryTime + time.Second) },
		"end of the pod": func(t *testing.T, _ *bench, e *Engine, pod string) {
			if err := e.StopSandbox(t.Context(), pod); err != nil {
				t.Error(err)
			}
		},
		"end of the server": func(t *testing.T, b *bench, e *Engine, _ string) {
			before := time.Now()
			if err := e.Close(t.Context()); err != nil || time.Since(before) > time.Minute {
				t.Errorf("took %s, %v", time.Since(before), err)
			}
		},
	}
	for name, end := range ends {
		t.Run(name, func(t *testing.T) {
			timeless(t, func(t *testing.T, b *bench) {
				e := b.engine()
				pod := b.run(e, "a")
				release := make(chan struct{})
				b.node.set(func() { b.node.block["create"] = release })
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				if _, err := e.CreateContainer(ctx, pod, containerConfig("c"), nil); !errors.Is(err, context.DeadlineExceeded) {
					t.Fatal(err)
				}
				close(release)
				end(t, b, e, pod)
				if all := e.Containers(); len(all) != 1 {
					t.Errorf("%d containers", len(all))
				}
				if name == "end of the server" {
					e = b.engine()
				}
				b.remove(e, pod)
				b.nothingLeft()
			})
		})
	}
}

// A request with other content waits for nothing, and the error says what has the name.
func TestOtherRequestMeanwhile(t *testing.T) {
	timeless(t, func(t *testing.T, b *bench) {
		e := b.engine()
		release := make(chan struct{})
		b.node.block["attach"], b.node.block["create"] = release, release
		go func() { _, _ = e.RunSandbox(context.Background(), "", podConfig("a")) }()
		b.awaitCalls("attach", 1)
		other := podConfig("a")
		other.Hostname = "else"
		_, err := e.RunSandbox(t.Context(), "", other)
		wantBeingMade(t, err)
		b.node.set(func() { delete(b.node.block, "attach") })
		release <- struct{}{}
		pod := b.run(e, "a")

		go func() { _, _ = e.CreateContainer(context.Background(), pod, containerConfig("c"), nil) }()
		b.awaitCalls("create", 1)
		changed := containerConfig("c")
		changed.Envs = []*cri.KeyValue{{Key: "A", Value: []byte("1")}}
		_, err = e.CreateContainer(t.Context(), pod, changed, nil)
		wantBeingMade(t, err)
		close(release)
		b.create(e, pod, "c")
		if _, err := e.CreateContainer(t.Context(), pod, changed, nil); !errors.Is(err, fault.Exists) || strings.Contains(err.Error(), "being created") {
			t.Errorf("when it exists: %v", err)
		}
		b.remove(e, pod)
		b.nothingLeft()
	})
}

func wantBeingMade(t *testing.T, err error) {
	t.Helper()
	if !errors.Is(err, fault.Exists) || !strings.Contains(err.Error(), "is still being created as ") {
		t.Errorf("another request meanwhile: %v", err)
	}
}

// Of several options with one name the last one counts, so their order does.
func TestCanonicalPod(t *testing.T) {
	t.Parallel()
	of := func(options ...string) *cri.PodSandboxConfig {
		p, _ := rebuilt(0)
		p.DnsConfig.Options = options
		return canonicalPod(p)
	}
	if !proto.Equal(of("ndots:2", "rotate"), of("rotate", "ndots:2")) {
		t.Error("requests of a kubelet differ")
	}
	if proto.Equal(of("ndots:2", "ndots:5"), of("ndots:5", "ndots:2")) {
		t.Error("another order of an option's values is not noticed")
	}
}

// Of several entries with one name the last one counts, so their order does.
func TestCanonicalContainer(t *testing.T) {
	t.Parallel()
	lists := func(n int) *cri.ContainerConfig {
		_, c := rebuilt(n)
		c.Annotations = map[string]string{terminationMessagePath: "/dev/termination-log"}
		c.Mounts = append(turned(n, &cri.Mount{ContainerPath: "/a", HostPath: "/volume"}, &cri.Mount{ContainerPath: "/b", HostPath: "/volume"}),
			&cri.Mount{ContainerPath: "/dev/termination-log", HostPath: fmt.Sprint("/messages/", n)})
		c.Devices = turned(n, &cri.Device{ContainerPath: "/dev/a"}, &cri.Device{ContainerPath: "/dev/b"})
		c.CDIDevices = turned(n, &cri.CDIDevice{Name: "vendor/a=1"}, &cri.CDIDevice{Name: "vendor/b=1"})
		return c
	}
	same := func(a, b *cri.ContainerConfig) bool { return proto.Equal(canonicalContainer(a), canonicalContainer(b)) }
	if !same(lists(0), lists(1)) {
		t.Error("requests of a kubelet differ")
	}
	for in, mounted := range map[string]string{"message": "/message", "/message/": "/message", "/message": "//message"} {
		request := func(n int) *cri.ContainerConfig {
			c := lists(n)
			c.Annotations[terminationMessagePath], c.Mounts[2].ContainerPath = in, mounted
			return c
		}
		if !same(request(0), request(1)) {
			t.Errorf("requests for a message at %s differ", in)
		}
	}
	for name, change := range map[string]func(c *cri.ContainerConfig){
		"value":  func(c *cri.ContainerConfig) { c.Envs[0].Value = []byte("3") },
		"source": func(c *cri.ContainerConfig) { c.Mounts[0].HostPath = "/other" },
		"device": func(c *cri.ContainerConfig) { c.Devices[0].Permissions = "r" },
		"order":  func(c *cri.ContainerConfig) { c.Envs[0].Key, c.Envs[1].Key = "B", "B" },
		"path of the message": func(c *cri.ContainerConfig) {
			c.Annotations[terminationMessagePath], c.Mounts[2].ContainerPath = "/message", "/message"
		},
	} {
		a, b := lists(0), lists(0)
		change(b)
		if name == "order" {
			change(a)
			slices.Reverse(a.Envs)
		}
		if same(a, b) {
			t.Errorf("another %s is not noticed", name)
		}
	}
	for name, of := range map[string]func(c *cri.ContainerConfig){
		"mounts": func(c *cri.ContainerConfig) {
			c.Mounts = []*cri.Mount{{ContainerPath: "/a", HostPath: "/1"}, {ContainerPath: "/a/", HostPath: "/2"}}
		},
		"devices": func(c *cri.ContainerConfig) {
			c.Devices = []*cri.Device{{HostPath: "/dev/a"}, {HostPath: "/dev/b", ContainerPath: "/dev/a"}}
		},
	} {
		a, b := lists(0), lists(0)
		of(a)
		of(b)
		slices.Reverse(b.Mounts)
		slices.Reverse(b.Devices)
		if same(a, b) {
			t.Errorf("another order of %s for one path is not noticed", name)
		}
	}
	hidden := func(volume string) *cri.ContainerConfig {
		c := lists(0)
		c.Mounts[0].HostPath, c.Mounts[0].ContainerPath = volume, c.Mounts[2].ContainerPath
		return c
	}
	if same(hidden("/a"), hidden("/b")) {
		t.Error("another volume at the path of the message is not noticed")
	}
	c := lists(0)
	before := proto.CloneOf(c)
	canonicalContainer(c)
	if !proto.Equal(c, before) {
		t.Error("the request was changed")
	}
}
