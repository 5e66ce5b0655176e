package nri

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/containerd/nri/pkg/api"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/test/kit/nriplugin"
	"github.com/crius-run/crius/test/kit/wait"
)

// TestMain is the plugin of TestPluginOfTheDirectory, when the server starts
// it.
func TestMain(m *testing.M) {
	if os.Getenv(api.PluginNameEnvVar) == "" {
		os.Exit(m.Run())
	}
	plugin := &nriplugin.Plugin{Answer: nriplugin.Refuse("RunPodSandbox", 0)}
	if err := plugin.Connect(context.Background(), "", "", ""); err != nil {
		os.Exit(1)
	}
	<-plugin.Closed()
}

type fakeNode struct {
	listed atomic.Bool // Pods has been called

	mu         sync.Mutex
	pods       []*Pod
	containers []*Container
	updates    map[string]*Resources
}

func (n *fakeNode) Pods() []*Pod {
	n.listed.Store(true)
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.pods)
}

func (n *fakeNode) Containers() []*Container {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.containers)
}

func (n *fakeNode) UpdateContainer(_ context.Context, id string, change Change) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !slices.ContainsFunc(n.containers, func(c *Container) bool { return c.ID == id }) {
		return fault.NotFound
	}
	if n.updates == nil {
		n.updates = map[string]*Resources{}
	}
	set, err := change(&Resources{})
	n.updates[id] = set
	return err
}

func (n *fakeNode) limitOf(id string) int64 {
	n.mu.Lock()
	defer n.mu.Unlock()
	if r := n.updates[id]; r != nil && r.Memory != nil {
		return *r.Memory.Limit
	}
	return 0
}

func (n *fakeNode) InjectDevices(s *specs.Spec, names []string) error {
	s.Annotations = map[string]string{"injected": names[0]}
	return nil
}

func (n *fakeNode) BlockIOClass(class string) (*specs.LinuxBlockIO, error) {
	weight, known := map[string]uint16{"slow": 20}[class]
	if !known {
		return nil, fault.Invalid
	}
	return &specs.LinuxBlockIO{Weight: &weight}, nil
}

func (n *fakeNode) RDTClass(class string) (*specs.LinuxIntelRdt, error) {
	if class != "gold" {
		return nil, fault.Invalid
	}
	return &specs.LinuxIntelRdt{ClosID: class}, nil
}

func (n *fakeNode) addPod(p *Pod) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.pods = append(n.pods, p)
}

func (n *fakeNode) addContainer(c *Container) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.containers = append(n.containers, c)
}

func aPod(id string) *Pod {
	return &Pod{ID: id, Config: &cri.PodSandboxConfig{Metadata: &cri.PodSandboxMetadata{Name: "name-" + id, Uid: "uid", Namespace: "ns"}}}
}

func aContainer(pod *Pod, id string) *Container {
	return &Container{
		ID: id, Pod: pod, State: cri.ContainerState_CONTAINER_CREATED,
		Config: &cri.ContainerConfig{Metadata: &cri.ContainerMetadata{Name: "name-" + id}},
		Spec:   &specs.Spec{Process: &specs.Process{Args: []string{"sleep"}}, Linux: &specs.Linux{}},
	}
}

// start starts plugins on a socket whose path is short.
func start(t *testing.T, node Node, change func(*Config)) (*Plugins, Config) {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "nri")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	cfg := DefaultConfig()
	cfg.Socket, cfg.PluginDir, cfg.PluginConfigDir = filepath.Join(dir, "s"), filepath.Join(dir, "plugins"), filepath.Join(dir, "conf")
	cfg.RegistrationTimeout, cfg.RequestTimeout = wait.Limit, wait.Limit
	if change != nil {
		change(&cfg)
	}
	p, err := New(cfg, "1.2.3")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close(context.Background()) })
	if err := p.Start(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	return p, cfg
}

