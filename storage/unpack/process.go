package unpack

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"os"
	"os/exec"
	"regexp"
	"sync"
	"syscall"
	"time"

	"go.podman.io/image/v5/types"
	cstorage "go.podman.io/storage"
	"go.podman.io/storage/pkg/reexec"
	storagetypes "go.podman.io/storage/types"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/capture"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/inherit"
	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/internal/race"
	"github.com/crius-run/crius/internal/thread"
	"github.com/crius-run/crius/storage/liblog"
	"github.com/crius-run/crius/storage/pull/progress"
	"github.com/crius-run/crius/storage/pull/pullerror"
	"github.com/crius-run/crius/storage/registry/download"
	"github.com/crius-run/crius/storage/registry/source"
	"github.com/crius-run/crius/storage/unpack/copier"
	"github.com/crius-run/crius/storage/unpack/wire"
	"github.com/opencontainers/go-digest"
)

// grace is how long a worker may clean up after its pull was cancelled.
const grace = 10 * time.Second

const maxLogLines = 100 // of a worker; later ones are dropped

// outOfMemory matches what Go's runtime writes at RLIMIT_DATA. The third alternative is for threads of libc,
// the last for the garbage collector of Go 1.26, which uses memory that it has not got.
var outOfMemory = regexp.MustCompile(`out of memory|cannot allocate memory|pthread_create failed|sigcode=1 addr=0x0\s+goroutine 0 .*\s+runtime\.\(\*spanQueue\)\.`)

// Task is a worker's task for one image.
type Task struct {
	Source    *source.Image
	Library   cstorage.Store              // destination
	Store     storagetypes.StoreOptions   // of Library, for Copy
	Free      func(context.Context) error // waits until no other program has locked the Library; fault.Timeout: call it again
	Job       *os.File                    // a lock that the worker inherits: nobody sweeps files that it may still write
	Temporary string                      // directory for large files
	Parallel  int                         // layers that are fetched at a time
	Unpacking int                         // layers that are unpacked at a time
	Writable  []string                    // directories of the store, in which the worker of Copy changes files
	Secrets   []string                    // hidden from the worker
	Downloads *download.Pull
	Program   *Program                      // for Unpack
	Cgroups   Cgroups                       // nil: the worker runs in the cgroup of this process
	Pod       string                        // cgroup parent of the pod for which the image is pulled; empty: there is none
	Events    chan types.ProgressProperties // receives progress

	RepeatRoom int64   // see layers.NewUnpacker
	Worker     *Worker // that waits for this task; nil: Unpack starts one
}

// Cgroups are the cgroups in which workers run.
type Cgroups interface {
	// Enter moves a process to the cgroup for a pod with this cgroup parent, which may be empty.
	// The caller must call leave when the process has ended.
	Enter(ctx context.Context, pod string, pid int) (leave func(), err error)
}

// Copy has a worker copy the image, whatever the format of its layers, and returns its id. Errors
// are those of Unpack.
func (t Task) Copy(ctx context.Context) (id string, err error) {
	w := &process{Task: t, cmd: reexec.CommandContext(ctx, copier.Name), writable: append([]string{t.Temporary}, t.Writable...)}
	last, err := w.carryOut(ctx, copier.Order{
		Store: t.Store, Temporary: t.Temporary, Parallel: t.Parallel, RepeatRoom: t.RepeatRoom,
		Documents: t.Source.Documents, Name: t.Source.Name.String(), Signatures: t.Source.Signatures,
	})
	if err != nil {
		return "", err
	}
	if want := t.Source.ImageID(); last.Copied == "" || want != "" && last.Copied != want {
		return "", fmt.Errorf("pull worker stored image %s instead of %s: %w", pullerror.Cut(last.Copied), want, fault.Invalid)
	}
	return last.Copied, nil
}

// carryOut has the worker carry out an order and returns its last message.
func (w *process) carryOut(ctx context.Context, order any) (last wire.Message, err error) {
	if err := w.begin(ctx); err != nil {
		return last, err
	}
	w.blobs = w.Source.Blobs()
	return w.run(ctx, order)
}

