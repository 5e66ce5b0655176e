package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	task "github.com/containerd/containerd/api/runtime/task/v2"
	tasktypes "github.com/containerd/containerd/api/types/task"
	"github.com/containerd/ttrpc"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/crius-run/crius/conmon/shim"
	"github.com/crius-run/crius/internal/cgroup"
)

// machine takes the place of a virtual machine.
type machine struct {
	settings
	dir      string // the sandbox's bundle
	listener net.Listener

	mu      sync.Mutex
	inner   *ttrpc.Client
	members map[string]*member
	initPID int    // of the pod's own container, for the PID namespace
	cgroup  string // of it
	ended   chan struct{}
	streams map[processKey]*streams

	hypervisor *hypervisor                         // of Kata 1; nil: there is no such process
	stopping   atomic.Bool                         // it is being stopped
	execs      map[string]*task.ExecProcessRequest // to be made at their start
}

type member struct {
	dir    string
	bundle *bundle
}

// hangs reports whether the pod requests a hang at this point, for a container
// that is not the sandbox.
func (m *member) hangs(at string) bool {
	a := m.bundle.spec.Annotations
	return a[hangsAnnotation] == at && a["io.kubernetes.cri.container-type"] == "container"
}

func serve(s settings) error {
	socket := os.NewFile(3, "socket")
	listener, err := net.FileListener(socket)
	if err != nil {
		return err
	}
	_ = socket.Close()
	dir, err := os.Getwd()
	if err != nil {
		return err
	}
	m := &machine{settings: s, dir: dir, listener: listener, members: map[string]*member{}, execs: map[string]*task.ExecProcessRequest{}, streams: map[processKey]*streams{}, ended: make(chan struct{})}
	server, err := ttrpc.NewServer()
	if err != nil {
		return err
	}
	for _, version := range []string{"v2", "v3"} {
		server.RegisterService("containerd.task."+version+".Task", &ttrpc.ServiceDesc{Methods: m.methods()})
	}
	go func() { _ = server.Serve(context.Background(), listener) }()
	<-m.ended
	if b, err := readBundle(dir); err == nil && b.spec.Annotations[hangsAnnotation] == "end" {
		time.Sleep(time.Second) // like a busy machine
		_ = listener.Close()
		for {
			time.Sleep(time.Hour) // without a timer the Go runtime would report a deadlock
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	return server.Shutdown(ctx)
}

// message is a request or an answer of the task service.
type message interface {
	proto.Message
}

// refused are the methods that a shim for WebAssembly lacks. The library of shims
// in Rust answers for them as if it did not know the container.
var refused = []string{"Exec", "ResizePty", "CloseIO", "Update", "Stats"}

// methods returns the service's methods: each request goes to runc's shim, with
// the differences of Kata's.
func (m *machine) methods() map[string]ttrpc.Method {
	pass := func(name string, request func() message, answer func() message) ttrpc.Method {
		return func(ctx context.Context, unmarshal func(any) error) (any, error) {
			req, resp := request(), answer()
			if err := unmarshal(req); err != nil {
				return nil, err
			}
			if wasm() && slices.Contains(refused, name) {
				return nil, status.Errorf(codes.NotFound, "/containerd.task.v2.Task/%s is not supported", name)
			}
			err := m.handle(ctx, name, req, resp)
			return resp, err
		}
	}
	empty := func() message { return new(emptypb.Empty) }
	return map[string]ttrpc.Method{
		"Create":    pass("Create", func() message { return new(task.CreateTaskRequest) }, func() message { return new(task.CreateTaskResponse) }),
		"Start":     pass("Start", func() message { return new(task.StartRequest) }, func() message { return new(task.StartResponse) }),
		"State":     pass("State", func() message { return new(task.StateRequest) }, func() message { return new(task.StateResponse) }),
		"Exec":      pass("Exec", func() message { return new(task.ExecProcessRequest) }, empty),
		"Wait":      pass("Wait", func() message { return new(task.WaitRequest) }, func() message { return new(task.WaitResponse) }),
		"Kill":      pass("Kill", func() message { return new(task.KillRequest) }, empty),
		"Delete":    pass("Delete", func() message { return new(task.DeleteRequest) }, func() message { return new(task.DeleteResponse) }),
		"ResizePty": pass("ResizePty", func() message { return new(task.ResizePtyRequest) }, empty),
		"CloseIO":   pass("CloseIO", func() message { return new(task.CloseIORequest) }, empty),
		"Update":    pass("Update", func() message { return new(task.UpdateTaskRequest) }, empty),
		"Stats":     pass("Stats", func() message { return new(task.StatsRequest) }, func() message { return new(task.StatsResponse) }),
		"Connect":   pass("Connect", func() message { return new(task.ConnectRequest) }, func() message { return new(task.ConnectResponse) }),
		"Shutdown":  pass("Shutdown", func() message { return new(task.ShutdownRequest) }, empty),
	}
}

func (m *machine) handle(ctx context.Context, name string, req, resp message) error {
	id := req.(interface{ GetID() string }).GetID()
	own := m.member(id)
	if own == nil && name != "Create" && name != "Shutdown" {
		return status.Errorf(codes.NotFound, "container %s does not exist", id)
	}
	if own != nil {
		own.bundle.die(name)
	} else if b, err := readBundle(m.dir); err == nil && id == m.id && name == "Shutdown" { // it has been deleted
		b.die(name)
	}
	if m.hypervisor != nil {
		if done, err := m.handleOld(ctx, req); done || err != nil {
			return err
		}
	}
	switch name {
	case "Create":
		return m.create(ctx, req.(*task.CreateTaskRequest), resp.(*task.CreateTaskResponse))
	case "Connect":
		r := resp.(*task.ConnectResponse)
		r.ShimPid, r.TaskPid = uint32(os.Getpid()), uint32(os.Getpid())
		return nil
	case "Stats":
		if m.hypervisor != nil && closed(m.hypervisor.died) {
			return status.Error(codes.Unknown, "transport is closing")
		}
		return m.stats(own, resp.(*task.StatsResponse))
	case "Shutdown":
		m.shutdown(ctx, req)
		return nil
	case "Kill":
		k := req.(*task.KillRequest)
		if k.All { // means the container, whatever else the request names
			k.ExecID = ""
		}
		if k.ExecID == "" && m.created(ctx, id) {
			return status.Errorf(codes.FailedPrecondition, "container %s is not running", id)
		}
		if k.ExecID == "" && k.Signal == uint32(unix.SIGKILL) && own.hangs("kill") {
			return nil
		}
	}
	if err := m.call(ctx, name, req, resp); err != nil {
		return err
	}
	if m.hypervisor != nil {
		m.afterOld(req, resp)
	}
	m.after(own, resp)
	if name == "Start" && own.hangs("deaf") {
		_ = m.listener.Close()
	}
	return nil
}

// after makes the answers look like Kata's.
func (m *machine) after(own *member, resp message) {
	pid := uint32(os.Getpid())
	switch r := resp.(type) {
	case *task.StartResponse:
		r.Pid = pid
	case *task.StateResponse:
		r.Pid = pid
	case *task.WaitResponse:
		if r.ExitStatus == 137 && ranOut(own) {
			_ = os.WriteFile(filepath.Join(own.dir, "oom"), nil, 0o600)
		}
	case *task.DeleteResponse:
		if r.Pid == 0 {
			break
		}
		r.Pid = pid
	}
}

func (m *machine) call(ctx context.Context, name string, req, resp message) error {
	ctx = ttrpc.WithMetadata(ctx, ttrpc.MD{"containerd-namespace-ttrpc": {shim.Namespace}})
	m.mu.Lock()
	client := m.inner
	m.mu.Unlock()
	if client == nil {
		return status.Error(codes.Unavailable, "the machine does not run")
	}
	if err := m.before(req); err != nil {
		return err
	}
	err := client.Call(ctx, "containerd.task.v2.Task", name, req, resp)
	if err == nil {
		m.began(req)
	}
	if d, ok := req.(*task.DeleteRequest); ok && err == nil && d.ExecID == "" {
		m.mu.Lock()
		delete(m.members, d.ID)
		m.mu.Unlock()
	}
	return err
}

func (m *machine) member(id string) *member {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.members[id]
}

func (m *machine) created(ctx context.Context, id string) bool {
	var s task.StateResponse
	err := m.call(ctx, "State", &task.StateRequest{ID: id}, &s)
	return err == nil && s.Status == tasktypes.Status_CREATED
}

// create boots the machine for the pod's own container, and requires it for
// others.
func (m *machine) create(ctx context.Context, req *task.CreateTaskRequest, resp *task.CreateTaskResponse) error {
	b, err := readBundle(req.Bundle)
	if err != nil {
		return err
	}
	_, itself, err := b.sandbox()
	if err != nil {
		return err
	}
	if itself {
		time.Sleep(b.bootTime())
		if !wasm() {
			if err := addLink(b); err != nil {
				return err
			}
		}
	} else if m.initPID == 0 {
		return errNoSandbox
	} else if err := m.moveIn(req.Bundle, b); err != nil {
		return err
	}
	b.die("Create")
	program := inner(req.ID, req.Bundle, m.dir)
	endpoint, err := program.Begin(ctx)
	if err != nil {
		return err
	}
	if itself {
		conn, err := net.Dial("unix", strings.TrimPrefix(endpoint.Address, "unix://"))
		if err != nil {
			return err
		}
		m.mu.Lock()
		m.inner = ttrpc.NewClient(conn)
		m.mu.Unlock()
	}
	req.Options = program.Options
	if err := m.call(ctx, "Create", req, resp); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if itself {
		m.initPID, m.cgroup = int(resp.Pid), b.spec.Linux.CgroupsPath
	}
	m.members[req.ID] = &member{dir: req.Bundle, bundle: b}
	if itself && old() {
		if m.hypervisor, err = startHypervisor(m.dir, req.ID); err != nil {
			return err
		}
	}
	resp.Pid = uint32(os.Getpid())
	return nil
}

// moveIn puts a container into the machine: its usage counts in the sandbox's
// cgroup. If it joins a PID namespace, the path is that of this process, whose
// pid all tasks have; it means the sandbox's.
func (m *machine) moveIn(dir string, b *bundle) error {
	b.spec.Linux.CgroupsPath = filepath.Join(m.cgroup, filepath.Base(b.spec.Linux.CgroupsPath))
	for i, n := range b.spec.Linux.Namespaces {
		if n.Type == specs.PIDNamespace && n.Path != "" {
			b.spec.Linux.Namespaces[i].Path = fmt.Sprintf("/proc/%d/ns/pid", m.initPID)
		}
	}
	text, err := json.Marshal(b.spec)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "config.json"), text, 0o600)
}