func connect(t *testing.T, p *Plugins, cfg Config, index string, plugin *nriplugin.Plugin) {
	t.Helper()
	before := p.active.Load()
	if err := plugin.Connect(t.Context(), cfg.Socket, index, "test"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(plugin.Close)
	wait.For(t, "the plugin to be told of all there is", func() bool { return p.active.Load() > before })
}

func TestPluginReceivesEventsInOrder(t *testing.T) {
	t.Parallel()
	p, cfg := start(t, &fakeNode{}, nil)
	plugin := &nriplugin.Plugin{}
	connect(t, p, cfg, "10", plugin)
	ctx := t.Context()
	pod := aPod("p")
	podOf := func() *Pod { return pod }
	c := aContainer(pod, "c")
	of := func() *Container { return c }
	release, err := p.RunPod(ctx, podOf)
	release()
	if err != nil {
		t.Fatal(err)
	}
	_, release, err = p.CreateContainer(ctx, of)
	release()
	if err != nil {
		t.Fatal(err)
	}
	p.ContainerCreated(ctx, of)
	if err := p.StartContainer(ctx, of); err != nil {
		t.Fatal(err)
	}
	p.ContainerStarted(ctx, of)
	if _, err := p.UpdateContainer(ctx, of, &Resources{}); err != nil {
		t.Fatal(err)
	}
	p.ContainerUpdated(ctx, of)
	p.StopContainer(ctx, of)
	p.RemoveContainer(ctx, of)
	if err := p.UpdatePod(ctx, podOf, nil, nil); err != nil {
		t.Fatal(err)
	}
	p.PodUpdated(ctx, podOf)
	p.StopPod(ctx, podOf)
	p.RemovePod(ctx, podOf)
	want := []string{
		"RunPodSandbox", "CreateContainer", "PostCreateContainer", "StartContainer", "PostStartContainer",
		"UpdateContainer", "PostUpdateContainer", "StopContainer", "RemoveContainer",
		"UpdatePodSandbox", "PostUpdatePodSandbox", "StopPodSandbox", "RemovePodSandbox",
	}
	if got := plugin.Names(""); !slices.Equal(got, want) {
		t.Errorf("told %q, want %q", got, want)
	}
	event := plugin.Events("c")[0]
	if event.Pod.GetName() != "name-p" || event.Pod.GetNamespace() != "ns" || event.Container.GetName() != "name-c" || event.Container.GetPodSandboxId() != "p" {
		t.Errorf("described as %v", event)
	}
	if report := p.Report(); report.Connected != 1 || len(report.Plugins) != 1 || report.Plugins[0].Name != "10-test" || report.Plugins[0].Requests != 14 {
		t.Errorf("reported as %+v", report)
	}
}

// An event is sent only once, so it is sent even if the caller leaves: that of
// StopContainer may leave when the container has just died, and a pod that ends
// cancels the creation of a container that has just been made.
func TestPluginIsToldWhenTheCallerHasLeft(t *testing.T) {
	t.Parallel()
	p, cfg := start(t, &fakeNode{}, nil)
	plugin := &nriplugin.Plugin{}
	connect(t, p, cfg, "10", plugin)
	pod := aPod("p")
	podEvents := PodEvents{Plugins: p, Describe: func() *Pod { return pod }}
	events := ContainerEvents{Plugins: p, Describe: func() *Container { return aContainer(pod, "c") }}
	if _, err := events.Create(t.Context(), events.Describe); err != nil {
		t.Fatal(err)
	}
	left, leave := context.WithCancel(t.Context())
	leave()
	events.Created(left)
	events.Stopped(left)
	events.Stopped(t.Context()) // the watcher of the container gets this one
	podEvents.Stopped(left)
	want := []string{"CreateContainer", "PostCreateContainer", "StopContainer", "StopPodSandbox"}
	if got := plugin.Names(""); !slices.Equal(got, want) {
		t.Errorf("told %q, want %q", got, want)
	}
}

// A plugin that connects between the event of a creation and the container's
// listing waits for the listing. The test is not parallel: it looks for the
// library's waiting goroutine.
func TestSynchronizationWaitsForCreation(t *testing.T) {
	node := &fakeNode{}
	p, cfg := start(t, node, nil)
	pod := aPod("p")
	release, err := p.RunPod(t.Context(), func() *Pod { return pod })
	if err != nil {
		t.Fatal(err)
	}
	plugin := connectDuringCreation(t, node, cfg)
	node.addPod(pod)
	release()
	wait.For(t, "the plugin to be connected", func() bool { return p.active.Load() == 1 })
	if !plugin.Knows(pod.ID) {
		t.Error("the plugin does not know the pod")
	}
}

// connectDuringCreation connects a plugin that must wait until the creation under way ends.
func connectDuringCreation(t *testing.T, node *fakeNode, cfg Config) *nriplugin.Plugin {
	t.Helper()
	plugin := &nriplugin.Plugin{}
	if err := plugin.Connect(t.Context(), cfg.Socket, "10", "test"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(plugin.Close)
	wait.For(t, "the library to wait for the creation", func() bool {
		stacks := make([]byte, 1<<20)
		return node.listed.Load() || strings.Contains(string(stacks[:runtime.Stack(stacks, true)]), "requestPluginSync")
	})
	if node.listed.Load() {
		t.Error("the plugin was synchronized during the creation")
	}
	return plugin
}

// A plugin that connects while pods and containers are made receives each of
// them: earlier ones in the synchronization, others by their events. Run it
// with -race.
func TestLatePluginMissesNothing(t *testing.T) {
	t.Parallel()
	node := &fakeNode{}
	p, cfg := start(t, node, nil)
	var makers sync.WaitGroup
	ids := make(chan string, 1000)
	stop := make(chan struct{})
	for _, maker := range []string{"a", "b", "c"} {
		makers.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				pod := aPod(maker + string(rune('0'+i%10)) + string(rune('a'+i/10%26)))
				release, err := p.RunPod(t.Context(), func() *Pod { return pod })
				if err != nil {
					t.Error(err)
				}
				node.addPod(pod)
				release()
				c := aContainer(pod, "c-"+pod.ID)
				_, release, err = p.CreateContainer(t.Context(), func() *Container { return c })
				if err != nil {
					t.Error(err)
				}
				node.addContainer(c)
				release()
				select {
				case ids <- pod.ID:
				case <-stop:
					return
				}
				ids <- c.ID
			}
		})
	}
	<-ids
	plugins := []*nriplugin.Plugin{{}, {}, {}}
	for i, plugin := range plugins {
		connect(t, p, cfg, fmt.Sprint(10+i), plugin)
	}
	for range 50 {
		<-ids
	}
	close(stop)
	done := make(chan struct{})
	go func() { makers.Wait(); close(done) }()
	for running := true; running; {
		select {
		case <-ids:
		case <-done:
			running = false
		}
	}
	for i, plugin := range plugins {
		for _, pod := range node.Pods() {
			if !plugin.Knows(pod.ID) {
				t.Errorf("plugin %d has not heard of pod %s", i, pod.ID)
			}
		}
		for _, c := range node.Containers() {
			if !plugin.Knows(c.ID) {
				t.Errorf("plugin %d has not heard of container %s", i, c.ID)
			}
		}
	}
}

