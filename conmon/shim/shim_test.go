package shim

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/api/runtime/bootstrap/v1"
	runc "github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/api/types/runtimeoptions/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/crius-run/crius/internal/fault"
	testprogram "github.com/crius-run/crius/test/kit/program"
	"github.com/crius-run/crius/test/kit/wait"
)

func TestAnswersToStart(t *testing.T) {
	t.Parallel()
	message, err := proto.Marshal(&bootstrap.BootstrapResult{Version: 3, Address: "unix:///run/s/x", Protocol: "ttrpc"})
	if err != nil {
		t.Fatal(err)
	}
	for answer, want := range map[string]struct {
		Endpoint
		socket, complaint string
	}{
		"unix:///run/s/x": {Endpoint{"unix:///run/s/x", 2}, "/run/s/x", ""},
		"kata/0123\n":     {Endpoint{"kata/0123", 2}, "@kata/0123", ""},
		"@kata/0123":      {Endpoint{"@kata/0123", 2}, "@kata/0123", ""},
		"/run/s/x":        {Endpoint{"/run/s/x", 2}, "@/run/s/x", ""},
		`{"version":2,"address":"unix:///x","protocol":"ttrpc"}`:                {Endpoint{"unix:///x", 2}, "/x", ""},
		`{"version":3,"address":"unix:///x","protocol":"ttrpc","news":{"a":1}}`: {Endpoint{"unix:///x", 3}, "/x", ""},
		string(message): {Endpoint{"unix:///run/s/x", 3}, "/run/s/x", ""},
		"":              {complaint: "has no address"},
		"two\nlines":    {complaint: "has no address"},
		`{"version":2}`: {complaint: "has no address"},
		"{oops":         {complaint: "cannot parse its answer"},
		`{"version":4,"address":"unix:///x","protocol":"ttrpc"}`: {complaint: "version 4"},
		"vsock://3:1024": {complaint: "only unix sockets"},
		"unix://x":       {complaint: "has no address"},
		`{"version":3,"address":"unix:///x","protocol":"grpc"}`: {complaint: `unsupported shim protocol "grpc"`},
	} {
		got, err := parseEndpoint([]byte(answer))
		if want.complaint != "" {
			if err == nil || !strings.Contains(err.Error(), want.complaint) {
				t.Errorf("%q: %v, want %q", answer, err, want.complaint)
			}
			continue
		}
		if err != nil || got != want.Endpoint || got.sockets()[0] != want.socket {
			t.Errorf("%q: %+v, %q, %v", answer, got, got.sockets()[0], err)
		}
	}
}

// An address without a scheme is an abstract name, whatever it looks like. Go
// before 1.22 bound such a name with a NUL at its end. The name of a file is
// one only with a scheme.
func TestDialAbstractName(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "shim.sock")
	for address, bound := range map[string]string{
		"/crius-test" + file:  "@/crius-test" + file,
		"/crius-test0" + file: "@/crius-test0" + file + "\x00",
		"crius-test" + file:   "@crius-test" + file + "\x00",
		"unix://" + file:      file,
	} {
		e, err := parseEndpoint([]byte(address))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := e.Dial(t.Context()); !errors.Is(err, fault.NotFound) {
			t.Errorf("%q before it is there: %v", address, err)
		}
		listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: bound, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		defer listener.Close()
		client, err := e.Dial(t.Context())
		if err != nil {
			t.Errorf("%q does not reach %q: %v", address, bound, err)
			continue
		}
		client.Close()
	}
}