// begin starts the worker and places it. It waits for its order then.
func (w *process) begin(ctx context.Context) error {
	if err := w.start(); errors.Is(err, fault.Exhausted) {
		return fmt.Errorf("start pull worker: %w", err)
	} else if err != nil {
		return fmt.Errorf("start pull worker %s (if that goes on, install crius again and restart it): %w", w.cmd.Args[0], err)
	}
	w.leave, w.unplaced = w.place(ctx)
	return nil
}

// abandon ends a worker that gets no order.
func (w *process) abandon() {
	_ = w.cmd.Process.Kill()
	_ = w.stdin.Close()
	_ = w.conn.Close()
	<-w.ended
	w.leave()
}

// process is a worker from the server's point of view.
type process struct {
	Task

	cmd       *exec.Cmd
	room      *os.File   // in which it runs; nil: none
	writable  []string   // the only directories in which it changes files
	calls     []uint32   // refused to it, besides refusedCalls
	questions *questions // nil: it asks none

	stdin  io.WriteCloser // for its order
	conn   *net.UnixConn
	stderr capture.Head
	ended  chan struct{}
	end    error // valid after ended is closed

	leave    func()                 // the cgroup; nil: the worker has not been placed
	unplaced error                  // why it could not be placed
	blobs    map[digest.Digest]bool // that the worker may name
	heard    bool                   // it has sent a message
	logged   int                    // lines for the log
	fetching sync.WaitGroup
	mu       sync.Mutex
	failed   []error // by fetch; nil: it has not failed
	underway int     // fetches
}

// start starts the worker. It gets its limits before its order. It ends with this process and, in a
// PID namespace of its own, takes all processes with it that it has started.
func (w *process) start() error {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socketpair", err)
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), "worker"), os.NewFile(uintptr(pair[1]), "server")
	defer theirs.Close()
	conn, err := net.FileConn(ours)
	_ = ours.Close()
	if err != nil {
		return err
	}
	w.conn = conn.(*net.UnixConn)
	w.stderr.Max = 4 << 10
	w.cmd.Dir = "/"
	w.cmd.Env = append(race.Environ(),
		// No PATH: containers/image, too, would have programs decompress that are found there.
		"_CONTAINERS_OVERLAY_DISABLE_IDMAP=yes", // see storage.openLibrary
		fmt.Sprintf("GOMEMLIMIT=%d", memory/4*3),
		"GOGC=400", // it is short-lived
	)
	w.cmd.Stderr = &w.stderr
	w.cmd.ExtraFiles = append([]*os.File{theirs, w.Job}, w.cmd.ExtraFiles...)
	w.cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID, Pdeathsig: unix.SIGKILL}
	w.cmd.Cancel = w.conn.CloseWrite
	w.cmd.WaitDelay = grace
	if w.stdin, err = w.cmd.StdinPipe(); err != nil {
		return errors.Join(err, w.conn.Close())
	}
	started := make(chan error, 1)
	w.ended = make(chan struct{})
	// The worker inherits the thread's confinement, and dies with the thread.
	go func() {
		defer close(w.ended)
		w.end = thread.Run(func() error { return w.runConfined(started) })
	}()
	if err := inherit.Explain(<-started); err != nil {
		return errors.Join(err, w.conn.Close(), w.stdin.Close())
	}
	return nil
}

// runConfined runs the worker on a thread that it confines.
func (w *process) runConfined(started chan<- error) error {
	var err error
	if w.room != nil {
		err = enterRoom(w.room, w.writable)
	}
	if err == nil {
		err = confine(w.writable, w.calls)
	}
	if err == nil {
		err = w.cmd.Start()
	}
	started <- err
	if err != nil {
		return err
	}
	return w.cmd.Wait()
}

