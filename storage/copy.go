package storage

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"regexp"
	"sync"
	"syscall"
	"time"

	"go.podman.io/image/v5/copy"
	"go.podman.io/image/v5/pkg/blobinfocache/none"
	"go.podman.io/image/v5/types"
	"go.podman.io/storage/pkg/reexec"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/capture"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/internal/race"
	"github.com/crius-run/crius/internal/thread"
	"github.com/crius-run/crius/storage/durable"
	"github.com/crius-run/crius/storage/layers"
	"github.com/crius-run/crius/storage/progress"
	"github.com/crius-run/crius/storage/pullerror"
	"github.com/crius-run/crius/storage/source"
)

// workerGrace is how long a worker may tidy up after its pull was called off.
const workerGrace = 10 * time.Second

const maxFrame = 256 << 10 // bytes

// outOfMemory is what Go's runtime says of RLIMIT_DATA; the last, where threads are
// libc's.
var outOfMemory = regexp.MustCompile("out of memory|cannot allocate memory|pthread_create failed")

// copy brings the image into the store and returns its id. It leaves foreign layers
// to a worker process; an image whose layers are present needs none.
func (s *Store) copy(ctx context.Context, src *source.Image, job *durable.Job, secrets []string) (string, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	watch := progress.New(&s.pulls, src.Name.String(), s.cfg.ProgressTimeout, s.cfg.MinPullRate, src.Asked, cancel).Start(ctx)
	defer watch.Stop()
	end := s.keepSignatures(ctx, src)
	id, err := s.copyPresent(ctx, src, job, watch.Events)
	if errors.Is(err, source.ErrLayerWanted) {
		w := &workerProcess{source: src, job: job, secrets: secrets, events: watch.Events}
		id, err = s.copyForeign(ctx, w, src)
	}
	end()
	return id, progress.CauseOf(ctx, err)
}

// keepSignatures adds to the image's signatures those that are stored with it. The
// result must be called after the copy.
func (s *Store) keepSignatures(ctx context.Context, src *source.Image) (end func()) {
	if src.ConfigDigest == "" { // its id is not known
		return func() {}
	}
	id := src.ConfigDigest.Encoded()
	src.Signatures = s.signatures.begin(ctx, id, src.Manifest(), src.Signatures)
	return func() {
		ctx := context.WithoutCancel(ctx)
		if err := s.signatures.end(ctx, id); err != nil {
			slog.WarnContext(ctx, "cannot restore the signatures that the image had before the pull; pull it again from the registry that has them", "image", id, "err", err)
		}
	}
}

// copyPresent notes the image, or names, manifests and signatures of one that is there
// already, if nothing has to be unpacked for it.
func (s *Store) copyPresent(ctx context.Context, src *source.Image, job *durable.Job, events chan types.ProgressProperties) (string, error) {
	stored := src.ConfigDigest != "" && s.store.Exists(src.ConfigDigest.Encoded())
	if !stored && !layers.Present(s.store, src.Layers()) {
		return "", source.ErrLayerWanted
	}
	src.PresentOnly = true
	defer func() { src.PresentOnly = false }()
	sys := s.libraryContext()
	sys.BigFilesTemporaryDir = job.Temporary
	return source.Copy(ctx, s.store, src.Name, src.Opened(), sys, copy.Options{Progress: events})
}

// copyForeign has a worker copy the image.
func (s *Store) copyForeign(ctx context.Context, w *workerProcess, src *source.Image) (string, error) {
	order := pullOrder{
		Documents: src.Documents, Signatures: src.Signatures, Name: src.Name.String(),
		Store: s.options, Temporary: w.job.Temporary, Parallel: s.cfg.ParallelLayers,
	}
	if err := s.features.find(ctx, s.options); err != nil {
		return "", err
	}
	w.writable = []string{s.store.GraphRoot(), s.store.RunRoot(), w.job.Temporary}
	if s.options.ImageStore != "" {
		w.writable = append(w.writable, s.options.ImageStore)
	}
	if err := w.start(ctx); err != nil {
		return "", fmt.Errorf("start pull worker: %w", err)
	}
	return w.run(ctx, order)
}

