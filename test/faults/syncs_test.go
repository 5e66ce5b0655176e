package faults

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/images"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// syncsPage lists all syncs of a pod's life, and why they are needed.
const syncsPage = "../../docs/performance/syncs.md"

// syncCalls are the system calls that wait for the disk.
var syncCalls = []string{"fsync", "fdatasync", "syncfs", "sync", "sync_file_range", "msync"}

// syncs is a number of syncs of each "CALL FILE".
type syncs map[string]int

// The server, monitors and whatever they run sync what the page lists, and nothing else.
func TestSyncsOfAPodsLife(t *testing.T) {
	t.Parallel()
	listed := listedSyncs(t)
	w := spotless(t, node.Options{})
	said, stop := follow(t, w)
	defer stop()
	watched := &syncWatch{w: w, said: said}
	for i, handler := range []string{"crun", "crun", "runc"} {
		config := kubelet.Pod(fmt.Sprint("syncs-", i), kubelet.LogsBelow(w.Path("logs")))
		var pod, container string
		for _, call := range []struct {
			name string
			do   func() error
		}{
			{"RunPodSandbox", func() error {
				ran, err := w.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: config, RuntimeHandler: handler})
				pod = ran.GetPodSandboxId()
				return err
			}},
			{"CreateContainer", func() error {
				created, err := w.Runtime().CreateContainer(t.Context(), &cri.CreateContainerRequest{
					PodSandboxId: pod, SandboxConfig: config, Config: kubelet.Container("c", images.Probe, []string{"sleep"}),
				})
				container = created.GetContainerId()
				return err
			}},
			{"StartContainer", func() error {
				_, err := w.Runtime().StartContainer(t.Context(), &cri.StartContainerRequest{ContainerId: container})
				return err
			}},
			{"ExecSync", func() error {
				_, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: container, Cmd: []string{"/probe", "exit", "0"}})
				return err
			}},
			{"StopContainer", func() error {
				_, err := w.Runtime().StopContainer(t.Context(), &cri.StopContainerRequest{ContainerId: container, Timeout: 10})
				return err
			}},
			{"RemoveContainer", func() error {
				_, err := w.Runtime().RemoveContainer(t.Context(), &cri.RemoveContainerRequest{ContainerId: container})
				return err
			}},
			{"StopPodSandbox", func() error {
				_, err := w.Runtime().StopPodSandbox(t.Context(), &cri.StopPodSandboxRequest{PodSandboxId: pod})
				return err
			}},
			{"RemovePodSandbox", func() error {
				_, err := w.Runtime().RemovePodSandbox(t.Context(), &cri.RemovePodSandboxRequest{PodSandboxId: pod})
				return err
			}},
		} {
			if err := call.do(); err != nil {
				t.Fatalf("%s: %s: %v", handler, call.name, err)
			}
			got := watched.until(t, listed[call.name])
			if i > 0 { // in the first life there may be syncs of what was before
				compare(t, handler+": "+call.name, got, listed[call.name])
			}
		}
	}
	layer, err := image.NewLayer(image.Text("name", "content"))
	if err != nil {
		t.Fatal(err)
	}
	small, err := image.Image{Layers: []image.Layer{layer}}.Build()
	if err != nil {
		t.Fatal(err)
	}
	w.PushAndPull(t, small)
	compare(t, "PullImage", watched.until(t, listed["PullImage"]), listed["PullImage"])
}

// follow traces the syncs of the server and of all processes that it starts.
func follow(t *testing.T, w *scene.World) (said *buffer, stop func()) {
	t.Helper()
	return attach(t, w, "-y", "-e", "trace="+strings.Join(syncCalls, ","))
}

// syncWatch reads the trace.
type syncWatch struct {
	w    *scene.World
	said *buffer
	read int // bytes
}

