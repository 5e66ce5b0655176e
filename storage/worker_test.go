package storage

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/opencontainers/go-digest"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/race"
	"github.com/crius-run/crius/storage/unpack"
	"github.com/crius-run/crius/storage/unpack/wire"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/registry"
	"github.com/crius-run/crius/test/kit/wait"
)

// workerJob is the descriptor of a worker that is its job's lock.
const workerJob = 4

// workers are the pids of the workers that pull into the node's store.
func (n *node) workers() (pids []int) {
	n.t.Helper()
	jobs, err := filepath.Glob(fmt.Sprintf("/proc/[0-9]*/fd/%d", workerJob))
	if err != nil {
		n.t.Fatal(err)
	}
	for _, job := range jobs {
		dir := filepath.Dir(filepath.Dir(job))
		target, _ := os.Readlink(job)
		cmdline, _ := os.ReadFile(filepath.Join(dir, "cmdline"))
		if string(cmdline) != wire.Name+"\x00" || !strings.HasPrefix(target, n.cfg.Root+"/") {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(dir))
		if err != nil {
			n.t.Fatal(err)
		}
		pids = append(pids, pid)
	}
	return pids
}

// stalledWorker begins a pull whose last layer does not come, and returns its worker.
func (n *node) stalledWorker(req PullRequest, r *registry.Registry, stalled string, begin func(PullRequest)) (pid int) {
	n.t.Helper()
	r.Inject(registry.Fault{Path: "/blobs/" + stalled, Do: registry.Stall(100 << 10)})
	begin(req)
	wait.For(n.t, "the worker to have a part of a layer", func() bool {
		asked := slices.ContainsFunc(r.Requests(), func(q registry.Request) bool { return strings.Contains(q.Path, stalled) })
		return asked && len(n.workers()) == 1
	})
	return n.workers()[0]
}

func procFile(t testing.TB, pid int, name string) string {
	t.Helper()
	content, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(content)
}

// A worker has the privileges that docs/security.md says, and no secret of the
// request anywhere.
func TestPullWorkerIsConfined(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := noise(t, 1000, 400<<10)
	r := serve(t, "app", "1", a)
	r.Require(registry.Auth{Username: "joe", Password: "correct horse"})
	ctx, cancel := context.WithCancel(testContext(t))
	ended := make(chan error, 1)
	pid := n.stalledWorker(PullRequest{Image: r.Addr() + "/app:1", Auth: passwordOf("joe", "correct horse")}, r, layerDigest(a, 1), func(req PullRequest) {
		go func() {
			_, err := n.Pull(ctx, req)
			ended <- err
		}()
	})
	status := procFile(t, pid, "status")
	const caps = "000000008824001b" // chown, dac_override, fowner, fsetid, sys_chroot, sys_admin, mknod, setfcap
	for _, want := range []string{
		"CapInh:\t0000000000000000", "CapPrm:\t" + caps, "CapEff:\t" + caps, "CapBnd:\t" + caps, "CapAmb:\t0000000000000000",
		"NoNewPrivs:\t1", "Seccomp:\t2",
	} {
		if !strings.Contains(status, want+"\n") {
			t.Errorf("the worker's status lacks %q:\n%s", want, status)
		}
	}
	if got := procFile(t, pid, "oom_score_adj"); got != "1000\n" {
		t.Errorf("oom_score_adj %q", got)
	}
	limits := strings.Join(strings.Fields(procFile(t, pid, "limits")), " ")
	data := "Max data size 1073741824 1073741824 bytes"
	if race.Enabled {
		data = "Max data size unlimited unlimited bytes"
	}
	for _, want := range []string{data, "Max core file size 0 0 bytes", "Max open files 1024 1024 files"} {
		if !strings.Contains(limits, want) {
			t.Errorf("the worker's limits lack %q: %s", want, limits)
		}
	}
	var names []string
	for variable := range strings.SplitSeq(strings.TrimRight(procFile(t, pid, "environ"), "\x00"), "\x00") {
		name, _, _ := strings.Cut(variable, "=")
		names = append(names, name)
	}
	names = slices.DeleteFunc(names, func(name string) bool { return race.Enabled && name == "GORACE" })
	if want := []string{"_CONTAINERS_OVERLAY_DISABLE_IDMAP", "GOMEMLIMIT", "GOGC"}; !slices.Equal(names, want) {
		t.Errorf("the worker's environment has %q, want %q", names, want)
	}
	if got := procFile(t, pid, "cmdline"); got != wire.Name+"\x00" {
		t.Errorf("cmdline %q", got)
	}
	if !regexp.MustCompile(`(?m)^NSpid:.*\t1$`).MatchString(status) {
		t.Errorf("the worker is not the first process of a PID namespace:\n%s", status)
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled pull: %v", err)
	}
	if left := n.workers(); len(left) > 0 {
		t.Errorf("workers %d are left", left)
	}
	n.empty()
}

