package monitor

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/test/kit/wait"
)

// containerd#12375: who is told of the exit finds the log complete, however much the
// container had written that nobody had read.
func TestLogIsCompleteAtExit(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	m := newMonitor(wire.Options{ID: "id", LogFile: dir + "/log", ExitFile: dir + "/exit.json"}, nil)
	var err error
	if m.poll.fd, err = syscall.EpollCreate1(syscall.EPOLL_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(m.poll.fd)
	if err := m.log.open("", m.opt.LogFile); err != nil {
		t.Fatal(err)
	}
	defer func() { syscall.Close(m.log.fd) }()
	var p [2]int
	if err := syscall.Pipe2(p[:], syscall.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	_ = growPipe(p[0], 1<<20)
	m.stdout.fd, m.state = p[0], running
	if err := m.stdout.watch(m.poll); err != nil {
		t.Fatal(err)
	}
	written := strings.Repeat(strings.Repeat("x", 4095)+"\n", 3*turn/4096)
	if n, err := syscall.Write(p[1], []byte(written)); n != len(written) {
		t.Fatalf("wrote %d, %v", n, err)
	}

	m.conclude(wire.Exit{}) // and somebody still holds the pipe
	if got := read(t, m.opt.LogFile); strings.Count(got, "x") != strings.Count(written, "x") {
		t.Errorf("%d bytes in the log", len(got))
	}
	if _, err := os.Stat(m.opt.ExitFile); err == nil {
		t.Error("recorded before it was due")
	}
	m.proceed(false)
	if got := read(t, m.opt.ExitFile); !m.recorded || !m.told || m.left || !strings.Contains(got, `"exit_code":0`) {
		t.Errorf("recorded: %v, told: %v, left: %v: %s", m.recorded, m.told, m.left, got)
	}
	syscall.Close(p[1])
	wait.For(t, "the monitor to leave", func() bool { // until its exec, a child of a parallel test has the pipe too
		m.ready(m.stdout.number())
		m.proceed(false)
		return m.left && m.stdout.ended()
	})
}

// The end of a container whose runtime copies its output is told once no more comes, and does not
// wait for ever.
func TestOutputThatIsUnderway(t *testing.T) {
	t.Parallel()
	const hour = 3_600_000
	m := newMonitor(wire.Options{ID: "id", Fifos: true}, nil)
	m.conclude(wire.Exit{})
	if m.underway() {
		t.Error("the streams have ended")
	}
	m.stdout.fd = 1
	defer func() { m.stdout.fd = -1 }()
	m.ended, m.moved = uptime(), uptime()-hour
	if m.underway() {
		t.Error("nothing came for an hour")
	}
	if m.ready(m.stdout.number()); m.moved < m.ended {
		t.Error("what has come is not noted")
	}
	if m.moved += hour; !m.underway() {
		t.Error("output is not waited for")
	}
	if m.ended -= hour; m.underway() {
		t.Error("a writer that never ends is waited for")
	}
}

// An exit file that cannot be written is tried for a while before anybody is
// told, and further after that.
func TestExitFileRefused(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "later", "exit.json")
	m := newMonitor(wire.Options{ID: "id", ExitFile: file}, nil)
	m.complaints = 1 << 20 // not into the output of the test
	m.conclude(wire.Exit{Code: 137, Signal: 9})
	for i := 1; !m.told; i++ {
		if m.proceed(false); m.recorded || m.left || m.pollTimeout() <= 0 || i > 100 {
			t.Fatalf("attempt %d: recorded: %v, left: %v, pollTimeout %d", i, m.recorded, m.left, m.pollTimeout())
		}
	}
	if m.attempts < 10 {
		t.Errorf("told after %d attempts", m.attempts)
	}
	if m.proceed(false); m.left {
		t.Error("the monitor has left with what only it knows")
	}
	if err := os.Mkdir(filepath.Dir(file), 0o700); err != nil {
		t.Fatal(err)
	}
	if m.proceed(false); !m.recorded || !m.left {
		t.Errorf("recorded: %v, left: %v", m.recorded, m.left)
	}
	if got := read(t, file); !strings.Contains(got, `"exit_code":137,"signal":9`) {
		t.Error(got)
	}
}

// The answer of a runtime's wait command is a status that a process can have, or
// none at all.
func FuzzExitStatus(f *testing.F) {
	f.Add([]byte(`{"id":"a","exitStatus":5}`), 5)
	f.Add([]byte(`{"exitStatus":256}`), 255)
	f.Add([]byte(`{"exitStatus":-1}"exitStatus":7`), -1)
	f.Add([]byte(`"exitStatus":`), 0)
	f.Add([]byte(`{"exitStatus":007}`), 137)
	f.Fuzz(func(t *testing.T, text []byte, code int) {
		if got, ok := exitStatus(text); got < 0 && ok || got > 255 && ok || ok && !bytes.Contains(text, []byte(`"exitStatus":`)) {
			t.Errorf("%q is the exit status %d", text, got)
		}
		var document map[string]any
		if json.Unmarshal(text, &document) != nil || bytes.Contains(text, []byte("exitStatus")) || len(document) == 0 {
			return
		}
		document["exitStatus"] = code
		answer, err := json.Marshal(document)
		if err != nil {
			t.Fatal(err)
		}
		if got, ok := exitStatus(answer); ok != (code >= 0 && code <= 255) || ok && got != code {
			t.Errorf("%s is the exit status %d, %v", answer, got, ok)
		}
	})
}

// A pid file holds a pid that the kernel may give, in its one decimal form.
func FuzzPidFile(f *testing.F) {
	for _, text := range []string{"1\n", "4194304", "0\n", "-1\n", "+7", "007\n", " 7", "7 \n", "1073741825", "18446744073709551617"} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		m := monitor{opt: wire.Options{PidFile: filepath.Join(t.TempDir(), "pid"), Wait: []string{"x"}}}
		if err := os.WriteFile(m.opt.PidFile, text, 0o600); err != nil {
			t.Fatal(err)
		}
		pid, err := readPidFile(m.opt.PidFile, m.opt.Remote())
		if err != nil {
			if pid != 0 || !strings.Contains(err.Error(), "holds no pid") {
				t.Errorf("%q is %d, %v", text, pid, err)
			}
			return
		}
		if line, _, _ := strings.Cut(string(text), "\n"); line != strconv.Itoa(pid) || pid <= 0 {
			t.Errorf("%q is the pid %d", text, pid)
		}
	})
}