// shutdown ends the shim with its last container.
func (m *machine) shutdown(ctx context.Context, req message) {
	m.mu.Lock()
	left := len(m.members)
	m.mu.Unlock()
	if left > 0 {
		return
	}
	_ = m.call(ctx, "Shutdown", req, new(emptypb.Empty))
	if b, err := readBundle(m.dir); err == nil {
		removeLink(b)
	}
	select {
	case <-m.ended:
	default:
		close(m.ended)
	}
}

// stats returns the message of cgroup v1, like Kata.
func (m *machine) stats(own *member, resp *task.StatsResponse) error {
	at := own.bundle.spec.Linux.CgroupsPath
	number := func(names ...string) uint64 {
		for _, name := range names {
			text, err := cgroup.ReadFile(at, name)
			if n, failed := strconv.ParseUint(text, 10, 64); err == nil && failed == nil {
				return n
			}
		}
		return 0
	}
	cpu := number("cpuacct.usage")
	if text, err := cgroup.ReadFile(at, "cpu.stat"); err == nil && cpu == 0 {
		_, _ = fmt.Sscanf(text, "usage_usec %d", &cpu)
		cpu *= 1000
	}
	inner := func(number protowire.Number, b []byte) []byte {
		return protowire.AppendBytes(protowire.AppendTag(nil, number, protowire.BytesType), b)
	}
	value := func(number protowire.Number, n uint64) []byte {
		return protowire.AppendVarint(protowire.AppendTag(nil, number, protowire.VarintType), n)
	}
	text := inner(2, value(1, number("pids.current")))
	text = append(text, inner(3, inner(1, value(1, cpu)))...)
	text = append(text, inner(4, inner(33, value(2, number("memory.usage_in_bytes", "memory.current"))))...)
	resp.Stats = &anypb.Any{TypeUrl: "io.containerd.cgroups.v1.Metrics", Value: text}
	return nil
}

// ranOut reports whether the kernel has OOM-killed a process of the container.
func ranOut(own *member) bool {
	for _, name := range []string{"memory.oom_control", "memory.events"} {
		text, err := cgroup.ReadFile(own.bundle.spec.Linux.CgroupsPath, name)
		if err != nil {
			continue
		}
		for line := range strings.Lines(text) {
			if n, ok := strings.CutPrefix(line, "oom_kill "); ok && strings.TrimSpace(n) != "0" {
				return true
			}
		}
	}
	return false
}