// Whatever kills a worker, the pull fails in a way that has the kubelet try again,
// and nothing is left.
func TestKilledPullWorker(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := noise(t, 1000, 400<<10)
	r := serve(t, "app", "1", a)
	ended := make(chan error, 1)
	pid := n.stalledWorker(PullRequest{Image: r.Addr() + "/app:1"}, r, layerDigest(a, 1), func(req PullRequest) {
		go func() {
			_, err := n.Pull(testContext(t), req)
			ended <- err
		}()
	})
	n.waitLayers(1)                                                                      // the first one is unpacked
	for _, place := range []string{"root/overlay/tempdirs", "root/overlay-layers/tmp"} { // as of one that is being unpacked
		if err := os.MkdirAll(filepath.Join(n.dir, place, "temp-dir-1"), 0o700); err != nil {
			t.Fatal(err)
		}
		n.write(place+"/lock-1", "")
	}
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	err := <-ended
	if !errors.Is(err, fault.Unavailable) || !strings.Contains(err.Error(), "killed") || strings.Contains(err.Error(), "registry") {
		t.Errorf("%v", err)
	}
	n.empty()
	r.Heal()
	n.pull(r.Addr() + "/app:1")
	n.noDebris()
}

// A worker ends with its server, and the next start sweeps what both have left.
func TestPullWorkerEndsWithServer(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := noise(t, 1000, 400<<10)
	r := serve(t, "app", "1", a)
	if err := n.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	var server *child
	n.stalledWorker(PullRequest{Image: r.Addr() + "/app:1"}, r, layerDigest(a, 1), func(req PullRequest) {
		server = n.child("pull", req.Image)
	})
	server.kill()
	wait.For(t, "the worker to end", func() bool { return len(n.workers()) == 0 })
	n.open()
	n.empty()
	r.Heal()
	n.pull(r.Addr() + "/app:1")
}

// An image that is present is pulled without a worker, which none could be here.
func TestPresentImageNeedsNoWorker(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	base := layer(t, image.Text("etc", "here already"))
	a := build(t, image.Image{Layers: []image.Layer{base}})
	r := serve(t, "repo", "1", a)
	r.Push("repo", "2", a)
	r.Push("repo", "labelled", build(t, image.Image{Layers: []image.Layer{base}, Config: imagespec.ImageConfig{Labels: map[string]string{"a": "b"}}}))
	r.Push("repo", "new", motd(t, "new"))
	n.pull(r.Addr() + "/repo:1")
	n.write("no program", "")
	none, err := unpack.OpenProgram(filepath.Join(n.dir, "no program"))
	ok(t, err)
	program := n.puller.Program
	n.puller.Program = none
	t.Cleanup(func() { ok(t, n.puller.Program.Close()); n.puller.Program = program })
	n.pull(r.Addr() + "/repo:1")
	if img := n.pull(r.Addr() + "/repo:2"); len(img.RepoTags) != 2 {
		t.Errorf("tags %q", img.RepoTags)
	}
	n.pull(r.Addr() + "/repo:labelled")
	if _, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/repo:new"}); err == nil {
		t.Error("a worker was started all the same")
	}
}

