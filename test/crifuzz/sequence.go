package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/images"
	"github.com/crius-run/crius/test/kit/inventory"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/scene"
)

// world is a node on which sequences run one after the other.
type world struct {
	*scene.World
	conns    []*grpc.ClientConn
	pictures []picture
	read     int // bytes of the server's log
}

func newWorld(ctx context.Context) (_ *world, err error) {
	w := new(world)
	if w.World, err = scene.New(ctx, node.Options{Config: "[runtime]\ncriu = \"\"\n"}); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.close())
		}
	}()
	for range clients {
		conn, err := node.Connect(w.Socket())
		if err != nil {
			return nil, err
		}
		w.conns = append(w.conns, conn)
	}
	if err := w.push(); err != nil {
		return nil, err
	}
	announced := &cri.UpdateRuntimeConfigRequest{RuntimeConfig: &cri.RuntimeConfig{NetworkConfig: &cri.NetworkConfig{PodCidr: podCIDR}}}
	if _, err := w.Runtime().UpdateRuntimeConfig(ctx, announced); err != nil { // which a file records from then on
		return nil, err
	}
	return w, w.Settle(ctx, scene.Handlers...)
}

// push gives the registry the images that the sequences pull and remove.
func (w *world) push() error {
	for name, tags := range map[string][]string{"probe": {"latest"}, "one": {"latest"}, "two": {"latest", "again"}} {
		built, err := images.Build(func(c *imagespec.ImageConfig) {
			if name != "probe" {
				c.Labels = map[string]string{"name": name}
			}
		})
		if err != nil {
			return err
		}
		p := picture{id: built.ID(), absent: name != "probe", here: name == "probe"}
		for _, tag := range tags {
			w.Registry.Push(name, tag, built)
			p.refs = append(p.refs, node.RegistryHost+"/"+name+":"+tag)
		}
		if p.here {
			p.tags = p.refs
		}
		w.pictures = append(w.pictures, p)
	}
	slices.SortFunc(w.pictures, func(a, b picture) int { return strings.Compare(a.refs[0], b.refs[0]) })
	return nil
}

func (w *world) close() error {
	var errs []error
	for _, conn := range w.conns {
		errs = append(errs, conn.Close())
	}
	return errors.Join(append(errs, w.Close())...)
}

// sequence is a run of turns, each of which depends on the seed and on the
// objects that exist by then.
type sequence struct {
	w     *world
	seed  uint64
	turns int
	tally *tally
	// rest is how long the node may take to be as it was before.
	rest  time.Duration
	trace []string // the calls, one per line
}

// failure is what is wrong after that many turns.
type failure struct {
	turns int
	err   error
}

func (f *failure) Error() string { return fmt.Sprintf("turn %d: %v", f.turns, f.err) }

func (f *failure) Unwrap() error { return f.err }

// run makes the calls of a sequence. A violation is a *failure.
func (s *sequence) run(ctx context.Context) error {
	all, err := surface()
	if err != nil {
		return err
	}
	m := new(model)
	for _, p := range s.w.pictures {
		m.pictures = append(m.pictures, &p)
	}
	p := &planner{
		model: m, surface: all, rules: rules(), logs: s.w.Path("logs"),
		gen: &generator{dir: s.w.Path("fuzz"), cgroup: s.w.CgroupParent()},
	}
	for turn := range s.turns {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err := s.turn(ctx, m, p.calls(s.seed, turn)); err != nil {
			return &failure{turn + 1, err}
		}
	}
	if err := s.end(ctx); err != nil {
		return &failure{s.turns, fmt.Errorf("at the end: %w", err)}
	}
	return nil
}

// turn makes calls and checks their results. Several run concurrently, except
// that two with the same effect come from one client, which repeats itself.
func (s *sequence) turn(ctx context.Context, m *model, calls []*call) error {
	m.begin(calls)
	repeated := len(calls) == 2 && calls[0].wait < calls[1].wait && calls[0].rpc == calls[1].rpc
	var group sync.WaitGroup
	for _, c := range calls {
		if repeated {
			s.send(ctx, c)
			continue
		}
		group.Go(func() { s.send(ctx, c) })
	}
	group.Wait()
	for _, c := range calls {
		s.trace = append(s.trace, c.String())
		s.tally.count(c)
	}
	err := m.finish(calls)
	if err == nil {
		err = m.observe(ctx, s.w.World)
	}
	if err == nil && s.w.PID() == 0 {
		err = fmt.Errorf("the server has ended: %w", s.w.ExitErr())
	}
	return err
}