func TestPluginRefuses(t *testing.T) {
	t.Parallel()
	p, cfg := start(t, &fakeNode{}, nil)
	connect(t, p, cfg, "10", &nriplugin.Plugin{Answer: nriplugin.Refuse("RunPodSandbox", 0)})
	release, err := p.RunPod(t.Context(), func() *Pod { return aPod("p") })
	release()
	if !errors.Is(err, fault.Denied) {
		t.Errorf("%v, want %v", err, fault.Denied)
	}
	if state := p.Report().Plugins[0]; state.Failures != 1 || state.LastError == "" {
		t.Errorf("the refusal is not in the report: %+v", state)
	}
}

func TestPluginAdjustsAndUpdatesOthers(t *testing.T) {
	t.Parallel()
	node := &fakeNode{}
	pod := aPod("p")
	other := aContainer(pod, "other")
	node.addContainer(other)
	p, cfg := start(t, node, nil)
	memory := func(id string, limit int64) *api.ContainerUpdate {
		u := &api.ContainerUpdate{}
		u.SetContainerId(id)
		u.SetLinuxMemoryLimit(limit)
		return u
	}
	plugin := &nriplugin.Plugin{
		Sync: func([]*api.PodSandbox, []*api.Container) ([]*api.ContainerUpdate, error) {
			return []*api.ContainerUpdate{memory("other", 1)}, nil
		},
		Create: func(*api.PodSandbox, *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
			a := &api.ContainerAdjustment{}
			a.AddEnv("NEW", "1")
			a.RemoveEnv("OLD")
			a.AddCDIDevice(&api.CDIDevice{Name: "vendor.com/device=gpu0"})
			return a, []*api.ContainerUpdate{memory("other", 2), memory("unknown", 3)}, nil
		},
		Update: func(c *api.Container, r *api.LinuxResources) ([]*api.ContainerUpdate, error) {
			return []*api.ContainerUpdate{memory(c.GetId(), 2*r.GetMemory().GetLimit().GetValue())}, nil
		},
	}
	connect(t, p, cfg, "10", plugin)
	wait.For(t, "the update after synchronization", func() bool { return node.limitOf("other") == 1 })
	c := aContainer(pod, "c")
	c.Spec.Process.Env = []string{"A=1", "OLD=2"}
	_, release, err := p.CreateContainer(t.Context(), func() *Container { return c })
	release()
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(c.Spec.Process.Env, []string{"A=1", "NEW=1"}) || c.Spec.Annotations["injected"] != "vendor.com/device=gpu0" {
		t.Errorf("spec is %+v, %+v", c.Spec.Process, c.Spec.Annotations)
	}
	wait.For(t, "the update after the creation", func() bool { return node.limitOf("other") == 2 })

	limit, shares := int64(10), uint64(3)
	r := &Resources{Memory: &specs.LinuxMemory{Limit: &limit}, CPU: &specs.LinuxCPU{Shares: &shares}}
	if _, err := p.UpdateContainer(t.Context(), func() *Container { return c }, r); err != nil {
		t.Fatal(err)
	}
	if *r.Memory.Limit != 20 || *r.CPU.Shares != 3 {
		t.Errorf("memory %d, shares %d; want 20, 3", *r.Memory.Limit, *r.CPU.Shares)
	}

	failed, err := plugin.Ask(memory("other", 5), memory("unknown", 6))
	if err != nil {
		t.Fatal(err)
	}
	if len(failed) != 1 || failed[0].GetContainerId() != "unknown" || node.limitOf("other") != 5 {
		t.Errorf("failed %v, limit %d", failed, node.limitOf("other"))
	}
}

