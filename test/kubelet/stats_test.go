//go:build kubelet

package kubelet

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/wait"
)

const mib = 1 << 20

// summary is the part of /stats/summary that tests use.
type summary struct {
	Node struct {
		Runtime struct{ ImageFs *usedBytes }
	}
	Pods []podSummary
}

type podSummary struct {
	PodRef           struct{ Name string }
	CPU              *struct{ UsageCoreNanoSeconds uint64 }
	Memory           *struct{ WorkingSetBytes, RSSBytes uint64 }
	Network          *struct{ Name string }
	EphemeralStorage *usedBytes `json:"ephemeral-storage"`
	Volume           []struct {
		Name      string
		UsedBytes uint64
	}
	Containers []struct {
		Name         string
		CPU          *struct{ UsageCoreNanoSeconds uint64 }
		Memory       *struct{ WorkingSetBytes, RSSBytes uint64 }
		Rootfs, Logs *usedBytes
	}
}

type usedBytes struct{ UsedBytes uint64 }

// summary returns the pod's part of the kubelet's summary, nil if there is
// none.
func (p *pod) summary(t *testing.T) *podSummary {
	t.Helper()
	body, err := p.k.get(t.Context(), "/stats/summary")
	if err != nil {
		t.Fatal(err)
	}
	var s summary
	if err := json.Unmarshal(body, &s); err != nil {
		t.Fatal(err)
	}
	for _, found := range s.Pods {
		if found.PodRef.Name == p.name {
			return &found
		}
	}
	return nil
}

func TestStatsSummary(t *testing.T) {
	each(t, func(t *testing.T, k *machine) {
		p := k.run(t, `
  volumes: [{name: data, emptyDir: {}}]
  containers:
  - name: main
    image: registry.test/probe
    args: [write, /layer, "", ;, fill, /layer, "20", ;, write, /data/file, "", ;, fill, /data/file, "30", ;, alloc, "40", ;, lines, "10", ;, burn, 1s, ;, serve, ":8080", hello]
    volumeMounts: [{name: data, mountPath: /data}]
`)
		p.ready(t)
		if _, err := k.Get(t.Context(), p.status(t).PodIP+":8080", "/"); err != nil {
			t.Fatal(err)
		}
		// The kubelet measures at its own intervals.
		var s *podSummary
		wait.For(t, "the summary to know the pod's CPU, memory and disk", func() bool {
			s = p.summary(t)
			if s == nil || len(s.Containers) != 1 || len(s.Volume) != 1 || s.CPU == nil || s.Memory == nil || s.EphemeralStorage == nil {
				return false
			}
			c := s.Containers[0]
			return c.CPU != nil && c.Memory != nil && c.Rootfs != nil && c.Logs != nil &&
				c.CPU.UsageCoreNanoSeconds > 0 && c.Memory.WorkingSetBytes > 40*mib && c.Rootfs.UsedBytes >= 20*mib && c.Logs.UsedBytes > 0 &&
				s.CPU.UsageCoreNanoSeconds > 0 && s.Memory.WorkingSetBytes > 40*mib && s.Volume[0].UsedBytes >= 30*mib && s.EphemeralStorage.UsedBytes >= 50*mib
		})
		// With cAdvisor's numbers and the cgroupfs driver a kubelet looks up the
		// network by the name of a sandbox's cgroup, crio-ID, instead of its id,
		// and finds none.
		if k.statsFromCRI && (s.Network == nil || s.Network.Name != "eth0") {
			t.Errorf("the pod's network is %+v", s.Network)
		}
		if c := s.Containers[0]; c.Rootfs.UsedBytes > 25*mib || c.Logs.UsedBytes > mib {
			t.Errorf("root file system %d bytes, logs %d bytes", c.Rootfs.UsedBytes, c.Logs.UsedBytes)
		}
	})
}

