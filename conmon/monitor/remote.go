package monitor

import (
	"syscall"

	"github.com/crius-run/crius/conmon/wire"
)

// remote is what the monitor keeps of a container that has no process of its own
// on this machine: it lives in a runtime sandbox, gVisor's for one, whose process has
// another parent. The runtime takes the container's streams when it starts the
// container, and tells by another command, which runs as long as the container
// does, how it ended. Both are children of the monitor, one after the other.
type remote struct {
	stdio stdio // for the start; nothing once it has been tried

	pid          int // of the command under way, 0: there is none
	pidfd        int
	result       int // where the waiting command writes what it has found; -1: it is the starting one
	client       int // who waits for the start; -1: nobody
	started      bool
	failures     int   // of the waiting command, one after the other
	since        int64 // uptime at which it began
	again        bool  // it is to be run again
	gone         bool  // the runtime sandbox is dead
	helpersUntil int64 // uptime at which helpers are no longer waited for
	deadline     int64 // uptime at which the command is run again or, with gone, killed
}

// killed is the end of a container about which nobody can say more.
var killed = wire.Exit{Code: 128 + int(syscall.SIGKILL), Signal: int(syscall.SIGKILL)}

// startRemote runs the command that starts the container, once.
func (m *monitor) startRemote() error {
	switch {
	case m.opt.Held:
		return m.letGo()
	case len(m.opt.Start) == 0:
		return wire.Text("this container is not started through its monitor")
	case m.state == creating:
		return wire.Text("the container does not exist yet")
	case m.state == exited:
		return wire.Text("the container has exited")
	case m.remote.started:
		return nil
	}
	lock, err := lockStart(m.opt.Dir)
	if err != nil {
		return err
	}
	m.remote.started = true
	child := m.remote.stdio
	err = m.help(m.opt.Start, child, lock)
	m.lockDown() // the command has what it has, and its program does not run yet
	child.close()
	syscall.Close(lock)
	m.remote.stdio = stdio{}
	return err
}

// lockStart takes the lock that says that a start is under way. The command
// inherits it, and has it for as long as it runs. A server that has it looks just
// now whether the container is started.
func lockStart(dir string) (int, error) {
	path := dir + "/" + wire.StartLock
	fd, err := syscall.Open(path, syscall.O_RDWR|syscall.O_CREAT|syscall.O_CLOEXEC, 0o600)
	if err == nil {
		if err = syscall.Flock(fd, syscall.LOCK_EX|syscall.LOCK_NB); err != nil { //nolint:forbidigo // internal/flock links os, which the monitor does not
			syscall.Close(fd)
		}
	}
	if err != nil {
		return -1, wire.Fail("lock "+path, err)
	}
	return fd, nil
}

// startFor lets a client wait for the start that is under way: until then
// nothing it asks for is read, for answers come in the order of the requests.
func (m *monitor) startFor(i int) bool {
	if !m.held.under && (m.remote.pid == 0 || m.remote.result >= 0) {
		return false
	}
	if m.remote.client >= 0 {
		m.drop(m.remote.client) // of a server that has died: nobody asks twice
	}
	m.remote.client = i
	_ = syscall.EpollCtl(m.poll.fd, syscall.EPOLL_CTL_DEL, m.clients[i].fd, nil)
	return true
}

// help runs a command of the runtime on behalf of the container.
func (m *monitor) help(argv []string, files stdio, more ...int) error {
	all := []uintptr{uintptr(files[0]), uintptr(files[1]), uintptr(files[2])}
	for _, fd := range more {
		all = append(all, uintptr(fd))
	}
	pid, err := syscall.ForkExec(argv[0], argv, &syscall.ProcAttr{
		Env:   m.env,
		Files: all,
		Sys:   &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, PidFD: &m.remote.pidfd},
	})
	if err != nil {
		m.remote.pidfd = -1
		return wire.Fail("execute "+argv[0], err)
	}
	err = m.poll.add(m.remote.pidfd, syscall.EPOLLIN, helped, 0)
	if err != nil { // nobody would see its end, and another one may be run
		pidfdKill(m.remote.pidfd)
		_, _ = syscall.Wait4(pid, nil, 0, nil)
		syscall.Close(m.remote.pidfd)
		pid, m.remote.pidfd = 0, -1
	}
	m.remote.pid = pid
	return wire.Fail("watch "+argv[0], err)
}

// helperEnded collects the command that has ended and does what follows.
func (m *monitor) helperEnded(int) {
	var status syscall.WaitStatus
	if pid, _ := syscall.Wait4(m.remote.pid, &status, syscall.WNOHANG, nil); pid != m.remote.pid {
		return
	}
	m.remote.pid = 0
	syscall.Close(m.remote.pidfd)
	m.remote.pidfd = -1
	exit := wire.ExitOf(status)
	if m.remote.result >= 0 {
		m.waited(exit)
		return
	}
	var err error
	if exit.Code != 0 {
		err = wire.Text("exit code " + itoa(exit.Code))
	}
	m.answerStart(err)
	switch {
	case err == nil:
		m.await()
	case m.remote.gone:
		m.conclude(killed)
	}
}

