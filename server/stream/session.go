package stream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"sync"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/streaming/pkg/httpstream/wsstream"

	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/oci/stdio"
	"github.com/crius-run/crius/pod"
	"github.com/crius-run/crius/server/trail"
)

// session is one client's connection.
type session struct {
	server *Server
	conn   *conn
	w      http.ResponseWriter
	r      *http.Request
	ctx    context.Context // ends when the client has gone
	work   sync.WaitGroup  // goroutines, which end with the connection at the latest
	ends   []func()        // what to do once the connection is closed

	entry    *trail.Entry // in the audit trail
	exitCode *int32       // of a command that has ended
}

func (v *session) atEnd(f func()) { v.ends = append(v.ends, f) }

// do runs f beside the session, which a panic in it ends.
func (v *session) do(f func()) {
	v.work.Go(func() {
		if panics.Do(v.ctx, "serve session", func() error { f(); return nil }) != nil {
			_ = v.conn.Close()
		}
	})
}

// creationTime is what a client has to open its streams.
const creationTime = 15 * time.Second

// wanted says which streams a session has.
type wanted struct{ stdin, stdout, stderr, tty bool }

// dialogue is a session whose streams are open.
type dialogue struct {
	in, resize       io.Reader // each nil if it is not wanted
	out, err, status io.WriteCloser
	document         bool      // the status is JSON
	over             io.Closer // what ends the protocol; nil: nothing does
}

// run is the work of an exec or attach session: the error may be an exit.
type run func(client pod.Client) error

// exit is the exit code of a command, if it is not zero.
type exit int32

func (e exit) Error() string { return fmt.Sprintf("exit code %d", int32(e)) }

func (s *Server) exec(v *session, req *cri.ExecRequest) {
	command := oci.Command{Args: req.GetCmd(), Terminal: req.GetTty(), Stdin: req.GetStdin()}
	v.converse(wanted{req.GetStdin(), req.GetStdout(), req.GetStderr(), req.GetTty()}, func(client pod.Client) error {
		code, err := s.engine.Exec(v.ctx, req.GetContainerId(), command, client)
		if err == nil {
			v.exitCode = &code
		}
		if err == nil && code != 0 {
			return exit(code)
		}
		return err
	})
}

func (s *Server) attach(v *session, req *cri.AttachRequest) {
	v.converse(wanted{req.GetStdin(), req.GetStdout(), req.GetStderr(), req.GetTty()}, func(client pod.Client) error {
		return s.engine.Attach(v.ctx, req.GetContainerId(), client)
	})
}

// converse opens the client's streams, connects run with them and says how it
// ended.
func (v *session) converse(w wanted, run run) {
	open := v.spdyStreams
	if wsstream.IsWebSocketRequest(v.r) {
		open = v.webSocketStreams
	}
	d, err := open(w)
	if err != nil {
		slog.DebugContext(v.ctx, "client did not open its session streams", "err", err)
		v.entry.Fail(err)
		return
	}
	stdin := v.interruptible(d.in)
	err = run(pod.Client{
		Stdin:  v.entry.Reader(stdin),
		Stdout: v.entry.Writer(d.out), // a nil WriteCloser is a nil Writer, too
		Stderr: v.entry.Writer(d.err),
		Resize: v.sizes(d.resize),
		Hangup: v.conn.drop,
	})
	if code := exit(0); !errors.As(err, &code) {
		v.entry.Fail(err)
	}
	if stdin != nil {
		_ = stdin.Close()
	}
	v.partWith(func() { d.conclude(v.server.statusOf(err)) })
}

// partWith says the last words and closes the connection when the client has them,
// if nobody else does.
func (v *session) partWith(lastWords func()) {
	said := make(chan struct{})
	v.do(func() {
		v.conn.linger(v.conn.gone, said)
		_ = v.conn.Close()
	})
	lastWords()
	close(said)
}

// interruptible is in with a Close by which a Read ends. What comes later is
// thrown away: left unread it would hold up the other streams.
func (v *session) interruptible(in io.Reader) io.ReadCloser {
	if in == nil {
		return nil
	}
	r, w := io.Pipe()
	v.do(func() {
		_, err := io.Copy(w, in)
		_ = w.CloseWithError(err)
		_, _ = io.Copy(io.Discard, in)
	})
	return r
}

// sizes decodes the stream of a terminal's sizes. Of those that nobody has asked for yet
// the last two are kept: clients may flood (CVE-2022-23471), and kubectl attach sends two
// that differ so that a program on the terminal redraws it.
func (v *session) sizes(r io.Reader) <-chan stdio.Size {
	if r == nil {
		return nil
	}
	const kept = 2
	newest := make(chan stdio.Size, kept)
	v.do(func() {
		defer close(newest)
		limited := &io.LimitedReader{R: r}
		decoder := json.NewDecoder(limited)
		for {
			var size stdio.Size
			limited.N = 1 << 10 // a size is shorter, and the decoder keeps what it reads
			if decoder.Decode(&size) != nil {
				_, _ = io.Copy(io.Discard, r)
				return
			}
			if len(newest) == kept {
				select {
				case <-newest:
				default:
				}
			}
			newest <- size
		}
	})
	return newest
}

// status is as much of a Kubernetes API status as clients look at.
type status struct {
	Status  string         `json:"status"`
	Message string         `json:"message,omitempty"`
	Reason  string         `json:"reason,omitempty"`
	Details *statusDetails `json:"details,omitempty"`
	Code    int            `json:"code,omitempty"`
}

type statusDetails struct {
	Causes []statusCause `json:"causes"`
}

type statusCause struct {
	Reason  string `json:"reason"`
	Message string `json:"message"`
}

// statusOf says how a session ended as the Kubernetes API does.
func (s *Server) statusOf(err error) status {
	var code exit
	switch {
	case err == nil:
		return status{Status: "Success"}
	case errors.As(err, &code):
		return status{
			Status:  "Failure",
			Message: fmt.Sprintf("command terminated with non-zero exit code: %v", err),
			Reason:  "NonZeroExitCode",
			Details: &statusDetails{[]statusCause{{"ExitCode", fmt.Sprint(int32(code))}}},
		}
	}
	return status{Status: "Failure", Message: s.text(err), Reason: "InternalError", Code: http.StatusInternalServerError}
}

// conclude tells the client how it ended. Old protocols tell of failures only.
func (d *dialogue) conclude(last status) {
	text := []byte(last.Message)
	if d.document {
		text, _ = json.Marshal(last) // of strings and numbers
	}
	if len(text) > 0 {
		_, _ = d.status.Write(text)
	}
	// The status first: the oldest clients leave when the output has ended.
	for _, w := range []io.Closer{d.status, d.out, d.err} {
		if w != nil {
			_ = w.Close()
		}
	}
	if d.over != nil {
		_ = d.over.Close()
	}
}
