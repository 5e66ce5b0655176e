package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/kubelet"
)

const (
	// sessionRounds is how often each server has its turn.
	sessionRounds = 5
	// sessionExecs are in each of its turns.
	sessionExecs = 30
	// sessionBytes are what the other sessions carry.
	sessionBytes = 100 << 20
	// sessionLimit is much longer than any session takes.
	sessionLimit = 5 * time.Minute
	forwardPort  = 8080
)

// A session is something that people do with a running container.
type session struct {
	name  string
	times int // in one turn
	do    func(s *server, ctx context.Context, p *pod) (time.Duration, error)
}

const (
	execOutput   = "exec, 100 MiB of output"
	execBothWays = "exec of cat, 100 MiB there and back"
	attachOutput = "attach, 100 MiB of output"
	forwarded    = "port-forward, 100 MiB"
)

var sessions = []session{
	{"exec of a program that ends at once", sessionExecs, (*server).execStream},
	{execOutput, 1, (*server).execOutput},
	{execBothWays, 1, (*server).execBothWays},
	{attachOutput, 1, (*server).attachOutput},
	{forwarded, 1, (*server).forward},
}

// sessionsRow opens the sessions of people, over SPDY as most kubectl do.
func sessionsRow(ctx context.Context) (_ []table, err error) {
	const handler = "runc"
	c, ours, theirs, err := newServers(ctx, handler)
	if err != nil {
		return nil, err
	}
	defer func() { err = c.end(ctx, err) }()
	if err := c.settle(ctx); err != nil {
		return nil, err
	}
	servers := []*server{ours, theirs}
	for _, s := range servers {
		s.args = []string{"tcp", fmt.Sprint(":", forwardPort), "noise", strconv.Itoa(sessionBytes), ";", "sleep"}
		if _, err := fill(ctx, s, 0, 1, 1); err != nil {
			return nil, err
		}
	}
	took := compare(fmt.Sprintf("Sessions with %s: ms", handler), 95, c.names()...)
	cpu := compare(fmt.Sprintf("Sessions with %s: ms of CPU, of server, monitor, runtime and container", handler), 0, c.names()...)
	for _, what := range sessions {
		times, costs := make([][]float64, len(servers)), make([][]float64, len(servers))
		for range sessionRounds {
			for i, s := range servers {
				before, err := s.cpu()
				if err != nil {
					return nil, err
				}
				for range what.times {
					d, err := what.do(s, ctx, s.pod(podName(0)))
					if err != nil {
						return nil, fmt.Errorf("%s: %s: %w", s.label, what.name, err)
					}
					times[i] = append(times[i], d.Seconds()*1e3)
				}
				after, err := s.cpu()
				if err != nil {
					return nil, err
				}
				costs[i] = append(costs[i], (after-before)*1e3/float64(what.times))
			}
		}
		took.line(what.name, times...)
		cpu.line(what.name, costs...)
	}
	for _, s := range servers {
		if err := s.removeAll(ctx); err != nil {
			return nil, fmt.Errorf("%s: %w", s.label, err)
		}
	}
	return []table{took.table, cpu.table}, nil
}

// streams opens sessions in the network of the server.
func (s *server) streams() kubelet.Streams { return kubelet.Streams{Within: s.on.Do} }

// execute runs a command over a stream, with this input. The command prints
// that many bytes.
func (s *server) execute(ctx context.Context, p *pod, want counter, in io.Reader, command ...string) (time.Duration, error) {
	began := time.Now()
	asked, err := s.runtime().Exec(ctx, &cri.ExecRequest{
		ContainerId: p.container, Cmd: append([]string{"/probe"}, command...), Stdin: in != nil, Stdout: true, Stderr: true,
	})
	if err != nil {
		return 0, err
	}
	var said counter
	opened := s.streams().Open(ctx, asked.Url, kubelet.Wants{Stdin: in != nil, To: &said, Stderr: true})
	defer opened.Leave()
	if in != nil {
		if err := opened.Send(in); err != nil {
			return 0, err
		}
		opened.EndInput()
	}
	if err := opened.Wait(sessionLimit); err != nil {
		return 0, fmt.Errorf("%w: %s", err, opened.Stderr.Tail(1000))
	}
	return time.Since(began), said.check(want)
}