// workerProcess is a worker as the server sees it.
type workerProcess struct {
	source   *source.Image
	job      *durable.Job
	secrets  []string // that the worker is not to see
	events   chan<- types.ProgressProperties
	writable []string // directories

	cmd    *exec.Cmd
	order  io.WriteCloser // its standard input
	conn   *net.UnixConn
	stderr capture.Head
	ended  chan error

	fetching sync.WaitGroup
	mu       sync.Mutex
	failed   []error // by fetch, nil where it has not failed
}

// start starts the worker. It has limits when it gets its order, and ends with this
// process and, in a PID namespace of its own, takes along all that it has started.
func (w *workerProcess) start(ctx context.Context) error {
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
	w.cmd = reexec.CommandContext(ctx, workerName)
	w.cmd.Dir = "/"
	w.cmd.Env = append(race.Environ(),
		"PATH="+os.Getenv("PATH"),
		"_CONTAINERS_OVERLAY_DISABLE_IDMAP=yes", // see openLibrary
		fmt.Sprintf("GOMEMLIMIT=%d", workerMemory/4*3),
		"GOGC=400", // it does not live long
	)
	w.cmd.Stderr = &w.stderr
	w.cmd.ExtraFiles = []*os.File{theirs, w.job.Lock}
	w.cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID, Pdeathsig: unix.SIGKILL}
	w.cmd.Cancel = w.conn.CloseWrite
	w.cmd.WaitDelay = workerGrace
	if w.order, err = w.cmd.StdinPipe(); err != nil {
		return errors.Join(err, w.conn.Close())
	}
	started := make(chan error, 1)
	w.ended = make(chan error, 1)
	// The worker inherits the thread's confinement, and dies with the thread.
	go func() { w.ended <- thread.Run(func() error { return w.runConfined(started) }) }()
	if err := <-started; err != nil {
		return errors.Join(err, w.conn.Close(), w.order.Close())
	}
	return nil
}

// runConfined runs the worker on a thread that it confines.
func (w *workerProcess) runConfined(started chan<- error) error {
	err := confine(w.writable)
	if err == nil {
		err = w.cmd.Start()
	}
	started <- err
	if err != nil {
		return err
	}
	return w.cmd.Wait()
}

// run gives the worker its order, serves it until it ends, and returns the id of the
// image.
func (w *workerProcess) run(ctx context.Context, order pullOrder) (string, error) {
	defer w.conn.Close()
	fetching, cancel := context.WithCancel(ctx)
	defer cancel()
	err := limit(w.cmd.Process.Pid)
	if err == nil {
		err = json.NewEncoder(w.order).Encode(order)
	}
	if err = errors.Join(err, w.order.Close()); err != nil {
		_ = w.cmd.Process.Kill()
	}
	var last workerMessage
	err = errors.Join(err, panics.Do(ctx, "serve pull worker", func() error { last = w.serve(fetching); return nil }))
	_ = w.cmd.Process.Kill() // it has said its last word
	cancel()
	ended := <-w.ended
	w.fetching.Wait()
	switch {
	case last.Copied != "":
		return last.Copied, nil
	case last.Failed != nil:
		return "", last.Failed.arrived(w.fetchError)
	}
	if refused := w.refused(); refused != nil {
		return "", refused
	}
	return "", errors.Join(w.died(ctx, ended), err)
}

// serve does what the worker's messages ask for and returns the last one.
func (w *workerProcess) serve(ctx context.Context) (last workerMessage) {
	lines := bufio.NewScanner(w.conn)
	lines.Buffer(nil, maxMessage)
	for lines.Scan() {
		last = workerMessage{}
		if err := json.Unmarshal(lines.Bytes(), &last); err != nil {
			break
		}
		switch {
		case last.Event != nil:
			e := last.Event
			w.report(e.Event, types.BlobInfo{Digest: e.Digest, Size: e.Size}, e.Update)
		case last.Log != nil:
			logLibrary(ctx, last.Log.Level, pullerror.Cut(pullerror.Redact(last.Log.Text)))
		case last.Fetch != nil:
			if err := w.fetch(ctx, types.BlobInfo{Digest: last.Fetch.Digest, Size: last.Fetch.Size}); err != nil && ctx.Err() == nil {
				slog.WarnContext(ctx, "cannot send layer to pull worker", "err", err)
				_ = w.cmd.Process.Kill()
			}
		default:
			return last
		}
	}
	return workerMessage{}
}

