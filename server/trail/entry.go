package trail

import (
	"context"
	"errors"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/peer"
	"github.com/crius-run/crius/server/caller"
)

// What a record is about.
const (
	Exec        = "exec"
	ExecSync    = "exec-sync"
	Attach      = "attach"
	PortForward = "port-forward"
	ReopenLog   = "reopen-log"
)

// Record is an entry of the trail. Its texts may come from a client and are bounded.
type Record struct {
	Time        time.Time `json:"time"` // of the beginning
	Verb        string    `json:"verb"`
	Namespace   string    `json:"namespace,omitempty"`
	Pod         string    `json:"pod,omitempty"`
	PodUID      string    `json:"pod_uid,omitempty"`
	PodID       string    `json:"pod_id,omitempty"`
	Container   string    `json:"container,omitempty"`
	ContainerID string    `json:"container_id,omitempty"`
	Command     []string  `json:"command,omitempty"`
	Terminal    bool      `json:"terminal,omitempty"`
	Ports       []uint16  `json:"ports,omitempty"`

	Client    string `json:"client,omitempty"` // name of the process that called CRI
	ClientPID int32  `json:"client_pid,omitempty"`
	ClientUID uint32 `json:"client_uid"`
	Kubelet   bool   `json:"kubelet,omitempty"` // a probe or hook of the kubelet, or its log rotation
	Remote    string `json:"remote,omitempty"`  // address of the session's client

	Received     uint64  `json:"bytes_in"` // from the client
	Sent         uint64  `json:"bytes_out"`
	Milliseconds int64   `json:"took_ms"`
	ExitCode     *int32  `json:"exit_code,omitempty"`
	Error        string  `json:"error,omitempty"`
	Connections  *uint64 `json:"connections,omitempty"` // of a port-forward
}

const (
	maxCommand = 4 << 10 // bytes of a record's command
	maxText    = 1 << 10
	maxPorts   = 64
)

// Entry is a record in the making. A nil one records nothing. Its methods may be called at the
// same time.
type Entry struct {
	trail          *Trail
	record         Record
	received, sent atomic.Uint64

	mu          sync.Mutex
	ports       []uint16
	connections uint64
	failed      error
	once        sync.Once
}

// Request is what a client asks for.
type Request struct {
	Verb     string
	ID       string // of a container or a pod
	Command  []string
	Terminal bool
}

// Begin returns the entry for a request of the process that makes the call of ctx, or nil if it
// is not to be recorded.
func (t *Trail) Begin(ctx context.Context, r Request) *Entry {
	if t == nil {
		return nil
	}
	client := caller.Of(ctx)
	own := isKubelet(client) && (r.Verb == ExecSync || r.Verb == ReopenLog)
	if level := t.level.Load(); *level == None || own && *level != All {
		return nil
	}
	e := &Entry{trail: t, record: Record{
		Time: time.Now(), Verb: r.Verb, Command: bounded(r.Command), Terminal: r.Terminal,
		Client: client.Name, ClientPID: client.PID, ClientUID: client.UID, Kubelet: own,
	}}
	e.record.name(t.nodes, r)
	return e
}

// Refuse records a request that was refused.
func (t *Trail) Refuse(ctx context.Context, r Request, err error) {
	t.Begin(ctx, r).End(nil, err)
}

// isKubelet reports whether a process is a kubelet, or contains one, by its name. Who can name
// a process so and connect to the socket of CRI is root on the node.
func isKubelet(client peer.Process) bool {
	return slices.Contains([]string{"kubelet", "kubelite", "hyperkube", "k3s", "k3s-server", "k3s-agent", "k0s"}, client.Name)
}

// bounded returns the beginning of a command.
func bounded(command []string) []string {
	left := maxCommand
	for i, arg := range command {
		if len(arg) > left || i == 64 {
			return append(slices.Clone(command[:i]), arg[:min(left, len(arg), 256)]+"...")
		}
		left -= len(arg)
	}
	return command
}

// From says from where the client of a session has connected.
func (e *Entry) From(address string) {
	if e != nil {
		e.record.Remote = address
	}
}

// Connect counts a connection to a port.
func (e *Entry) Connect(port uint16) {
	if e == nil {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.connections++
	if !slices.Contains(e.ports, port) && len(e.ports) < maxPorts {
		e.ports = append(e.ports, port)
	}
}

// Fail notes an error; the first one is recorded, unless End gets one.
func (e *Entry) Fail(err error) {
	if e == nil {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.failed == nil {
		e.failed = err
	}
}

// Out counts bytes for the client that do not pass through Writer.
func (e *Entry) Out(n int) {
	if e != nil {
		e.sent.Add(uint64(n))
	}
}

// Reader returns r, counting what the client sends; nil for nil.
func (e *Entry) Reader(r io.ReadCloser) io.ReadCloser {
	if r == nil || e == nil {
		return r
	}
	return reader{r, e}
}

type reader struct {
	io.ReadCloser
	entry *Entry
}

func (r reader) Read(p []byte) (int, error) {
	n, err := r.ReadCloser.Read(p)
	r.entry.received.Add(uint64(n))
	return n, err
}

// Writer returns w, counting what the client gets; nil for nil.
func (e *Entry) Writer(w io.Writer) io.Writer {
	if w == nil || e == nil {
		return w
	}
	return writer{w, e}
}

type writer struct {
	io.Writer
	entry *Entry
}

func (w writer) Write(p []byte) (int, error) {
	n, err := w.Writer.Write(p)
	w.entry.sent.Add(uint64(n))
	return n, err
}

// Both is Reader and Writer in one.
func (e *Entry) Both(s io.ReadWriteCloser) io.ReadWriteCloser {
	if e == nil {
		return s
	}
	return both{reader{s, e}, writer{s, e}}
}

type both struct {
	reader
	io.Writer
}

// End records the entry, once. The exit code is nil if there is none. It never waits: if the
// trail cannot take the record now, it is lost and counted.
func (e *Entry) End(exitCode *int32, err error) {
	if e == nil {
		return
	}
	e.once.Do(func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		if err == nil {
			err = e.failed
		}
		r := &e.record
		r.ExitCode, r.Received, r.Sent, r.Ports = exitCode, e.received.Load(), e.sent.Load(), slices.Clone(e.ports)
		if connections := e.connections; r.Verb == PortForward { // some may still be made
			r.Connections = &connections
		}
		if err != nil && !errors.Is(err, context.Canceled) { // the client has left
			r.Error = cut(fault.Text(err))
		}
		r.Milliseconds = time.Since(r.Time).Milliseconds()
		e.trail.take(*r)
	})
}