// A shim's answer is either an address that can be dialled and recorded, or
// refused.
func FuzzEndpoint(f *testing.F) {
	message, err := proto.Marshal(&bootstrap.BootstrapResult{Version: 3, Address: "unix:///run/s/x", Protocol: "ttrpc"})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(message)
	for _, answer := range []string{"unix:///run/s/x", "kata/0123\n", "@", "unix://", "unix://x", "\xff", `{"version":3,"address":"unix:///x","news":{}}`, `{"version":4294967298,"address":"a"}`} {
		f.Add([]byte(answer))
	}
	f.Fuzz(func(t *testing.T, answer []byte) {
		e, err := parseEndpoint(answer)
		if err != nil {
			if len(err.Error()) > 2000 {
				t.Errorf("%q is refused with %d bytes", answer, len(err.Error()))
			}
			return
		}
		if s := e.sockets()[0]; len(s) < 2 || s[0] != '/' && s[0] != '@' || strings.ContainsAny(s, "\n\x00") || e.Version != 2 && e.Version != 3 {
			t.Errorf("%q is %+v, socket %q", answer, e, s)
		}
		dir := t.TempDir()
		if err := (Record{Endpoint: e}).Write(dir); err != nil {
			t.Fatal(err)
		}
		if r, err := ReadRecord(dir); err != nil || r.Endpoint != e {
			t.Errorf("%+v was recorded as %+v, %v", e, r.Endpoint, err)
		}
	})
}

func TestOptions(t *testing.T) {
	t.Parallel()
	if got, err := Options(true, nil); got != nil || err != nil {
		t.Errorf("no options: %v, %v", got, err)
	}
	got, err := Options(true, []string{"--Root=/a", "--SystemdCgroup=true", "--binary_name=crun", "--IoUid=7"})
	var r runc.Options
	if err != nil || got.TypeUrl != "containerd.runc.v1.Options" || proto.Unmarshal(got.Value, &r) != nil ||
		r.Root != "/a" || !r.SystemdCgroup || r.BinaryName != "crun" || r.IoUid != 7 {
		t.Errorf("%v, %v, %v", got, &r, err)
	}
	got, err = Options(false, []string{"--ConfigPath=/k.toml", "--TypeUrl=x", "--ConfigBody=a=b"})
	var k runtimeoptions.Options
	if err != nil || got.TypeUrl != "runtimeoptions.v1.Options" || proto.Unmarshal(got.Value, &k) != nil ||
		k.ConfigPath != "/k.toml" || k.TypeUrl != "x" || string(k.ConfigBody) != "a=b" {
		t.Errorf("%v, %v, %v", got, &k, err)
	}
	for line, words := range map[string]string{
		"--Nonsense=1": "config_path", "--ConfigPath": "KEY=VALUE", "--IoUid=x": "IoUid=x", "--SystemdCgroup=perhaps": "perhaps",
	} {
		_, err := Options(strings.Contains(line, "IoUid") || strings.Contains(line, "Systemd"), []string{line})
		if !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), words) {
			t.Errorf("%s: %v", line, err)
		}
	}
}

// A line sets one field, and a shim reads from the message what the line said.
func FuzzOptions(f *testing.F) {
	for _, line := range []string{"--Root=/a", "SystemdCgroup=true", "--io_uid=7", "---=", "--ConfigBody=\xff", "--IoUid=4294967296", "--root=\xff"} {
		f.Add(true, line)
		f.Add(false, line)
	}
	f.Fuzz(func(t *testing.T, ofRunc bool, line string) {
		got, err := Options(ofRunc, []string{line})
		if err != nil {
			if !errors.Is(err, fault.Invalid) {
				t.Errorf("%q: %v", line, err)
			}
			return
		}
		var message proto.Message = new(runtimeoptions.Options)
		if ofRunc {
			message = new(runc.Options)
		}
		if err := proto.Unmarshal(got.Value, message); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		_, value, _ := strings.Cut(line, "=")
		message.ProtoReflect().Range(func(d protoreflect.FieldDescriptor, v protoreflect.Value) bool {
			if d.Kind() == protoreflect.StringKind && v.String() != value || d.Kind() == protoreflect.BytesKind && string(v.Bytes()) != value {
				t.Errorf("%q sets %s to %q", line, d.Name(), v)
			}
			return true
		})
	})
}