// While a registry is asked for an image of an unknown name, a worker is started for it. Whatever becomes of the pull,
// nothing is left.
func TestWorkerWaitsForTheRegistry(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := motd(t, "x")
	r := serve(t, "app", "1", a)
	asked := func(name string, workers int, end func(cancel, answer func())) error {
		ctx, cancel := context.WithCancel(testContext(t))
		defer cancel()
		silent, answer := context.WithCancel(ctx)
		r.Forget()
		r.Inject(registry.Fault{Path: "/manifests/", Times: 1, Do: pausedAfter(0, silent.Done())})
		ended := make(chan error, 1)
		go func() {
			_, err := n.Pull(ctx, PullRequest{Image: name})
			ended <- err
		}()
		wait.For(t, "the registry to be asked, and the worker", func() bool { return len(r.Requests()) > 0 && len(n.workers()) >= workers })
		if got := len(n.workers()); got != workers {
			t.Errorf("%d workers while the registry is asked for %s, want %d", got, name, workers)
		}
		end(cancel, answer)
		err := <-ended
		if left := n.workers(); len(left) > 0 {
			t.Errorf("workers %d are left", left)
		}
		n.noDebris()
		return err
	}
	if err := asked(r.Addr()+"/app:1", 1, func(cancel, _ func()) { cancel() }); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	if err := asked(r.Addr()+"/app:none", 1, func(_, answer func()) { answer() }); err == nil {
		t.Error("an image was pulled that the registry has not got")
	}
	n.empty()
	// The kernel kills workers before anything else, and this one is none of the image's doing.
	if err := asked(r.Addr()+"/app:1", 1, func(_, answer func()) {
		for _, pid := range n.workers() {
			ok(t, unix.Kill(pid, unix.SIGKILL))
		}
		answer()
	}); err != nil {
		t.Errorf("its worker was killed meanwhile: %v", err)
	}
	n.list() // as kubelets do all the time
	if err := asked(r.Addr()+"/app:1", 0, func(cancel, _ func()) { cancel() }); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	r.Push("model", "1", model(t, "weights"))
	n.pull(r.Addr() + "/model:1")
	if err := asked(r.Addr()+"/model:1", 0, func(_, answer func()) { answer() }); err != nil {
		t.Errorf("an artifact: %v", err)
	}
}

// A new image may turn out to be an artifact, whose files can take hours: no worker waits meanwhile.
func TestNoWorkerWaitsForAnArtifact(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	r := serve(t, "model", "1", model(t, "weights"))
	until, finish := context.WithCancel(testContext(t))
	asked := make(chan struct{}, 8)
	r.Inject(registry.Fault{Path: "/blobs/", Do: func(answer http.Handler, stop <-chan struct{}) http.Handler {
		asked <- struct{}{}
		return held(until.Done())(answer, stop)
	}})
	ended := make(chan error, 1)
	go func() {
		_, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/model:1"})
		ended <- err
	}()
	<-asked
	if workers, jobs := n.workers(), n.entries("root/crius-pulls"); len(workers)+len(jobs) > 0 {
		t.Errorf("workers %d and jobs %q while the file is downloaded", workers, jobs)
	}
	finish()
	ok(t, <-ended)
	n.noDebris()
}

// A pull that cannot say what its job is for leaves neither its worker nor its job.
func TestJobThatCannotBegin(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	r := serve(t, "app", "1", motd(t, "x"))
	r.Inject(registry.Fault{Path: "/manifests/", Times: 1, Do: func(answer http.Handler, _ <-chan struct{}) http.Handler {
		for _, job := range n.entries("root/crius-pulls") {
			ok(t, os.Mkdir(filepath.Join(n.dir, "root/crius-pulls", job, "image"), 0o700)) // where a file is to be
		}
		return answer
	}})
	if _, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1"}); err == nil || !strings.Contains(err.Error(), "is a directory") {
		t.Errorf("%v", err)
	}
	if left := n.workers(); len(left) > 0 {
		t.Errorf("workers %d are left", left)
	}
	n.empty()
	n.pull(r.Addr() + "/app:1")
}