// Whatever the source of the kubelet's numbers, its metrics have the names of
// pods.
func TestCAdvisorMetrics(t *testing.T) {
	each(t, func(t *testing.T, k *machine) {
		p := k.run(t, `
  containers: [{name: main, image: registry.test/probe, args: [alloc, "40", ;, burn, 1s, ;, sleep]}]
`)
		p.ready(t)
		for metric, labels := range map[string]string{
			"container_cpu_usage_seconds_total":     `container="main"`,
			"container_memory_working_set_bytes":    `container="main"`,
			"container_network_receive_bytes_total": `interface="eth0"`,
		} {
			line := regexp.MustCompile(`(?m)^` + metric + `\{.*` + labels + `.*\} [0-9.e+]+.*$`)
			wait.For(t, metric+" of the pod", func() bool {
				body, err := k.get(t.Context(), "/metrics/cadvisor")
				if err != nil {
					t.Fatal(err)
				}
				for _, found := range line.FindAllString(string(body), -1) {
					if strings.Contains(found, `pod="`+p.name+`"`) && strings.Contains(found, `namespace="default"`) {
						return true
					}
				}
				return false
			})
		}
		wait.For(t, "resource metrics of the pod", func() bool {
			body, err := k.get(t.Context(), "/metrics/resource")
			return err == nil && strings.Contains(string(body), `container_memory_working_set_bytes{container="main",namespace="default",pod="`+p.name+`"}`)
		})
	})
}

// Under pressure on the image file system a kubelet removes only the images
// that no container uses. Static pods are not evicted.
func TestImageGarbageCollection(t *testing.T) {
	pressed := func(o *options) {
		o.config = map[string]any{"evictionHard": map[string]any{"imagefs.available": "99.9999%"}}
	}
	eachPrivate(t, pressed, func(t *testing.T, k *machine) {
		p := k.run(t, `
  containers: [{name: main, image: registry.test/probe}]
`)
		p.ready(t)
		unused := k.Image(t, nil)
		has := func(ref string) bool {
			s, err := k.Images().ImageStatus(context.Background(), &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: ref}})
			return err == nil && s.Image != nil
		}
		wait.For(t, "the unused image to be removed", func() bool { return !has(unused) })
		if !has("registry.test/probe") {
			t.Error("the image in use has been removed")
		}
		equal(t, "the pod runs", p.ready(t).of("main").RestartCount, 0)
	})
}

// The kubelet's checkpoint API writes an archive, and the container continues, as Kubernetes' own test of it wants
// (test/e2e_node/checkpoint_container.go). It reports why a node has no checkpoints, since Debian's crun was built
// without criu, in words that that test knows.
func TestCheckpoint(t *testing.T) {
	each(t, func(t *testing.T, k *machine) {
		p := k.run(t, `
  containers: [{name: main, image: registry.test/probe}]
`)
		id := p.ready(t).of("main").ContainerID
		done, failed := k.checkpoints(t)
		said, err := k.ask(t.Context(), http.MethodPost, p.path("checkpoint", "main", nil))
		if k.criu != "" && k.handler == "runc" {
			k.wantArchive(t, said, err)
			nowDone, nowFailed := k.checkpoints(t)
			equal(t, "checkpoints by the kubelet's account", nowDone-done, 1)
			equal(t, "failed ones", nowFailed-failed, 0)
		} else if err == nil || !strings.Contains(err.Error(), "checkpoint/restore requires at least CRIU") {
			t.Errorf("the answer is %v", err)
		}
		equal(t, "the container afterwards", p.ready(t).of("main").ContainerID, id)
	})
}

// checkpoints returns how many the kubelet has asked for, and how many of these have failed.
func (k *machine) checkpoints(t *testing.T) (all, failed int) {
	t.Helper()
	body, err := k.get(t.Context(), "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	count := func(metric string) (n int) {
		_, value, _ := strings.Cut(string(body), "\n"+metric+"{operation_type=\"checkpoint_container\"} ")
		_, _ = fmt.Sscan(value, &n) // a metric that is not there yet has counted nothing
		return n
	}
	return count("kubelet_runtime_operations_total"), count("kubelet_runtime_operations_errors_total")
}

// wantArchive checks an answer of the checkpoint API, and removes the archive.
func (k *machine) wantArchive(t *testing.T, said []byte, err error) {
	t.Helper()
	var answer struct{ Items []string }
	if err == nil {
		err = json.Unmarshal(said, &answer)
	}
	if err != nil || len(answer.Items) != 1 || filepath.Dir(answer.Items[0]) != k.Path("kubelet", "checkpoints") {
		t.Fatalf("the answer is %s, %v", said, err)
	}
	archive := answer.Items[0]
	info, err := os.Stat(archive)
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "mode", info.Mode(), 0o600)
	names, err := exec.CommandContext(t.Context(), "tar", "-tf", archive).Output()
	for _, name := range []string{"spec.dump", "config.dump", "checkpoint/inventory.img"} {
		if err != nil || !strings.Contains("\n"+string(names), "\n"+name+"\n") {
			t.Errorf("the archive has no %s, but %s, %v", name, names, err)
		}
	}
	if err := os.Remove(archive); err != nil {
		t.Error(err)
	}
}