func (s *server) execStream(ctx context.Context, p *pod) (time.Duration, error) {
	return s.execute(ctx, p, 0, nil, "exit", "0")
}

func (s *server) execOutput(ctx context.Context, p *pod) (time.Duration, error) {
	return s.execute(ctx, p, sessionBytes, nil, "noise", strconv.Itoa(sessionBytes))
}

func (s *server) execBothWays(ctx context.Context, p *pod) (time.Duration, error) {
	return s.execute(ctx, p, sessionBytes, io.LimitReader(zeros{}, sessionBytes), "cat")
}

// attachOutput attaches to a new container, which writes at full speed from
// then on, and ends.
func (s *server) attachOutput(ctx context.Context, p *pod) (time.Duration, error) {
	const word = "go\n" // which the container prints as well
	config := kubelet.Container("attached", s.image, []string{"until", strings.TrimSpace(word), ";", "noise", strconv.Itoa(sessionBytes)})
	config.Stdin, config.StdinOnce = true, true
	made, err := s.runtime().CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: p.id, SandboxConfig: p.config, Config: config})
	if err != nil {
		return 0, err
	}
	if _, err := s.runtime().StartContainer(ctx, &cri.StartContainerRequest{ContainerId: made.ContainerId}); err != nil {
		return 0, err
	}
	began := time.Now()
	asked, err := s.runtime().Attach(ctx, &cri.AttachRequest{ContainerId: made.ContainerId, Stdin: true, Stdout: true, Stderr: true})
	if err != nil {
		return 0, err
	}
	var said counter
	opened := s.streams().Open(ctx, asked.Url, kubelet.Wants{Stdin: true, To: &said, Stderr: true})
	defer opened.Leave()
	if err := opened.Type(word); err != nil {
		return 0, err
	}
	if err := opened.Wait(sessionLimit); err != nil {
		return 0, err
	}
	took := time.Since(began)
	if err := said.check(counter(len(word)) + sessionBytes); err != nil {
		return 0, err
	}
	_, err = s.runtime().RemoveContainer(ctx, &cri.RemoveContainerRequest{ContainerId: made.ContainerId})
	return took, err
}

// forward fetches what a server in the pod sends.
func (s *server) forward(ctx context.Context, p *pod) (time.Duration, error) {
	began := time.Now()
	asked, err := s.runtime().PortForward(ctx, &cri.PortForwardRequest{PodSandboxId: p.id, Port: []int32{forwardPort}})
	if err != nil {
		return 0, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	local, ended, err := s.streams().Forward(ctx, asked.Url, forwardPort)
	if err != nil {
		return 0, err
	}
	var said counter
	err = s.on.Do(func() error {
		conn, err := net.Dial("tcp", fmt.Sprint("127.0.0.1:", local))
		if err != nil {
			return err
		}
		defer conn.Close()
		_, err = io.Copy(&said, conn)
		return err
	})
	took := time.Since(began)
	cancel()
	<-ended //nolint:errcheck // it has been called off
	if err == nil {
		err = said.check(sessionBytes)
	}
	return took, err
}

// counter counts the bytes that are written to it.
type counter int64

func (c *counter) Write(p []byte) (int, error) {
	*c += counter(len(p))
	return len(p), nil
}

// check returns an error unless as many bytes have arrived as were sent.
func (c *counter) check(want counter) error {
	if *c != want {
		return fmt.Errorf("%d bytes have arrived of %d", *c, want)
	}
	return nil
}

// zeros is an endless input.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}