func (s *sequence) send(ctx context.Context, c *call) {
	ctx, cancel := context.WithTimeout(ctx, c.wait)
	defer cancel()
	c.replies, c.err = c.rpc.invoke(ctx, s.w.conns[c.conn], c.api, c.wire)
}

// end removes everything and checks that the node is as before.
func (s *sequence) end(ctx context.Context) error {
	if err := s.strike(ctx); err != nil {
		return err
	}
	if err := s.w.Clean(ctx, s.w.Empty, s.rest); err != nil {
		return err
	}
	return s.w.complaints()
}

func (s *sequence) strike(ctx context.Context) error {
	pods, err := s.w.Runtime().ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	if err != nil {
		return err
	}
	for _, p := range pods.Items {
		if _, err := s.w.Runtime().StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: p.Id}); err != nil {
			return fmt.Errorf("StopPodSandbox: %w", err)
		}
		if _, err := s.w.Runtime().RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: p.Id}); err != nil {
			return fmt.Errorf("RemovePodSandbox: %w", err)
		}
	}
	containers, err := s.w.Runtime().ListContainers(ctx, &cri.ListContainersRequest{})
	if err != nil || len(containers.Containers) > 0 {
		return fmt.Errorf("without pods there are containers: %v (%w)", containers.GetContainers(), err)
	}
	for _, p := range s.w.pictures {
		if p.here {
			_, err = s.w.Images().PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: p.refs[0]}})
		} else {
			_, err = s.w.Images().RemoveImage(ctx, &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: p.id}})
		}
		if err != nil {
			return err
		}
	}
	s.w.removeParents()
	return errors.Join(os.RemoveAll(s.w.Path("logs")), os.MkdirAll(s.w.Path("logs"), 0o755), os.RemoveAll(s.w.Path("fuzz")))
}

// removeParents removes the cgroups that pods had as parents, as a kubelet does
// with its own. A parent in which crius has left something stays.
func (w *world) removeParents() {
	all := inventory.Cgroups(w.CgroupParent())
	for _, dir := range slices.Backward(all) {
		name := filepath.Base(dir)
		if name != filepath.Base(w.CgroupParent()) && !strings.HasPrefix(name, "crius-") {
			_ = os.Remove(dir) // otherwise it is found later
		}
	}
}

// complaints returns an error for lines of the server's log that require
// action, and for faults. It does not read lines twice.
func (w *world) complaints() error {
	if faults := w.Faults(); len(faults) > 0 {
		return fmt.Errorf("the server's log has %d faults; the first:\n%s", len(faults), faults[0])
	}
	data, err := os.ReadFile(w.LogFile())
	if err != nil {
		return err
	}
	fresh := string(data[w.read:])
	w.read = len(data)
	for line := range strings.Lines(fresh) {
		if strings.Contains(line, "level=ERROR") && !(strings.Contains(line, "code=Unknown") && byRuntime(line)) {
			return fmt.Errorf("the server's log has: %.1000s", line)
		}
	}
	return nil
}

// tally counts answers.
type tally struct {
	mu    sync.Mutex
	calls map[string]map[codes.Code]int
}

func (t *tally) count(c *call) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.calls == nil {
		t.calls = map[string]map[codes.Code]int{}
	}
	if t.calls[c.rpc.name] == nil {
		t.calls[c.rpc.name] = map[codes.Code]int{}
	}
	t.calls[c.rpc.name][status.Code(c.err)]++
}

// String returns a line for each RPC.
func (t *tally) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var out strings.Builder
	total := 0
	names := make([]string, 0, len(t.calls))
	for name := range t.calls {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		fmt.Fprintf(&out, "%-26s", name)
		for code := codes.OK; code <= codes.Unauthenticated; code++ {
			if n := t.calls[name][code]; n > 0 {
				fmt.Fprintf(&out, " %v %d", code, n)
				total += n
			}
		}
		fmt.Fprintln(&out)
	}
	fmt.Fprintf(&out, "%d calls of %d RPCs\n", total, len(names))
	return out.String()
}

// lastCalls returns the end of the trace.
func (s *sequence) lastCalls(most int) string {
	return strings.Join(s.trace[max(0, len(s.trace)-most):], "\n")
}