// until returns the syncs since the last call, once those that are wanted are among them.
func (s *syncWatch) until(t *testing.T, want syncs) (got syncs) {
	t.Helper()
	from := s.read
	wait.Until(t.Context(), func() bool { // otherwise the comparison fails
		text := s.said.String()
		text = text[:strings.LastIndexByte(text, '\n')+1]
		got, s.read = syncsIn(text[from:], s.w), len(text)
		return !slices.ContainsFunc(slices.Collect(maps.Keys(want)), func(sync string) bool { return got[sync] < want[sync] })
	})
	return got
}

var (
	syncCall = regexp.MustCompile(`\b(` + strings.Join(syncCalls, "|") + `)\((?:\d+<([^>]*)>)?`)
	syncID   = regexp.MustCompile(`[0-9a-f]{64}`)
	syncTemp = regexp.MustCompile(`/\.tmp-(.*?)\d*$`)
	syncData = regexp.MustCompile(`^(images/overlay-images/ID)/(=.*|manifest)$`) // the library encodes some names
)

// syncsIn counts the syncs in strace's output.
func syncsIn(text string, w *scene.World) syncs {
	found := syncs{}
	for _, call := range syncCall.FindAllStringSubmatch(text, -1) {
		file := syncID.ReplaceAllString(call[2], "ID")
		file = strings.TrimSuffix(syncTemp.ReplaceAllString(file, "/$1"), ".tmp")
		for dir, name := range map[string]string{w.StateRoot(): "state", w.ImageRoot(): "images", w.ImageRoot() + "run": "run"} {
			if rest, below := strings.CutPrefix(file, dir); below && (rest == "" || rest[0] == '/') {
				file = name + rest
				break
			}
		}
		found[strings.TrimSpace(call[1]+" "+syncData.ReplaceAllString(file, "$1/DATA"))]++
	}
	return found
}

// Records are synced in the background, once or more often, and on a busy machine beside the sync that
// a call waits for, or after the next call has begun.
var (
	inBackground = regexp.MustCompile(`^fsync (state/(pods|containers)(/ID(/(pod|container)\.json)?)?|images/crius-seal/store(/seal\.json)?)$`)
	lateOne      = regexp.MustCompile(`^fsync (state/(pods|containers)/ID(/(pod|container)\.json)?|images/crius-seal/store(/seal\.json)?)$`)
)

func compare(t *testing.T, call string, got, want syncs) {
	t.Helper()
	for sync, times := range want {
		if got[sync] < times {
			t.Errorf("%s: %s is done %d times, and %s lists it %d times", call, sync, got[sync], syncsPage, times)
		}
	}
	for sync, times := range got {
		if times > want[sync] && !lateOne.MatchString(sync) && (want[sync] == 0 || !inBackground.MatchString(sync)) {
			t.Errorf("%s: %s is done %d times, and %s lists it %d times: is it needed? What would a power cut lose?", call, sync, times, syncsPage, want[sync])
		}
	}
}

// listedSyncs reads the page: those of each call.
func listedSyncs(t *testing.T) map[string]syncs {
	t.Helper()
	listed := map[string]syncs{}
	for line := range strings.Lines(scene.Read(t, syncsPage)) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), " | ")
		if len(cells) != 5 || strings.TrimSpace(cells[0]) == "call" {
			continue
		}
		name := strings.TrimSpace(cells[0])
		if listed[name] == nil {
			listed[name] = syncs{}
		}
		for _, each := range strings.Split(cells[2], ", ") {
			times, call, many := strings.Cut(each, " ")
			if !many {
				times, call = "1", each
			}
			n, err := strconv.Atoi(times)
			if err != nil || !slices.Contains(syncCalls, call) {
				t.Fatalf("%s: cannot read %q", syncsPage, line)
			}
			listed[name][call+" "+cells[3]] = max(n, listed[name][call+" "+cells[3]])
		}
	}
	if len(listed) != 8 {
		t.Fatalf("%s lists %d calls", syncsPage, len(listed))
	}
	return listed
}