// run gives the worker its order, serves it until it ends, and returns its last message.
func (w *process) run(ctx context.Context, order any) (last wire.Message, err error) {
	defer w.conn.Close()
	fetching, cancel := context.WithCancel(ctx)
	defer cancel()
	defer w.leave()
	err = w.unplaced
	if err == nil {
		err = json.NewEncoder(w.stdin).Encode(order)
	}
	dead := false // before its order, without which it would end, too
	if err != nil {
		dead = errors.Is(w.cmd.Process.Kill(), os.ErrProcessDone)
	}
	if closeErr := w.stdin.Close(); closeErr != nil {
		err = errors.Join(err, closeErr)
		_ = w.cmd.Process.Kill()
	}
	if w.questions != nil {
		w.questions.answer(ctx)
	}
	err = errors.Join(err, panics.Do(ctx, "serve pull worker", func() error { last = w.serve(fetching); return nil }))
	_ = w.cmd.Process.Kill() // it has sent its last message
	cancel()
	<-w.ended
	w.fetching.Wait()
	if w.questions != nil {
		w.questions.close()
	}
	switch {
	case w.unplaced != nil && !dead:
		return wire.Message{}, w.unplaced
	case last.Copied != "" || last.Unpacked:
		return last, nil
	case last.Failed != nil:
		return wire.Message{}, last.Failed.Arrived(w.original)
	}
	if refused := w.refused(); refused != nil {
		return wire.Message{}, refused
	}
	return wire.Message{}, errors.Join(w.died(ctx, w.end), err)
}

// place sets the limits and the cgroup of the worker, before it gets its order.
func (w *process) place(ctx context.Context) (leave func(), err error) {
	if err := limit(w.cmd.Process.Pid); err != nil || w.Cgroups == nil {
		return func() {}, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() { // the mover of the process may wait for it to arrive
		select {
		case <-w.ended:
			cancel(errors.New("the worker has ended"))
		case <-ctx.Done():
		}
	}()
	leave, err = w.Cgroups.Enter(ctx, w.Pod, w.cmd.Process.Pid)
	if err != nil {
		return func() {}, fmt.Errorf("cgroup for the pull worker (image.pull_cgroup): %w", err)
	}
	return leave, nil
}

// serve answers the worker's messages, and returns the last one.
func (w *process) serve(ctx context.Context) (last wire.Message) {
	lines := bufio.NewScanner(w.conn)
	lines.Buffer(nil, wire.MaxMessage)
	for lines.Scan() {
		w.heard, last = true, wire.Message{}
		if err := json.Unmarshal(lines.Bytes(), &last); err != nil {
			break
		}
		switch {
		case last.Added != nil:
			w.report(wire.Event{Blob: *last.Added, Kind: uint(types.ProgressEventDone)})
		case last.Event != nil:
			w.report(*last.Event)
		case last.Log != nil:
			if w.logged++; w.logged <= maxLogLines {
				w.log(ctx, last.Log)
			}
		case last.Fetch != nil:
			if err := w.fetch(ctx, types.BlobInfo{Digest: last.Fetch.Digest, Size: last.Fetch.Size}); err != nil && ctx.Err() == nil {
				slog.WarnContext(ctx, "cannot send layer to pull worker", "err", err)
				_ = w.cmd.Process.Kill()
			}
		default:
			return last
		}
	}
	return wire.Message{}
}

// log writes a message of the worker and its libraries to the log.
func (w *process) log(ctx context.Context, line *wire.Line) {
	text := pullerror.Cut(pullerror.Redact(line.Text))
	if line.Lost {
		slog.WarnContext(ctx, "downloading layer that the image store has but cannot rebuild", "image", w.Source.Name.String(), "err", text)
		return
	}
	liblog.Log(ctx, line.Level, text)
}

// report passes on the worker's event about a blob of its image.
func (w *process) report(e wire.Event) {
	if !w.blobs[e.Digest] {
		return
	}
	event := types.ProgressEvent(e.Kind)
	w.progress(event, types.BlobInfo{Digest: e.Digest, Size: e.Size}, min(e.Update, math.MaxInt32))
	if event == types.ProgressEventDone {
		w.Downloads.Unpacked(e.Digest)
	}
}

func (w *process) progress(event types.ProgressEvent, blob types.BlobInfo, update uint64) {
	w.Events <- types.ProgressProperties{Event: event, Artifact: blob, OffsetUpdate: update}
}

// fetch begins to fetch a blob, and sends the worker a socket on which it learns of the progress.
func (w *process) fetch(ctx context.Context, info types.BlobInfo) error {
	w.mu.Lock()
	number := len(w.failed)
	w.failed = append(w.failed, nil)
	w.underway++
	underway := w.underway
	w.mu.Unlock()
	if !w.blobs[info.Digest] {
		return fmt.Errorf("pull worker requested a blob that the image does not have: %w", fault.Invalid)
	}
	if number > 2*source.MaxLayers || underway > 2*w.Parallel+2 { // including fetches that are about to end
		return fmt.Errorf("pull worker requested too many blobs: %w", fault.Invalid)
	}
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socketpair", err)
	}
	ours := os.NewFile(uintptr(ends[0]), "layer")
	conn, err := net.FileConn(ours)
	_ = ours.Close()
	if err != nil {
		return errors.Join(err, unix.Close(ends[1]))
	}
	_, _, err = w.conn.WriteMsgUnix([]byte{0}, unix.UnixRights(ends[1]), nil)
	_ = unix.Close(ends[1])
	if err != nil {
		return errors.Join(err, conn.Close())
	}
	w.fetching.Go(func() {
		defer conn.Close()
		last := []byte{wire.PacketWhole}
		err := panics.Do(ctx, "fetch layer", func() error { return w.transfer(ctx, info, conn.(*net.UnixConn)) })
		w.mu.Lock()
		w.underway--
		w.failed[number] = err
		w.mu.Unlock()
		if errors.Is(err, source.ErrExpands) {
			_ = w.cmd.Process.Kill() // what it already has may keep it busy for hours
		}
		if err != nil {
			text := pullerror.Cut(pullerror.Hide(pullerror.Redact(fault.Text(err)), w.Secrets))
			last = append([]byte{wire.PacketError}, text...)
		}
		_, _ = conn.Write(last) // the worker may have ended
	})
	return nil
}