// cgroupLater lets no worker in but those for which it is asked again.
type cgroupLater struct{ asked atomic.Int32 }

func (c *cgroupLater) Enter(context.Context, string, int) (leave func(), err error) {
	if c.asked.Add(1) == 1 {
		return nil, unix.EAGAIN
	}
	return func() {}, nil
}

// What the node lacks while the registry is asked fails no pull if it is there when the worker has work.
func TestWorkerThatCannotWait(t *testing.T) {
	t.Parallel()
	for what, spoil := range map[string]func(*node) (mend func()){
		"no cgroup": func(n *node) func() {
			n.puller.Cgroups = &cgroupLater{}
			return func() {}
		},
		"no directory": func(n *node) func() {
			n.write("root/overlay/tempdirs", "")
			return func() { ok(t, os.Remove(filepath.Join(n.dir, "root/overlay/tempdirs"))) }
		},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			r := serve(t, "app", "1", motd(t, "x"))
			mend := spoil(n)
			r.Inject(registry.Fault{Path: "/manifests/", Times: 1, Do: func(answer http.Handler, _ <-chan struct{}) http.Handler {
				mend()
				return answer
			}})
			n.pull(r.Addr() + "/app:1")
			n.noDebris()
		})
	}
}

// Without crius-unpack the server's own program unpacks.
func TestPullWithoutTheUnpacker(t *testing.T) {
	t.Parallel()
	n := newNode(t, func(o *Options) { o.Unpacker = "" })
	r := serve(t, "app", "1", motd(t, "x"))
	if img := n.pull(r.Addr() + "/app:1"); len(img.RepoTags) != 1 {
		t.Errorf("tags %q", img.RepoTags)
	}
}

// A worker that is busy with a layer which has come as a whole, and would be for minutes, ends with
// its pull, and so does what it has unpacked.
func TestBusyPullWorkerEndsWithItsPull(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	files := []image.File{image.Text("begun", "x")}
	for i := range 100 { // names of tar itself, which are short
		files = append(files, image.Dir(fmt.Sprintf("d%d", i)), image.Text(fmt.Sprintf("d%d/a/b/c/d/e/f", i), ""), image.Text(fmt.Sprintf("d%d", i), ""))
	}
	busy := layer(t, files...)
	archive, err := gzip.NewReader(bytes.NewReader(busy.Blob))
	ok(t, err)
	entries, err := io.ReadAll(archive)
	ok(t, err)
	busy = image.RawLayer(entries[:len(entries)-1024]) // without its end
	busy.Blob = bytes.Repeat(busy.Blob, 4000)          // 1.2 million entries, in parts of gzip
	busy.Digest = digest.FromBytes(busy.Blob)          // that of the content is never compared
	r := serve(t, "app", "1", build(t, image.Image{Layers: []image.Layer{busy}}))
	ctx, cancel := context.WithCancel(testContext(t))
	ended := make(chan error, 1)
	go func() {
		_, err := n.Pull(ctx, PullRequest{Image: r.Addr() + "/app:1"})
		ended <- err
	}()
	wait.For(t, "the worker to unpack the layer, of which all has come", func() bool {
		begun, _ := filepath.Glob(filepath.Join(n.cfg.Root, "overlay/tempdirs/crius-unpack-*/*/begun"))
		came, _ := filepath.Glob(filepath.Join(n.cfg.Root, "crius-downloads/*"))
		whole := slices.ContainsFunc(came, func(path string) bool {
			st, err := os.Stat(path)
			return err == nil && st.Size() == int64(len(busy.Blob))
		})
		return len(begun) > 0 && whole && len(n.workers()) == 1
	})
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	if left := n.workers(); len(left) > 0 {
		t.Errorf("workers %d are left", left)
	}
	n.empty()
	n.noDebris()
	if left, _ := filepath.Glob(filepath.Join(n.cfg.Root, "overlay/tempdirs/*")); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}