// The library applies adjustments to its request, too. The container's own
// request, which is on record and is compared with that of a retry, stays
// unchanged.
func TestAdjustmentLeavesTheRequestAlone(t *testing.T) {
	t.Parallel()
	p, cfg := start(t, &fakeNode{}, nil)
	connect(t, p, cfg, "10", &nriplugin.Plugin{Create: func(*api.PodSandbox, *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
		return nriplugin.Everything(), nil, nil
	}})
	c := aContainer(aPod("p"), "c")
	c.Config.Annotations = map[string]string{"a": "1"}
	before := proto.Clone(c.Config)
	_, release, err := p.CreateContainer(t.Context(), func() *Container { return c })
	release()
	if err != nil {
		t.Fatal(err)
	}
	if !proto.Equal(c.Config, before) {
		t.Errorf("the request is %v now, was %v", c.Config, before)
	}
	if c.Spec.Annotations["from-plugin"] != "yes" {
		t.Errorf("annotations of the spec are %v", c.Spec.Annotations)
	}
}

// Whatever a plugin answers, the event ends, and the plugin stays connected.
func TestNonsenseAnswers(t *testing.T) {
	t.Parallel()
	pod := aPod("p")
	node := &fakeNode{}
	node.addContainer(aContainer(pod, "-"))
	p, cfg := start(t, node, nil)
	random := rand.New(rand.NewPCG(1, 2))
	updates := func() []*api.ContainerUpdate {
		all := []*api.ContainerUpdate{{}, {}, {}}
		for _, u := range all {
			nriplugin.Nonsense(random, u)
		}
		return all
	}
	connect(t, p, cfg, "10", &nriplugin.Plugin{
		Create: func(*api.PodSandbox, *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
			a := &api.ContainerAdjustment{}
			nriplugin.Nonsense(random, a)
			return a, updates(), nil
		},
		Update: func(*api.Container, *api.LinuxResources) ([]*api.ContainerUpdate, error) { return updates(), nil },
		Stop:   func(*api.Container) []*api.ContainerUpdate { return updates() },
	})
	refused := 0
	for range 200 {
		c := aContainer(pod, "c")
		of := func() *Container { return c }
		_, release, err := p.CreateContainer(t.Context(), of)
		release()
		if err != nil {
			refused++
		}
		_, _ = p.UpdateContainer(t.Context(), of, &Resources{})
		p.StopContainer(t.Context(), of)
	}
	if report := p.Report(); refused == 0 || report.Connected != 1 {
		t.Errorf("%d were refused, %d plugins are connected", refused, report.Connected)
	}
}