func (w *workerProcess) report(event types.ProgressEvent, blob types.BlobInfo, update uint64) {
	w.events <- types.ProgressProperties{Event: event, Artifact: blob, OffsetUpdate: update}
}

// fetch begins to send a blob and gives the worker the end of the pipe.
func (w *workerProcess) fetch(ctx context.Context, info types.BlobInfo) error {
	w.mu.Lock()
	number := len(w.failed)
	w.failed = append(w.failed, nil)
	w.mu.Unlock()
	if number > 2*source.MaxLayers {
		return fmt.Errorf("pull worker requested too many blobs: %w", fault.Invalid)
	}
	var ends [2]int
	if err := unix.Pipe2(ends[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return os.NewSyscallError("pipe2", err)
	}
	_, _ = unix.FcntlInt(uintptr(ends[1]), unix.F_SETPIPE_SZ, 4*maxFrame) // fewer wake-ups, where it is allowed
	pipe := os.NewFile(uintptr(ends[1]), "layer")
	_, _, err := w.conn.WriteMsgUnix([]byte{0}, unix.UnixRights(ends[0]), nil)
	_ = unix.Close(ends[0])
	if err != nil {
		return errors.Join(err, pipe.Close())
	}
	w.fetching.Go(func() {
		defer pipe.Close()
		err := panics.Do(ctx, "fetch layer", func() error { return w.transfer(ctx, info, pipe) })
		if err == nil {
			return
		}
		w.mu.Lock()
		w.failed[number] = err
		w.mu.Unlock()
		if errors.Is(err, source.ErrExpands) {
			_ = w.cmd.Process.Kill() // what has passed already may keep it busy for hours
		}
		text := pullerror.Hide(pullerror.Redact(err.Error()), w.secrets)
		_ = writeFrame(pipe, frameError, append(make([]byte, frameHeader), text...)) // the worker may have ended
	})
	return nil
}

// transfer sends a blob as frames.
func (w *workerProcess) transfer(ctx context.Context, info types.BlobInfo, pipe *os.File) error {
	w.report(types.ProgressEventNewArtifact, info, 0)
	stream, size, err := w.source.GetBlob(ctx, info, none.NoCache)
	if err != nil {
		return err
	}
	defer stream.Close()
	frame := binary.BigEndian.AppendUint64(make([]byte, frameHeader, maxFrame), uint64(size))
	if err := writeFrame(pipe, frameSize, frame); err != nil {
		return err
	}
	frame = frame[:cap(frame)]
	for {
		n, err := stream.Read(frame[frameHeader:])
		if n > 0 {
			w.report(types.ProgressEventRead, info, uint64(n))
			if err := writeFrame(pipe, frameData, frame[:frameHeader+n]); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return writeFrame(pipe, frameData, frame[:frameHeader])
		}
		if err != nil {
			return err
		}
	}
}

// writeFrame writes a frame, which begins with room for its header.
func writeFrame(w io.Writer, kind byte, frame []byte) error {
	frame[0] = kind
	binary.BigEndian.PutUint32(frame[1:], uint32(len(frame)-frameHeader))
	_, err := w.Write(frame)
	return err
}

// fetchError is the error of the n-th fetch, from 1.
func (w *workerProcess) fetchError(n int) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if n < 1 || n > len(w.failed) {
		return nil
	}
	return w.failed[n-1]
}

// refused is the error of a fetch for which the worker was killed, or nil.
func (w *workerProcess) refused() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, err := range w.failed {
		if errors.Is(err, source.ErrExpands) {
			return err
		}
	}
	return nil
}

// died is the error of a worker that has ended before its work.
func (w *workerProcess) died(ctx context.Context, ended error) error {
	said := string(w.stderr.Bytes())
	if ctx.Err() == nil {
		slog.WarnContext(ctx, "pull worker died", "err", ended, "stderr", pullerror.Redact(said))
	}
	if outOfMemory.MatchString(said) {
		return fmt.Errorf("%w: its layers take more than %d MiB of memory to unpack: %w", pullerror.ErrWorkerDied, workerMemory>>20, fault.Invalid)
	}
	return fmt.Errorf("%w: %w; retry the pull (the worker may have been killed for lack of memory: see the kernel log): %w", pullerror.ErrWorkerDied, ended, fault.Unavailable)
}
