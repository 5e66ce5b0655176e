package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	task "github.com/containerd/containerd/api/runtime/task/v2"
	tasktypes "github.com/containerd/containerd/api/types/task"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/emptypb"
)

// hypervisor is the process that takes the place of Kata 1's qemu.
type hypervisor struct {
	process *os.Process
	died    chan struct{}
	down    chan struct{} // closed once the sandbox has ended, and the machine after it
}

// machineProgram is a link to this program.
const machineProgram = "qemu-system-fakekata"

// machineFile is the name of the file with its pid, beside the sandbox's bundle.
const machineFile = "machine.pid"

func startHypervisor(dir, id string) (*hypervisor, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(filepath.Join(filepath.Dir(self), machineProgram), "machine", "-name", "sandbox-"+id, "-chardev", "socket,path="+dir+"/console.sock")
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	h := &hypervisor{process: cmd.Process, died: make(chan struct{}), down: make(chan struct{})}
	go func() {
		_ = cmd.Wait()
		close(h.died)
	}()
	return h, os.WriteFile(filepath.Join(dir, machineFile), fmt.Append(nil, cmd.Process.Pid), 0o600)
}

// stopTime is how long a machine takes to stop.
const stopTime = 300 * time.Millisecond

// endMachine kills the machine that a dead shim has left.
func endMachine(dir string) {
	text, err := os.ReadFile(filepath.Join(dir, machineFile))
	if err != nil {
		return
	}
	if pid, err := strconv.Atoi(strings.TrimSpace(string(text))); err == nil && pid > 1 {
		_ = unix.Kill(pid, unix.SIGKILL)
	}
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// watch stops the machine after the sandbox's container has ended. If it dies
// before, it takes all containers with it.
func (m *machine) watch(ctx context.Context, sandbox string) {
	go func() {
		<-m.hypervisor.died
		m.mu.Lock()
		var all []string
		for id := range m.members {
			all = append(all, id)
		}
		m.mu.Unlock()
		for _, id := range all {
			_ = m.call(ctx, "Kill", &task.KillRequest{ID: id, Signal: uint32(unix.SIGKILL), All: true}, new(emptypb.Empty))
		}
	}()
	_ = m.call(ctx, "Wait", &task.WaitRequest{ID: sandbox}, new(task.WaitResponse))
	if !closed(m.hypervisor.died) {
		m.stopping.Store(true)
		time.Sleep(stopTime)
		_ = m.hypervisor.process.Kill()
		<-m.hypervisor.died
	}
	close(m.hypervisor.down)
}

// running reports whether the container has been started and has not ended. The
// sandbox ends with its machine.
func (m *machine) running(ctx context.Context, id string) bool {
	var s task.StateResponse
	err := m.call(ctx, "State", &task.StateRequest{ID: id}, &s)
	return err == nil && (s.Status == tasktypes.Status_RUNNING || s.Status == tasktypes.Status_STOPPED && m.id == id && !closed(m.hypervisor.down))
}

// handleOld does what Kata 1 does differently, and reports whether that was all.
func (m *machine) handleOld(ctx context.Context, req message) (done bool, err error) {
	switch r := req.(type) {
	case *task.ExecProcessRequest: // which Start makes
		m.mu.Lock()
		m.execs[r.ExecID] = r
		m.mu.Unlock()
		return true, nil
	case *task.StartRequest:
		return false, m.begin(ctx, r)
	case *task.DeleteRequest:
		if r.ExecID != "" || !m.running(ctx, r.ID) {
			return false, nil
		}
		m.mu.Lock()
		delete(m.members, r.ID)
		m.mu.Unlock()
		return true, nil
	case *task.ShutdownRequest:
		m.mu.Lock()
		left := len(m.members)
		m.mu.Unlock()
		if left == 0 && !closed(m.hypervisor.down) {
			os.Exit(0) // the machine is left to nobody
		}
	}
	return false, nil
}

// begin prepares the start of a process. The input of a command lasts no longer
// than the request that starts it, if that has a deadline.
func (m *machine) begin(ctx context.Context, r *task.StartRequest) error {
	if r.ExecID == "" {
		if r.ID == m.id {
			go m.watch(context.WithoutCancel(ctx), r.ID)
		}
		return nil
	}
	m.mu.Lock()
	exec := m.execs[r.ExecID]
	delete(m.execs, r.ExecID)
	m.mu.Unlock()
	if exec == nil {
		return nil
	}
	if _, limited := ctx.Deadline(); limited {
		exec.Stdin = ""
	}
	return m.call(ctx, "Exec", exec, new(emptypb.Empty))
}

// afterOld makes the answers look like Kata 1's.
func (m *machine) afterOld(req message, resp message) {
	switch r := resp.(type) {
	case *task.StateResponse:
		if req.(*task.StateRequest).ExecID == "" && r.ID == m.id && r.Status == tasktypes.Status_STOPPED && !closed(m.hypervisor.down) {
			r.Status = tasktypes.Status_RUNNING
		}
	case *task.WaitResponse:
		q := req.(*task.WaitRequest)
		if q.ExecID == "" && q.ID == m.id {
			<-m.hypervisor.down
		}
		if closed(m.hypervisor.died) && !m.stopping.Load() {
			r.ExitStatus = 0
		}
	}
}