func TestUpdateThatNoPluginChanges(t *testing.T) {
	t.Parallel()
	p, cfg := start(t, &fakeNode{}, nil)
	connect(t, p, cfg, "10", &nriplugin.Plugin{})
	c := aContainer(aPod("p"), "c")
	limit := int64(10)
	r := &Resources{Memory: &specs.LinuxMemory{Limit: &limit}}
	if _, err := p.UpdateContainer(t.Context(), func() *Container { return c }, r); err != nil {
		t.Fatal(err)
	}
	if *r.Memory.Limit != 10 || r.CPU != nil {
		t.Errorf("resources are %+v now", r)
	}
}

func TestDeadPluginCostsNothing(t *testing.T) {
	t.Parallel()
	p, cfg := start(t, &fakeNode{}, nil)
	plugin := &nriplugin.Plugin{}
	connect(t, p, cfg, "10", plugin)
	plugin.Close()
	<-plugin.Closed()
	for range 2 {
		release, err := p.RunPod(t.Context(), func() *Pod { return aPod("p") })
		release()
		if err != nil {
			t.Fatal(err)
		}
	}
	wait.For(t, "the plugin to be forgotten", func() bool {
		p.PodUpdated(t.Context(), func() *Pod { return aPod("p") })
		return p.Report().Connected == 0
	})
}

func TestRequiredPlugin(t *testing.T) {
	t.Parallel()
	p, _ := start(t, &fakeNode{}, func(cfg *Config) {
		cfg.Validator.Enable, cfg.Validator.RequiredPlugins = true, []string{"policy"}
	})
	_, release, err := p.CreateContainer(t.Context(), func() *Container { return aContainer(aPod("p"), "c") })
	release()
	if !errors.Is(err, fault.Denied) {
		t.Errorf("%v, want %v", err, fault.Denied)
	}
}

