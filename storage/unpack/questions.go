package unpack

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"regexp"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/storage/unpack/layers"
	"github.com/crius-run/crius/storage/unpack/wire"
)

// questions are those of a worker about the store. The worker may have been taken over by a layer: what it
// asks must be about the layers of its image, and what it has unpacked be in its own directory.
type questions struct {
	store   layers.Store
	free    func(context.Context) error // see Task
	staging layers.Staging
	missing map[string]layers.Missing // by id
	most    int                       // questions that a worker has reason to ask

	conn      net.Conn
	theirs    *os.File // the worker's end
	answering sync.WaitGroup

	mu     sync.Mutex
	asked  int
	number int   // of the question that failed last
	failed error // with that
}

// openQuestions makes a connection for questions. The caller must close it.
func openQuestions(store layers.Store, staging layers.Staging) (*questions, error) {
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socketpair", err)
	}
	ours, theirs := os.NewFile(uintptr(ends[0]), "questions"), os.NewFile(uintptr(ends[1]), "store")
	conn, err := net.FileConn(ours)
	_ = ours.Close()
	if err != nil {
		return nil, errors.Join(err, theirs.Close())
	}
	return &questions{store: store, staging: staging, missing: map[string]layers.Missing{}, conn: conn, theirs: theirs}, nil
}

// expect says about which layers there will be questions. free is that of Task.
func (q *questions) expect(missing []layers.Missing, free func(context.Context) error) {
	q.free = free
	for _, m := range missing {
		q.missing[m.ID] = m
	}
	q.most = 8*len(missing) + 8 // each layer may be unpacked and added three times
}

// answer begins to answer.
func (q *questions) answer(ctx context.Context) {
	_ = q.theirs.Close() // the worker has it
	q.answering.Go(func() {
		defer q.conn.Close()
		panics.Run(ctx, "answer pull worker", func() { q.serve(ctx) })
	})
}

// close ends the connection, after the answer that is being given.
func (q *questions) close() {
	_ = q.theirs.Close()
	_ = q.conn.Close()
	q.answering.Wait()
}

// serve answers until the connection ends, or something comes that is no question.
func (q *questions) serve(ctx context.Context) {
	lines := bufio.NewScanner(q.conn)
	lines.Buffer(nil, wire.MaxQuestion)
	to := json.NewEncoder(q.conn)
	for lines.Scan() {
		var question wire.Question
		if json.Unmarshal(lines.Bytes(), &question) != nil {
			return
		}
		answer, err := q.reply(ctx, question)
		q.mu.Lock()
		q.asked++
		if err != nil {
			q.number, q.failed = q.asked, err
			answer.Failed = wire.FailureOf(err)
		}
		enough := q.asked > q.most
		q.mu.Unlock()
		if enough || to.Encode(answer) != nil {
			return
		}
	}
}

// failure returns the error of a question, if it is the last one that failed.
func (q *questions) failure(number int) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if number != q.number {
		return nil
	}
	return q.failed
}

// awaitStore waits until no other program has locked the store, for as long as the pull goes on: for a lock the library
// waits whether or not the pull was cancelled.
func (q *questions) awaitStore(ctx context.Context) error {
	for {
		if err := q.free(ctx); ctx.Err() != nil || !errors.Is(err, fault.Timeout) {
			return err
		}
	}
}

// reply answers a question.
func (q *questions) reply(ctx context.Context, question wire.Question) (answer wire.Answer, err error) {
	if err := q.awaitStore(ctx); err != nil {
		return answer, err
	}
	switch {
	case question.Has != "":
		if _, known := q.missing[question.Has]; !known {
			return answer, unknown(question.Has)
		}
		answer.Has, err = q.store.Has(question.Has)
	case question.Dirs != "":
		if !q.concerns(question.Dirs) {
			return answer, unknown(question.Dirs)
		}
		answer.Dirs, err = q.store.Dirs(question.Dirs)
	case len(question.Add) > 0:
		var all []layers.Unpacked
		if all, err = q.unpacked(question.Add); err == nil {
			answer.Added, err = q.store.Add(all)
		}
	default:
		err = fmt.Errorf("pull worker asked nothing: %w", fault.Invalid)
	}
	return answer, err
}

func unknown(id string) error {
	return fmt.Errorf("pull worker asked about the layer %.100q, which its image does not have: %w", id, fault.Invalid)
}

// concerns reports whether a layer is one of the image that is missing, or is below one.
func (q *questions) concerns(id string) bool {
	if _, known := q.missing[id]; known {
		return true
	}
	for _, m := range q.missing {
		if m.Parent == id {
			return true
		}
	}
	return false
}

// stagedName matches the names of directories in a staging directory.
var stagedName = regexp.MustCompile(`^[0-9]{1,9}$`)

// maxLayer is far more bytes and files than a layer can have. The sum for all layers of a store fits an int64.
const maxLayer = 1 << 47

// unpacked returns what the worker wants to have added. Where a layer is added, and what its
// digests are, is up to the server.
func (q *questions) unpacked(all []wire.Unpacked) (layersToAdd []layers.Unpacked, err error) {
	for i, u := range all {
		m, known := q.missing[u.ID]
		if !known {
			return nil, unknown(u.ID)
		}
		if i > 0 && m.Parent != all[i-1].ID {
			return nil, fmt.Errorf("pull worker adds the layer %s above another than its parent: %w", m.ID, fault.Invalid)
		}
		tooLarge := u.Size > maxLayer || u.Usage.Bytes > maxLayer || u.Usage.Inodes > maxLayer
		if len(u.UIDs) > layers.KeptOwners || len(u.GIDs) > layers.KeptOwners || u.Size < 0 || tooLarge {
			return nil, fmt.Errorf("pull worker says of the layer %s what no layer has: %w", m.ID, fault.Invalid)
		}
		l := layers.Unpacked{
			ID: m.ID, Parent: m.Parent, Record: layers.Record{Blob: m.Blob, Size: m.BlobSize(), Content: m.DiffID},
			Size: u.Size, UIDs: u.UIDs, GIDs: u.GIDs, Usage: u.Usage,
		}
		if u.Name != "" {
			if !stagedName.MatchString(u.Name) {
				return nil, fmt.Errorf("pull worker has unpacked the layer %s to %.100q: %w", m.ID, u.Name, fault.Invalid)
			}
			l.Dir, l.Split = q.staging.FilesOf(u.Name), q.staging.SplitOf(u.Name)
		}
		layersToAdd = append(layersToAdd, l)
	}
	return layersToAdd, nil
}
