package monitor

import (
	"errors"
	"syscall"
	"unicode/utf8"

	"github.com/crius-run/crius/conmon/wire"
)

// spawn starts the runtime. Should the monitor be killed, the kernel kills the
// runtime, but nothing that the runtime has begun.
func (m *monitor) spawn(child stdio) error {
	if err := wire.Unlink(m.opt.PidFile); err != nil && !errors.Is(err, syscall.ENOENT) {
		return wire.Fail("remove stale "+m.opt.PidFile, err)
	}
	argv := m.opt.Runtime
	pid, err := syscall.ForkExec(argv[0], argv, &syscall.ProcAttr{
		Env:   m.env,
		Files: []uintptr{uintptr(child[0]), uintptr(child[1]), uintptr(child[2])},
		Sys:   &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, PidFD: &m.watched},
	})
	if err != nil {
		return wire.Fail("execute "+argv[0], err)
	}
	m.runtime = pid
	return m.poll.add(m.watched, syscall.EPOLLIN, ended, 0)
}

// runtimeEnded collects the runtime and nobody else: the container's init may
// have died before its pid is even known, and until it has been reaped that pid
// is no one else's.
func (m *monitor) runtimeEnded(int) {
	var status syscall.WaitStatus
	if pid, _ := syscall.Wait4(m.runtime, &status, syscall.WNOHANG, nil); pid != m.runtime {
		return
	}
	syscall.Close(m.watched)
	m.watched = -1
	m.stdout.ready, m.stderr.ready = true, true
	m.collect()
	if exit := wire.ExitOf(status); exit.Code != 0 {
		m.fail(exit.Code, lastWords(exit, m.stderr.said(), m.stdout.said()))
		return
	}
	if m.opt.Held { // it runs
		m.fail(0, "the runtime has restored the container without holding it: criu has not run its action-script")
		return
	}
	if err := m.adopt(); err != nil {
		m.fail(0, err.Error())
	}
}

func (m *monitor) initEnded(number int) {
	if m.opt.Fifos { // by Wait it is known, also of a process that is only a stand-in
		syscall.Close(m.watched)
		m.watched = -1
		return
	}
	if m.opt.Remote() {
		m.sandboxEnded()
		return
	}
	switch {
	case number == ofRestored && m.held.under:
		m.held.ended = uptime() // the runtime reaps it, or the monitor when that has ended
	case m.held.under:
		m.restoreEnded()
	default:
		m.reap()
	}
}

// reap collects the dead: the container's init and, of a container in the PID
// namespace of the host, orphans that the kernel has given to the subreaper.
func (m *monitor) reap() {
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, nil)
		switch {
		case err == syscall.EINTR:
		case pid <= 0:
			return
		case pid == m.container.PID && m.state == running:
			m.conclude(wire.ExitOf(status))
		}
	}
}

// lastWords is what a runtime that failed has to say about it.
func lastWords(exit wire.Exit, words, other string) string {
	switch {
	case words != "":
		return words
	case other != "":
		return other
	case exit.Signal != 0:
		return "killed by signal " + itoa(exit.Signal) + " without output"
	}
	return "exit code " + itoa(exit.Code) + " without output"
}

// adopt takes over the container that the runtime has made.
func (m *monitor) adopt() error {
	pid, err := readPidFile(m.opt.PidFile, m.opt.Remote())
	if err != nil {
		return err
	}
	if m.container, err = wire.Find(pid); err != nil {
		return err
	}
	if m.watched, err = pidfdOpen(pid); err == nil {
		err = m.poll.add(m.watched, syscall.EPOLLIN, ended, 0)
	}
	if err != nil {
		return wire.Fail("watch the container's init", err)
	}
	m.orphans = !m.opt.Remote() && samePIDNamespace(pid)
	if err := m.connectStreams(); err != nil {
		return err
	}
	m.watchCgroup(pid)
	if err := m.writeProcesses(nil); err != nil {
		return err
	}
	m.state = running
	m.stdout.touched = true    // as much was, to come here
	if len(m.opt.Start) == 0 { // else it is started from here, which takes all of root's might
		m.lockDown() // before anybody knows that it can be started
	}
	m.tell(createdMessage(m.container))
	if m.opt.Fifos {
		m.await()
	}
	return nil
}

func (m *monitor) lockDown() {
	if err := lockDown(&m.opt); err != nil {
		m.complaints.add(err)
	}
}