// Without the answer of a required plugin nothing is created: neither by the request during which
// it is lost nor by a later one. Other plugins are dispensable.
func TestRequiredPluginThatDoesNotAnswer_nri_316(t *testing.T) {
	t.Parallel()
	requests := map[string]func(*Plugins) error{
		"RunPodSandbox": func(p *Plugins) error {
			release, err := p.RunPod(t.Context(), func() *Pod { return aPod("p") })
			release()
			return err
		},
		"CreateContainer": func(p *Plugins) error {
			_, release, err := p.CreateContainer(t.Context(), func() *Container { return aContainer(aPod("p"), "c") })
			release()
			return err
		},
		"StartContainer": func(p *Plugins) error {
			return p.StartContainer(t.Context(), func() *Container { return aContainer(aPod("p"), "c") })
		},
	}
	for event, request := range requests {
		for required, refusal := range map[string]error{"10-test": fault.Denied, "test": fault.Denied, "": nil} {
			t.Run(event+" "+required, func(t *testing.T) {
				t.Parallel()
				p, cfg := start(t, &fakeNode{}, func(cfg *Config) {
					cfg.Validator.Enable = true
					if required != "" {
						cfg.Validator.RequiredPlugins = []string{required}
					}
				})
				lost := &nriplugin.Plugin{}
				lost.Answer = func(e nriplugin.Event) error {
					if e.Name == event {
						lost.Close() // like a plugin that crashes
					}
					return nil
				}
				connect(t, p, cfg, "10", lost)
				want := refusal
				if event == "StartContainer" { // a start that is refused is final, and the plugin has answered for the creation
					want = nil
				}
				if err := request(p); !errors.Is(err, want) || (err == nil) != (want == nil) {
					t.Errorf("%v, want %v", err, want)
				}
				if err := requests["CreateContainer"](p); !errors.Is(err, refusal) || (err == nil) != (refusal == nil) {
					t.Errorf("a creation afterwards: %v, want %v", err, refusal)
				}
			})
		}
	}
}

func TestSocketOfAnotherRuntimeIsLeftAlone(t *testing.T) {
	t.Parallel()
	p, cfg := start(t, &fakeNode{}, nil)
	second, err := New(cfg, "1.2.3")
	if err != nil {
		t.Fatal(err)
	}
	if second.Start(t.Context(), &fakeNode{}) == nil {
		t.Error("the socket was taken away from the first")
	}
	if second.Report().Error == "" {
		t.Error("the report does not say why there are no plugins")
	}
	connect(t, p, cfg, "10", &nriplugin.Plugin{})
}

// Plugins change what every container gets: only root may be one, whatever the
// umask and the mode of the socket's directory.
func TestSocketIsPrivate(t *testing.T) {
	t.Parallel()
	p, cfg := start(t, &fakeNode{}, func(cfg *Config) {
		if err := os.Chmod(filepath.Dir(cfg.Socket), 0o777); err != nil {
			t.Fatal(err)
		}
	})
	info, err := os.Lstat(cfg.Socket)
	if err != nil || info.Mode() != os.ModeSocket|0o600 {
		t.Errorf("socket has mode %v (%v)", info.Mode(), err)
	}
	connect(t, p, cfg, "10", &nriplugin.Plugin{})
	if err := p.Close(context.Background()); err != nil {
		t.Error(err)
	}
	left, err := os.ReadDir(filepath.Dir(cfg.Socket))
	if err != nil || len(left) > 0 {
		t.Errorf("left in the socket's directory: %v (%v)", left, err)
	}
}

// A socket of the longest valid path works.
func TestSocketOfTheLongestPath(t *testing.T) {
	t.Parallel()
	const longest = 107 // sun_path without NUL: unix(7)
	for _, name := range []string{"nri.sock", "s.sock.s", "a-longer-name-than-that-of-the-default.sock"} {
		p, cfg := start(t, &fakeNode{}, func(cfg *Config) {
			dir := filepath.Dir(cfg.Socket)
			dir += "/" + strings.Repeat("d", longest-len(dir)-len("//")-len(name))
			cfg.Socket = filepath.Join(dir, name)
			if len(cfg.Socket) != longest || len(dir) > MaxSocketDir {
				t.Fatalf("%s has %d bytes", cfg.Socket, len(cfg.Socket))
			}
		})
		connect(t, p, cfg, "10", &nriplugin.Plugin{})
	}
}

