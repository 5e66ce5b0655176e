package main

import (
	"errors"
	"io"
	"os"
	"sync/atomic"

	task "github.com/containerd/containerd/api/runtime/task/v2"
	"golang.org/x/sys/unix"
)

// streams are the output of a process that has input, on its way from the
// guest. Kata's shim, up to version 4 of the one in Go, has one mark for all
// streams of a process: after CloseIO it finishes the read that is under way and
// closes the output. What the process writes then stays in the guest, and fills
// the pipe there.
type streams struct {
	closed atomic.Bool   // CloseIO was called
	over   chan struct{} // the process has ended, or is forgotten
	pumps  []pump
}

// pump takes output from the guest to the client.
type pump struct{ from, to *os.File }

// processKey identifies a process, as a request does.
type processKey struct{ container, exec string }

// intercept puts pipes of the machine's own between a process and its client.
func intercept(outputs ...*string) (*streams, error) {
	s := &streams{over: make(chan struct{})}
	for _, path := range outputs {
		if *path == "" {
			continue
		}
		guest := *path + ".guest"
		err := unix.Mkfifo(guest, 0o600)
		if err != nil {
			return nil, err
		}
		var p pump
		if p.from, err = os.OpenFile(guest, os.O_RDONLY|unix.O_NONBLOCK, 0); err != nil {
			return nil, err
		}
		if p.to, err = os.OpenFile(*path, os.O_WRONLY|unix.O_NONBLOCK, 0); err != nil {
			return nil, errors.Join(err, p.from.Close())
		}
		s.pumps, *path = append(s.pumps, p), guest
	}
	return s, nil
}

func (s *streams) run() {
	for _, p := range s.pumps {
		go func() {
			defer p.from.Close()
			buffer := make([]byte, 32<<10)
			for !s.closed.Load() {
				n, err := p.from.Read(buffer)
				if n > 0 {
					_, _ = p.to.Write(buffer[:n])
				}
				if err != nil {
					break
				}
			}
			_ = p.to.Close()
			<-s.over
			_, _ = io.Copy(io.Discard, p.from)
		}()
	}
}

func (s *streams) end() {
	select {
	case <-s.over:
	default:
		close(s.over)
	}
}

// before prepares the streams of a process that is to be made with input.
func (m *machine) before(req message) (err error) {
	var key processKey
	var s *streams
	switch r := req.(type) {
	case *task.CreateTaskRequest:
		if r.Stdin != "" && !r.Terminal {
			key = processKey{container: r.ID}
			s, err = intercept(&r.Stdout, &r.Stderr)
		}
	case *task.ExecProcessRequest:
		if r.Stdin != "" && !r.Terminal {
			key = processKey{r.ID, r.ExecID}
			s, err = intercept(&r.Stdout, &r.Stderr)
		}
	}
	if s != nil {
		m.mu.Lock()
		m.streams[key] = s
		m.mu.Unlock()
	}
	return err
}

// began follows the streams of a process after a request that has succeeded.
func (m *machine) began(req message) {
	of := func(container, exec string) *streams {
		m.mu.Lock()
		defer m.mu.Unlock()
		return m.streams[processKey{container, exec}]
	}
	switch r := req.(type) {
	case *task.CreateTaskRequest:
		if s := of(r.ID, ""); s != nil {
			s.run()
		}
	case *task.StartRequest:
		if s := of(r.ID, r.ExecID); s != nil && r.ExecID != "" {
			s.run()
		}
	case *task.CloseIORequest:
		if s := of(r.ID, r.ExecID); s != nil {
			s.closed.Store(true)
		}
	case *task.WaitRequest:
		if s := of(r.ID, r.ExecID); s != nil {
			m.forget(r.ID, r.ExecID, s)
		}
	case *task.DeleteRequest:
		if s := of(r.ID, r.ExecID); s != nil {
			m.forget(r.ID, r.ExecID, s)
		}
	}
}

func (m *machine) forget(container, exec string, s *streams) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.streams, processKey{container, exec})
	s.end()
}