// answerStart tells the client that waits for the start how it went.
func (m *monitor) answerStart(err error) {
	i := m.remote.client
	m.remote.client = -1
	if i < 0 {
		return
	}
	if m.poll.add(m.clients[i].fd, syscall.EPOLLIN, asked, i) != nil {
		m.drop(i)
		return
	}
	answer := wire.Message{Verb: wire.OK}
	if err != nil {
		answer = wire.Message{Verb: wire.Error, Text: err.Error()}
	}
	m.send(i, answer)
}

// await runs the command that ends when the container does.
func (m *monitor) await() {
	m.remote.again = false
	var p [2]int
	err := syscall.Pipe2(p[:], syscall.O_CLOEXEC|syscall.O_NONBLOCK)
	if err == nil {
		m.remote.result = p[0]
		err = m.help(m.opt.Wait, stdio{max(m.fifos.leash[0], 0), p[1], 2})
		syscall.Close(p[1])
	}
	m.remote.since = uptime()
	if err != nil { // processes or descriptors are used up, say; of the container it says nothing
		m.complaints.add(wire.Fail("wait for the container", err))
		m.waitFailed(false)
	}
}

// waited reads what the waiting command has found. As long as the runtime sandbox lives
// one that failed, or was killed, is run again.
func (m *monitor) waited(exit wire.Exit) {
	var buf [512]byte
	n, _ := syscall.Read(m.remote.result, buf[:])
	code, ok := exitStatus(buf[:max(n, 0)])
	if exit.Code == 0 && ok {
		end := wire.Exit{Code: code}
		if contains(buf[:n], `"oom":true`) {
			end.OOMKills = 1
		}
		m.conclude(end)
		return
	}
	m.waitFailed(true)
}

// waitFailed runs the command again, unless it has run and failed for some seconds without
// a break.
func (m *monitor) waitFailed(ran bool) {
	const (
		bearable = 25
		lasting  = 10_000
		pause    = 200
	)
	if m.remote.result >= 0 {
		syscall.Close(m.remote.result)
		m.remote.result = -1
	}
	if uptime()-m.remote.since > lasting {
		m.remote.failures = 0
	}
	if ran {
		m.remote.failures++
	}
	if m.remote.gone || m.remote.failures > bearable {
		m.conclude(killed)
		return
	}
	m.remote.again = true
	m.remote.deadline = uptime() + pause
}

// persist does what is due while the container runs.
func (m *monitor) persist() {
	switch {
	case m.remote.again && uptime() >= m.remote.deadline:
		m.await()
	case m.remote.gone && uptime() > m.remote.deadline && m.remote.pid != 0:
		pidfdKill(m.remote.pidfd)
	}
}

// sandboxEnded is the end of the container, whatever it was doing. A command
// that waits for it may be about to say that it had ended before.
func (m *monitor) sandboxEnded() {
	const grace = 5000
	syscall.Close(m.watched)
	m.watched = -1
	m.remote.gone, m.remote.again = true, false
	m.remote.deadline = uptime() + grace
	if m.remote.pid == 0 {
		m.conclude(killed)
	}
}

// reapedHelpers collects the runtime's helpers, and reports whether there are none any
// more, or they have had their time.
func (r *remote) reapedHelpers() bool {
	const helperTime = 3000
	if r.helpersUntil == 0 {
		r.helpersUntil = uptime() + helperTime
	}
	for {
		pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
		switch {
		case err == syscall.EINTR || pid > 0:
		case err == syscall.ECHILD:
			return true
		default:
			return uptime() > r.helpersUntil
		}
	}
}

// close ends the command under way, and buries it if it is dead at once.
func (r *remote) close() {
	const moment = 1
	if r.pidfd >= 0 {
		pidfdKill(r.pidfd)
		if readableWithin(r.pidfd, moment) {
			_, _ = syscall.Wait4(r.pid, nil, syscall.WNOHANG, nil)
		}
		syscall.Close(r.pidfd)
	}
	if r.result >= 0 {
		syscall.Close(r.result)
	}
	r.stdio.close()
	r.stdio, r.pid, r.pidfd, r.result, r.again = stdio{}, 0, -1, -1, false
}

func contains(text []byte, word string) bool { return index(text, word) >= 0 }

// exitStatus finds the number in {"id":"...","exitStatus":5}. An id needs no
// quoting.
func exitStatus(text []byte) (int, bool) {
	const key = `"exitStatus":`
	for i := 0; i+len(key) <= len(text); i++ {
		if string(text[i:i+len(key)]) != key {
			continue
		}
		end := i + len(key)
		for end < len(text) && text[end] >= '0' && text[end] <= '9' {
			end++
		}
		n, ok := wire.Number(text[i+len(key) : end])
		return int(n), ok && n < 256
	}
	return 0, false
}