func TestUsage(t *testing.T) {
	t.Parallel()
	inner := func(number protowire.Number, parts ...[]byte) []byte {
		return protowire.AppendBytes(protowire.AppendTag(nil, number, protowire.BytesType), bytes.Join(parts, nil))
	}
	value := func(number protowire.Number, n uint64) []byte {
		return protowire.AppendVarint(protowire.AppendTag(nil, number, protowire.VarintType), n)
	}
	v1 := bytes.Join([][]byte{
		inner(1, value(1, 99)), inner(2, value(1, 5), value(2, 100)), inner(3, inner(2, value(1, 8)), inner(1, value(2, 1), value(1, 777))),
		inner(4, value(30, 1000), inner(34, value(2, 9)), inner(33, value(1, 1), value(2, 4096))),
	}, nil)
	v2 := bytes.Join([][]byte{inner(1, value(1, 5)), inner(2, value(1, 3)), inner(4, value(13, 96), value(32, 4096))}, nil)
	for url, c := range map[string]struct {
		message []byte
		want    Usage
	}{
		"io.containerd.cgroups.v1.Metrics":                     {v1, Usage{CPU: 777, Memory: 4096, WorkingSet: 3096, Tasks: 5}},
		"type.googleapis.com/io.containerd.cgroups.v2.Metrics": {v2, Usage{CPU: 3000, Memory: 4096, WorkingSet: 4000, Tasks: 5}},
	} {
		if got, err := parseUsage(url, c.message); err != nil || got != c.want {
			t.Errorf("%s: %+v, %v", url, got, err)
		}
		for cut := range c.message { // whatever the result, it does not panic
			_, _ = parseUsage(url, c.message[:cut])
		}
	}
	if _, err := parseUsage("io.containerd.cgroups.v3.Metrics", nil); !errors.Is(err, fault.Unimplemented) {
		t.Error(err)
	}
}

func FuzzUsage(f *testing.F) {
	f.Add([]byte{0x1a, 2, 8, 1})
	f.Fuzz(func(_ *testing.T, message []byte) { _, _ = parseUsage("io.containerd.cgroups.v1.Metrics", message) })
}

