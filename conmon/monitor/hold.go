package monitor

import (
	"errors"
	"syscall"

	"github.com/crius-run/crius/conmon/wire"
)

// A container that is restored from a checkpoint must not run before it is started. criu runs this program at
// each of its steps (its option action-script). Before the last one, when all processes are as they will be and
// none has continued, the program reports to the monitor, and criu waits until it ends: that is how the
// container is held. It is created then, and a start lets it go.

// held is what the monitor has of a container that is being restored.
type held struct {
	under  bool  // the runtime is waiting for criu, which is waiting for the holder
	let    bool  // the container may run
	holder int   // client; -1: none
	pidfd  int   // of the container's init, until it is the monitor's child
	ended  int64 // uptime when the init was found dead while the runtime was still there; 0: it was not
}

// ofRestored is the number of the event that the init has ended, and not the runtime that has restored it.
const ofRestored = 1

// runtimeTime is how many milliseconds a runtime may stay after the init that it has restored. It takes some tens.
const runtimeTime = 5_000

// overdue returns for how many milliseconds more the runtime may stay.
func (h *held) overdue() int64 { return max(0, h.ended+runtimeTime-uptime()) }

var notHeld = held{holder: -1, pidfd: -1}

// Variables by which criu says what it is about to do.
const (
	criuStep = "CRTOOLS_SCRIPT_ACTION"
	criuInit = "CRTOOLS_INIT_PID"

	lastStep = "pre-resume"
)

// hold is this program when criu runs it. Its exit code means nothing to criu: only the death of the process
// keeps it from running, so that is the end of every failure.
func hold(dir string) int {
	if step, _ := syscall.Getenv(criuStep); step != lastStep {
		return 0
	}
	text, _ := syscall.Getenv(criuInit)
	pid, ok := wire.Number([]byte(text))
	if !ok || pid == 0 || pid > 1<<30 {
		return 1
	}
	pidfd, err := pidfdOpen(int(pid))
	if err != nil { // it is dead, or it would run unwatched
		_ = syscall.Kill(int(pid), syscall.SIGKILL)
		return 1
	}
	ignoreSignals()
	protectFromOOM()
	if err := awaitStart(dir, pid, pidfd); err != nil {
		pidfdKill(pidfd)
		_, _ = syscall.Write(2, []byte("crius-conmon: "+err.Error()+"\n"))
		return 1
	}
	return 0
}

// awaitStart returns when the monitor has let the container go. It is an error if the monitor, or the
// container, ends before.
func awaitStart(dir string, pid uint64, pidfd int) error {
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_SEQPACKET|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return wire.Fail("open socket", err)
	}
	if err := syscall.Connect(fd, &syscall.SockaddrUnix{Name: dir + "/" + wire.Socket}); err != nil {
		return wire.Fail("connect to the monitor", err)
	}
	if err := say(fd, wire.Message{Verb: wire.Held, Num: [4]uint64{pid}}); err != nil {
		return wire.Fail("report to the monitor", err)
	}
	poll := poller{-1}
	if poll.fd, err = syscall.EpollCreate1(syscall.EPOLL_CLOEXEC); err != nil {
		return wire.Fail("open epoll", err)
	}
	if err := poll.add(fd, syscall.EPOLLIN, asked, 0); err != nil {
		return wire.Fail("watch the monitor", err)
	}
	if err := poll.add(pidfd, syscall.EPOLLIN, ended, 0); err != nil {
		return wire.Fail("watch the container", err)
	}
	var buf [wire.MaxPacket]byte
	for {
		var happened [1]syscall.EpollEvent
		n, err := syscall.EpollWait(poll.fd, happened[:], -1)
		if err != nil && !errors.Is(err, syscall.EINTR) {
			return wire.Fail("wait for the monitor", err)
		}
		if n < 1 {
			continue
		}
		if event(happened[0].Fd) == ended {
			return wire.Text("the container has been killed before it was started")
		}
		n, _, err = receive(fd, buf[:], nil)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil || n == 0 {
			return wire.Text("the monitor has ended")
		}
		switch msg, _ := wire.Parse(buf[:n]); msg.Verb {
		case wire.OK:
			return nil
		case wire.Error:
			return wire.Text(msg.Text)
		}
	}
}