// watchCgroup takes note of the cgroup that the container's first process is in.
func (m *monitor) watchCgroup(pid int) {
	var buf [8192]byte
	table, err := wire.ReadFile(buf[:], "/proc/", itoa(pid), "/cgroup")
	if err != nil {
		m.complaints.add(wire.Fail("find the container's cgroup", err))
		return
	}
	m.oom.watch(table)
	if m.oom.own.fd >= 0 {
		// The oldest form of the counter cannot be waited for; it is read at exit.
		_ = m.poll.add(m.oom.own.fd, syscall.EPOLLPRI|edgeTriggered, starved, 0)
	}
	if !m.opt.Guest { // else it has the virtual machine, which the shim ends
		m.group.watch(m.opt.ID, pid, table, m.opt.Helpers)
	}
}

// readPidFile is the pid of the container's init, which a runtime has written. It must be
// a child of the monitor, unless the container is remote.
func readPidFile(path string, remote bool) (int, error) {
	var buf [32]byte
	text, err := wire.ReadFile(buf[:], path)
	if err != nil {
		return 0, wire.Fail("the runtime reports success, but its pid file cannot be read: "+path, err)
	}
	digits, _, _ := wire.Cut(text, '\n')
	pid, ok := wire.Number(digits)
	if !ok || pid == 0 || pid > 1<<30 {
		return 0, wire.Text("the runtime reports success, but " + path + " holds no pid")
	}
	if !remote && !isChild(int(pid)) {
		return 0, wire.Text("the runtime reports success, but process " + itoa(int(pid)) +
			", its container's init, is not a child of the monitor: " +
			"this runtime cannot be used through its command line")
	}
	return int(pid), nil
}

// connectStreams turns the streams from the runtime's words to the container's.
func (m *monitor) connectStreams() error {
	if words := m.stderr.said() + m.stdout.said(); words != "" {
		m.complaints.add(wire.Fail("runtime", wire.Text(words)))
	}
	if m.opt.Terminal {
		m.stdout.close()
		m.stderr.close()
		master, err := m.console.receive(m.opt.Dir)
		if err != nil {
			return err
		}
		m.stdout.fd, m.stdout.terminal = master, true
		if err := m.stdout.watch(m.poll); err != nil {
			return wire.Fail("watch terminal", err)
		}
		return nil
	}
	if m.opt.Fifos {
		return m.fifos.connect(m.poll, &m.stdout, &m.stderr)
	}
	m.stdout.ready, m.stderr.ready = true, true
	return nil
}

func (m *monitor) writeProcesses(rest *wire.Rest) error {
	var buf [256]byte
	return wire.WriteFile(m.opt.Dir+"/"+wire.Processes, wire.AppendProcesses(buf[:0], m.self, m.container, rest), false)
}

// fail tells why there is no container and leaves no process behind.
func (m *monitor) fail(code int, text string) {
	killChildren()
	m.tell(wire.Message{Verb: wire.Failed, Num: [4]uint64{uint64(code)}, Text: text})
	m.left = true
}

// killChildren kills all that this process has begun, down to the last grandchild:
// who loses a parent becomes a child of the subreaper and is found in the next
// round. Somebody whom the kernel cannot kill now is not waited for long.
func killChildren() {
	var buf [512]byte
	me := uint64(syscall.Getpid())
	for pause := int64(1e6); pause < 1e9; pause += pause / 4 {
		for {
			pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
			if err == syscall.ECHILD {
				return
			}
			if pid <= 0 {
				break
			}
		}
		pids, _ := numbersIn("/proc")
		for _, pid := range pids {
			stat, err := wire.ReadFile(buf[:], "/proc/", itoa(pid), "/stat")
			if parent, _ := wire.StatField(stat, 4); err == nil && parent == me {
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
		}
		moment := syscall.NsecToTimespec(pause)
		_ = syscall.Nanosleep(&moment, nil)
	}
}

// printable is b as text: what is not UTF-8 replaced, no blanks around it.
func printable(b []byte) string {
	var text []byte
	for len(b) > 0 {
		r, size := utf8.DecodeRune(b)
		text = utf8.AppendRune(text, r)
		b = b[size:]
	}
	isBlank := func(c byte) bool { return c == ' ' || c == '\n' || c == '\r' || c == '\t' }
	for len(text) > 0 && isBlank(text[len(text)-1]) {
		text = text[:len(text)-1]
	}
	for len(text) > 0 && isBlank(text[0]) {
		text = text[1:]
	}
	return string(text)
}