// Users who may write beside the socket cannot keep plugins from connecting.
func TestSocketCannotBePreempted(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(t.TempDir(), "nri.sock")
	done := make(chan struct{})
	var work sync.WaitGroup
	defer work.Wait()
	defer close(done)
	work.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
				_ = os.Mkdir(filepath.Dir(hiddenSocket(socket)), 0o755)
			}
		}
	})
	for range 200 {
		if err := hideSocket(socket); err != nil {
			t.Fatal(err)
		}
	}
}

// A panic in a creation neither keeps plugins from connecting nor blocks later
// verbs.
func TestPanicReleasesHold(t *testing.T) {
	t.Parallel()
	p, cfg := start(t, &fakeNode{}, nil)
	connect(t, p, cfg, "10", &nriplugin.Plugin{})
	err := panics.Do(t.Context(), "test", func() error {
		_, err := p.RunPod(t.Context(), func() *Pod { panic("a test") })
		return err
	})
	if !errors.Is(err, fault.Internal) {
		t.Fatal(err)
	}
	connect(t, p, cfg, "20", &nriplugin.Plugin{})
}

// The names and errors of plugins take a bounded amount of memory.
func TestStatesAreBounded(t *testing.T) {
	t.Parallel()
	p := &Plugins{}
	for i := range 2 * maxStates {
		metrics{p}.RecordPluginInvocation(fmt.Sprint(i, strings.Repeat("x", 2*maxText)), "op", errors.New(strings.Repeat("y", 2*maxText)))
	}
	report := p.Report()
	if len(report.Plugins) != maxStates {
		t.Errorf("%d states are kept, want %d", len(report.Plugins), maxStates)
	}
	for _, state := range report.Plugins {
		if len(state.Name) > maxText || len(state.LastError) > maxText {
			t.Fatalf("a name of %d bytes, an error of %d", len(state.Name), len(state.LastError))
		}
	}
}

// Without plugins an event does not even describe the pod.
func TestNoPluginNoWork(t *testing.T) {
	t.Parallel()
	started, _ := start(t, &fakeNode{}, nil)
	for name, p := range map[string]*Plugins{"switched off": nil, "none connected": started} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pod := func() *Pod { t.Error("described a pod to nobody"); return aPod("p") }
			container := func() *Container { t.Error("described a container to nobody"); return aContainer(aPod("p"), "c") }
			release, err := p.RunPod(t.Context(), pod)
			release()
			if err != nil {
				t.Fatal(err)
			}
			_, release, err = p.CreateContainer(t.Context(), container)
			release()
			if err != nil {
				t.Fatal(err)
			}
			p.StopContainer(t.Context(), container)
			p.StopPod(t.Context(), pod)
		})
	}
}

// The server starts the plugins of its directory, and ends them with itself.
func TestPluginOfTheDirectory(t *testing.T) {
	t.Parallel()
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	node := &fakeNode{}
	p, _ := start(t, node, func(cfg *Config) {
		if err := os.Mkdir(cfg.PluginDir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(program, filepath.Join(cfg.PluginDir, "15-directory")); err != nil {
			t.Fatal(err)
		}
	})
	release, err := p.RunPod(t.Context(), func() *Pod { return aPod("p") })
	release()
	if !errors.Is(err, fault.Denied) {
		t.Errorf("%v, want %v", err, fault.Denied)
	}
	if report := p.Report(); report.Connected != 1 || report.Plugins[0].Name != "15-directory" {
		t.Errorf("reported as %+v", report)
	}
	if !node.listed.Load() {
		t.Error("the plugin was not told of what there is")
	}
}

// A start without plugins does not describe all pods and containers for no
// receiver. The first plugin that connects receives them.
func TestStartWithoutPlugins(t *testing.T) {
	t.Parallel()
	node := &fakeNode{}
	node.addPod(aPod("p"))
	p, cfg := start(t, node, nil)
	if node.listed.Load() {
		t.Error("the pods were listed")
	}
	plugin := &nriplugin.Plugin{}
	connect(t, p, cfg, "10", plugin)
	if !plugin.Knows("p") {
		t.Error("the plugin does not know the pod")
	}
}