// holdBack takes over a container that is restored and held by client i, whose request is answered by letGo.
func (m *monitor) holdBack(i int, pid uint64) error {
	if !m.opt.Held || m.state != creating || m.held.under || pid == 0 || pid > 1<<30 {
		return wire.Text("no container is being restored")
	}
	container, err := wire.Find(int(pid))
	if err != nil {
		return err
	}
	pidfd, err := pidfdOpen(int(pid))
	if err != nil {
		return wire.Fail("watch the container's init", err)
	}
	if again, err := wire.Find(int(pid)); err != nil || again != container {
		syscall.Close(pidfd)
		return wire.Text("the container's init has ended")
	}
	m.container, m.held = container, held{under: true, holder: i, pidfd: pidfd}
	m.collect()
	if err := m.connectStreams(); err != nil {
		return err
	}
	m.watchCgroup(container.PID)
	if err := m.writeProcesses(nil); err != nil {
		return err
	}
	m.state = running
	m.stdout.touched = true
	m.tell(createdMessage(m.container))
	return nil
}

// letGo has criu resume the container.
func (m *monitor) letGo() error {
	switch {
	case m.state == creating:
		return wire.Text("the container does not exist yet")
	case m.state == exited:
		return wire.Text("the container has exited")
	case !m.held.under, m.held.let:
		return nil
	case m.held.holder < 0:
		return wire.Text("the container has been killed before it was started")
	}
	// Without that file a server knows that the container may run.
	if err := wire.Unlink(m.opt.Dir + "/" + wire.HeldFile); err != nil && !errors.Is(err, syscall.ENOENT) {
		return wire.Fail("remove "+wire.HeldFile, err)
	}
	m.held.let = true
	if err := m.poll.add(m.held.pidfd, syscall.EPOLLIN|edgeTriggered, ended, ofRestored); err != nil {
		m.complaints.add(wire.Fail("watch the container's init", err))
	}
	m.send(m.held.holder, wire.Message{Verb: wire.OK})
	return nil
}

// holderLeft is the end of the holder: unless it was told to go, criu is about to resume the container.
func (m *monitor) holderLeft() {
	m.held.holder = -1
	if !m.held.let && m.held.pidfd >= 0 {
		pidfdKill(m.held.pidfd)
	}
}

// restoreEnded collects the runtime. If it has succeeded, the container's init is a child of the monitor, as any
// other's; if it has not, no process of it may stay.
func (m *monitor) restoreEnded() {
	var status syscall.WaitStatus
	if pid, _ := syscall.Wait4(m.runtime, &status, syscall.WNOHANG, nil); pid != m.runtime {
		return
	}
	syscall.Close(m.watched)
	m.watched = m.held.pidfd
	_ = syscall.EpollCtl(m.poll.fd, syscall.EPOLL_CTL_DEL, m.watched, nil)
	let, hung := m.held.let, m.held.ended != 0 && m.held.overdue() == 0
	m.held = notHeld
	var err error
	switch exit := wire.ExitOf(status); {
	case exit.Code != 0 && !hung:
		err = wire.Text("the runtime could not resume the container: exit code " + itoa(exit.Code))
	case !let || !isChild(m.container.PID):
		err = wire.Text("the container's init has ended")
	default:
		err = wire.Fail("watch the container's init", m.poll.add(m.watched, syscall.EPOLLIN, ended, 0))
	}
	if err == nil {
		m.lockDown()
		m.answerStart(nil)
		return
	}
	m.complaints.add(err)
	pidfdKill(m.watched)
	killChildren()
	m.answerStart(err)
	m.conclude(killed)
}