func TestRecord(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if _, err := ReadRecord(dir); !errors.Is(err, fault.NotFound) || Begun(dir) || Begun("") {
		t.Errorf("where nothing is: %v", err)
	}
	want := Record{Endpoint: Endpoint{"unix:///x", 3}, Program: "/p", Leader: true, Sandboxed: true}
	if err := errors.Join(want.Write(dir), os.WriteFile(filepath.Join(dir, LogFile), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	if got, err := ReadRecord(dir); err != nil || got != want || !Begun(dir) {
		t.Errorf("%+v, %v", got, err)
	}
	if err := errors.Join(Forget(dir), Forget(dir)); err != nil || Begun(dir) {
		t.Errorf("forgotten twice: %v", err)
	}
}

// program returns a shim that is a script.
func program(t *testing.T, script string) Program {
	t.Helper()
	dir := t.TempDir()
	path := filepath.Join(dir, "shim")
	if err := testprogram.Write(path, []byte("#!/bin/sh\n"+script)); err != nil {
		t.Fatal(err)
	}
	return Program{Path: path, ID: "c1", Dir: dir, Server: "/run/us", Publisher: "/bin/true", Events: "/run/events"}
}

func TestBegin(t *testing.T) {
	t.Parallel()
	p := program(t, `echo "$PWD $* $TTRPC_ADDRESS $NAMESPACE" >asked; cat >>asked; printf unix:///x`)
	if e, err := p.Begin(t.Context()); err != nil || e.Address != "unix:///x" {
		t.Errorf("%v, %v", e, err)
	}
	asked, _ := os.ReadFile(filepath.Join(p.Dir, "asked"))
	for _, words := range []string{p.Dir + " ", "-namespace k8s.io", "-id c1", "-address /run/us", "-publish-binary /bin/true start", "unix:///run/events k8s.io"} {
		if !strings.Contains(string(asked), words) {
			t.Errorf("%q is not in %q", words, asked)
		}
	}
}

// A shim's child may continue as the daemon and keep its descriptors.
func TestBeginKeepsOutputOpen(t *testing.T) {
	t.Parallel()
	p := program(t, `sleep 1000 2>/dev/null & echo $! >child; printf unix:///x`)
	e, err := p.Begin(t.Context())
	if err != nil || e.Address != "unix:///x" {
		t.Errorf("%v, %v", e, err)
	}
	text, err := os.ReadFile(filepath.Join(p.Dir, "child"))
	if err != nil {
		t.Fatal(err)
	}
	child, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(child, syscall.SIGKILL); err != nil {
		t.Error(err)
	}
	dies(t, strconv.Itoa(child))
}

// dies waits for the end of a shim's child that has been killed.
func dies(t *testing.T, pid string) {
	t.Helper()
	wait.For(t, "the shim's child to be killed", func() bool {
		stat, err := os.ReadFile("/proc/" + pid + "/stat")
		return err != nil || strings.Contains(string(stat), ") Z ") // init reaps at any time
	})
}

// A shim that dies before the first connection counts as dead, not as slow.
func TestAwaitDeadShim(t *testing.T) {
	t.Parallel()
	soon, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := (Endpoint{Address: "unix://" + t.TempDir() + "/none", Version: 2}).await(soon); !errors.Is(err, fault.NotFound) {
		t.Error(err)
	}
}

// Shims of containerd 2.3 get everything on their standard input, with the
// options as an extension; older ones, which refuse that, options alone. A shim
// that is known to be older is not tried in vain.
func TestBeginBootstrap(t *testing.T) {
	t.Parallel()
	result, err := proto.Marshal(&bootstrap.BootstrapResult{Version: 3, Address: "unix:///y", Protocol: "ttrpc"})
	if err != nil {
		t.Fatal(err)
	}
	octal := ""
	for _, b := range result {
		octal += `\0` + string([]byte{'0' + b>>6, '0' + b>>3&7, '0' + b&7})
	}
	options, err := Options(true, []string{"--Root=/a"})
	if err != nil {
		t.Fatal(err)
	}
	told := func(p Program) string {
		text, err := os.ReadFile(filepath.Join(p.Dir, "told"))
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	p := program(t, `cat >told; echo >>runs; printf '%b' '`+octal+`'`)
	p.Options = options
	if e, err := p.Begin(t.Context()); err != nil || e != (Endpoint{"unix:///y", 3}) {
		t.Errorf("%v, %v (%s)", e, err, hex.EncodeToString(result))
	}
	var params bootstrap.BootstrapParams
	if err := proto.Unmarshal([]byte(told(p)), &params); err != nil || params.InstanceID != "c1" || params.Namespace != Namespace ||
		len(params.Extensions) != 1 || !proto.Equal(params.Extensions[0].Value, options) {
		t.Errorf("%v, %v", &params, err)
	}

	for older, runs := range map[bool]int64{false: 2, true: 1} {
		p = program(t, `cat >told; echo >>runs; grep -q 'c1.*k8s.io' told && { echo "IncorrectTag(46)" >&2; exit 1; }; printf unix:///x`)
		p.Options, p.Older = options, older
		if e, err := p.Begin(t.Context()); err != nil || e != (Endpoint{"unix:///x", 2}) {
			t.Errorf("older %v: %v, %v", older, e, err)
		}
		want, err := proto.Marshal(options)
		if err != nil {
			t.Fatal(err)
		}
		st, err := os.Stat(filepath.Join(p.Dir, "runs"))
		if err != nil || st.Size() != runs || told(p) != string(want) {
			t.Errorf("older %v: run with %q, %v, %v", older, told(p), st, err)
		}
	}
}

func TestBeginFails(t *testing.T) {
	t.Parallel()
	_, err := program(t, `echo "no vsock here" >&2; exit 1`).Begin(t.Context())
	if err == nil || strings.Count(err.Error(), "no vsock here") != 1 {
		t.Error(err)
	}
	// Both answers are shown: the caller cannot know which of them is about the form.
	p := program(t, `[ -s told ] && { echo "no vsock here" >&2; exit 1; }; cat >told; echo "no such message" >&2; exit 1`)
	if _, err := p.Begin(t.Context()); err == nil || !strings.Contains(err.Error(), "no vsock here") || !strings.Contains(err.Error(), "no such message") {
		t.Error(err)
	}
}

// A shim that does not answer is killed with its children when the caller's
// context ends.
func TestBeginHangs(t *testing.T) {
	t.Parallel()
	p := program(t, "sleep 1000 & echo $! >child; sleep 1000")
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	failed := make(chan error, 1)
	go func() {
		_, err := p.Begin(ctx)
		failed <- err
	}()
	var child string
	wait.For(t, "the shim to begin", func() bool {
		text, _ := os.ReadFile(filepath.Join(p.Dir, "child"))
		child = strings.TrimSpace(string(text))
		return child != ""
	})
	cancel(fault.Timeout)
	if err := <-failed; !errors.Is(err, fault.Timeout) {
		t.Errorf("begin: %v", err)
	}
	dies(t, child)
}

func TestDelete(t *testing.T) {
	t.Parallel()
	p := program(t, `echo "$*" >asked; ls -l "../$4/asked" >found; printf '\020\211\001'`)
	status, err := p.Delete(t.Context())
	if err != nil || status != 137 {
		t.Errorf("%d, %v", status, err)
	}
	if asked, _ := os.ReadFile(filepath.Join(p.Dir, "asked")); !strings.Contains(string(asked), "-bundle "+p.Dir+" delete") {
		t.Errorf("asked: %q", asked)
	}
	if found, _ := os.ReadFile(filepath.Join(p.Dir, "found")); len(found) == 0 {
		t.Error("the bundle is not beside its working directory")
	}
	if _, err := os.Lstat(filepath.Join(filepath.Dir(p.Dir), "c1")); err == nil {
		t.Error("a link is left")
	}
}

func TestWorkers(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if got := Workers(dir); len(got) != 0 {
		t.Errorf("%v", got)
	}
	cmd := exec.Command("sleep", "60")
	cmd.Dir = dir
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	if got := Workers(dir); len(got) != 1 || got[0].PID != cmd.Process.Pid {
		t.Errorf("%v, want %d", got, cmd.Process.Pid)
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if got := Workers(dir); len(got) != 1 {
		t.Errorf("in a directory that is gone: %v", got)
	}
}

// A shim that lacks a method does not know nothing of the container: the library of shims in Go
// says so by the code, that in Rust by the text.
func TestMethodsThatShimsLack(t *testing.T) {
	for _, c := range []struct {
		code codes.Code
		text string
		want error
	}{
		{codes.Unimplemented, "method Exec", fault.Unimplemented},
		{codes.NotFound, "/containerd.task.v2.Task/Exec is not supported", fault.Unimplemented},
		{codes.NotFound, "/containerd.task.v3.Task/Stats is not supported", fault.Unimplemented},
		{codes.NotFound, "container c is not found", fault.NotFound},
		{codes.NotFound, "container a is not supported", fault.NotFound},
	} {
		if err := classify(t.Context(), status.Error(c.code, c.text)); !errors.Is(err, c.want) {
			t.Errorf("%s, %q: %v, want %v", c.code, c.text, err, c.want)
		}
	}
}

func TestFifo(t *testing.T) {
	t.Parallel()
	f, err := NewFifo(filepath.Join(t.TempDir(), "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.Write.WriteString("abc"); err != nil || Unread(f.Path) != 3 {
		t.Errorf("%v, %d bytes", err, Unread(f.Path))
	}
	var buf [8]byte
	if n, err := f.Read.Read(buf[:]); n != 3 || err != nil || Unread(f.Path) != 0 {
		t.Errorf("%d, %v", n, err)
	}
	if _, err := NewFifo(f.Path); err == nil {
		t.Error("a FIFO that is there already")
	}
}

// What nobody reads is read until its end, or until nobody wants that any more.
func TestDiscard(t *testing.T) {
	t.Parallel()
	for what, end := range map[string]func(f *Fifo, stop func()){
		"end of the output":  func(f *Fifo, _ func()) { _ = f.Write.Close() },
		"end of the command": func(_ *Fifo, stop func()) { stop() },
	} {
		f, err := NewFifo(filepath.Join(t.TempDir(), "out"))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		ctx, stop := context.WithCancel(t.Context())
		defer stop() // the shim, like f, has both ends open
		var came atomic.Int32
		done := make(chan struct{})
		go func() {
			defer close(done)
			Discard(ctx, f.Path, func() { came.Add(1) })
		}()
		if _, err := f.Write.Write(make([]byte, 200<<10)); err != nil { // more than a pipe holds
			t.Errorf("%s: %v", what, err)
		}
		wait.For(t, "the output to be read", func() bool { return Unread(f.Path) == 0 })
		if came.Load() < 2 {
			t.Errorf("%s: it was reported %d times that something came", what, came.Load())
		}
		end(f, stop)
		<-done
	}
	Discard(t.Context(), filepath.Join(t.TempDir(), "none"), func() { t.Error("something came from nowhere") })
}

// A stream that ends before its reader has come leaves the reader waiting for a writer, so the
// maker waits until it has come.
func TestFifoAwaitsItsReader(t *testing.T) {
	t.Parallel()
	f, err := NewFifo(filepath.Join(t.TempDir(), "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	over, cancel := context.WithCancel(t.Context())
	cancel()
	if err := f.AwaitReader(over); !errors.Is(err, context.Canceled) {
		t.Errorf("without a reader: %v", err)
	}
	if _, err := f.Write.WriteString("abc"); err != nil {
		t.Errorf("write after that: %v", err)
	}
	read := make(chan string)
	go func() { // the shim, which opens the pipe late
		time.Sleep(20 * time.Millisecond)
		text, _ := os.ReadFile(f.Path)
		read <- string(text)
	}()
	if err := f.AwaitReader(t.Context()); err != nil {
		t.Error(err)
	}
	f.Close()
	if text := <-read; text != "abc" {
		t.Errorf("read %q", text)
	}
}

func TestCheckPID(t *testing.T) {
	t.Parallel()
	largest := ^uint32(0) // that a shim can report
	for pid, right := range map[int]bool{-1: false, 0: false, 1: false, 2: true, 1 << 22: true, 1<<22 + 1: false, int(largest): false} {
		if err := CheckPID(pid); (err == nil) != right {
			t.Errorf("%d: %v", pid, err)
		}
	}
}

// For a dead shim only its socket is removed, and nothing else that it may
// name.
func TestRemoveSocket(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	listen := func(name string) *net.UnixListener {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, name)})
		if err != nil {
			t.Fatal(err)
		}
		l.SetUnlinkOnClose(false)
		t.Cleanup(func() { _ = l.Close() })
		return l
	}
	listen("live")
	syscall.ForkLock.RLock() // a child would have the socket until its exec
	_ = listen("dead").Close()
	syscall.ForkLock.RUnlock()
	err := errors.Join(os.WriteFile(filepath.Join(dir, "file"), nil, 0o600), os.Symlink("dead", filepath.Join(dir, "link")), os.Mkdir(filepath.Join(dir, "directory"), 0o700))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name  string
		stays bool
	}{{"live", true}, {"file", true}, {"directory", true}, {"link", true}, {"dead", false}, {"none", false}} {
		path := filepath.Join(dir, c.name)
		err := Endpoint{Address: "unix://" + path, Version: 2}.RemoveSocket(t.Context())
		if _, missing := os.Lstat(path); err != nil || (missing == nil) != c.stays {
			t.Errorf("%s: %v; is there: %v", c.name, err, missing == nil)
		}
	}
	if err := (Endpoint{Address: "kata/0123"}).RemoveSocket(t.Context()); err != nil {
		t.Errorf("an abstract socket: %v", err)
	}
}