// transfer fetches a blob and shows it to the worker.
func (w *process) transfer(ctx context.Context, info types.BlobInfo, to *net.UnixConn) error {
	w.progress(progress.Waiting, info, 0)
	shown := false
	return w.Downloads.Fetch(ctx, w.Source, info, download.Watcher{
		Decrypted: w.Source.Decrypts(info.Digest),
		Begins:    func() { w.progress(types.ProgressEventNewArtifact, info, 0) },
		Resumed:   func(bytes int64) { w.progress(progress.Resumed, info, uint64(bytes)) },
		Came:      func(bytes int64) { w.progress(types.ProgressEventRead, info, uint64(bytes)) },
		Shown: func(file *os.File, size int64) error {
			packet := binary.BigEndian.AppendUint64([]byte{wire.PacketShown}, uint64(size))
			if shown {
				_, err := to.Write(packet)
				return err
			}
			shown = true
			return wire.SendFile(to, packet, file)
		},
		Connections: func(change int) { w.progress(progress.Connections(change), info, 0) },
	})
}

// original returns the error of the fetch or the question that a failure comes from, or nil.
func (w *process) original(f *wire.Failure) error {
	if w.questions != nil && f.Question > 0 {
		return w.questions.failure(f.Question)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if f.Fetch < 1 || f.Fetch > len(w.failed) {
		return nil
	}
	return w.failed[f.Fetch-1]
}

// refused returns the error of a fetch for which the worker was killed, or nil.
func (w *process) refused() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, err := range w.failed {
		if errors.Is(err, source.ErrExpands) {
			return err
		}
	}
	return nil
}

// died returns the error of a worker that ended before its work.
func (w *process) died(ctx context.Context, ended error) error {
	said := string(w.stderr.Bytes())
	if ctx.Err() == nil {
		slog.WarnContext(ctx, "pull worker died", "err", ended, "stderr", pullerror.Redact(said))
	}
	if err := inherit.ExplainOutput(ended, said); errors.Is(err, fault.Exhausted) {
		return fmt.Errorf("%w: %w", pullerror.ErrWorkerDied, err)
	}
	if outOfMemory.MatchString(said) {
		return fmt.Errorf("%w: its layers take more than %d MiB of memory to unpack: %w", pullerror.ErrWorkerDied, memory>>20, fault.Invalid)
	}
	return fmt.Errorf("%w: %w; retry the pull (the worker may have been killed for lack of memory: see the kernel log): %w", pullerror.ErrWorkerDied, ended, fault.Unavailable)
}
