package trail

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	grpcpeer "google.golang.org/grpc/peer"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/pod/view"
	"github.com/crius-run/crius/server/caller"
	"github.com/crius-run/crius/test/kit/journald"
	"github.com/crius-run/crius/test/kit/wait"
)

// node has one pod with one container, by any id.
type node struct{}

func (node) Container(id string) (*view.Container, error) {
	return &view.Container{ID: id, SandboxID: "p1", Config: &cri.ContainerConfig{Metadata: &cri.ContainerMetadata{Name: "nginx"}}}, nil
}

func (node) Sandbox(id string) (*view.Sandbox, error) {
	if id != "p1" {
		return nil, fault.NotFound
	}
	return &view.Sandbox{ID: id, Config: &cri.PodSandboxConfig{Metadata: &cri.PodSandboxMetadata{Name: "web", Namespace: "shop", Uid: "u1"}}}, nil
}

// start returns a trail that ends with the test.
func start(t *testing.T, opt Options) *Trail {
	t.Helper()
	records := New(t.Context(), opt, node{})
	t.Cleanup(func() {
		if err := records.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return records
}

// callFrom returns the context of a call that a process of this name makes.
func callFrom(t *testing.T, name string) context.Context {
	t.Helper()
	was, err := os.ReadFile("/proc/self/comm")
	if err != nil {
		t.Fatal(err)
	}
	rename := func(name []byte) {
		if err := os.WriteFile("/proc/self/comm", name, 0); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(t.TempDir(), "cri")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	client, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	served, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer served.Close()
	rename([]byte(name))
	defer rename(was)
	_, info, err := caller.Credentials().ServerHandshake(served)
	if err != nil {
		t.Fatal(err)
	}
	return grpcpeer.NewContext(t.Context(), &grpcpeer.Peer{AuthInfo: info})
}

// lines returns the records of a file once there are so many.
func lines(t *testing.T, path string, count int) (records []map[string]any) {
	t.Helper()
	wait.For(t, fmt.Sprintf("%d records", count), func() bool {
		text, _ := os.ReadFile(path)
		return strings.Count(string(text), "\n") >= count
	})
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		var r map[string]any
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			t.Fatalf("%v: %q", err, line)
		}
		records = append(records, r)
	}
	return records
}

func want(t *testing.T, got map[string]any, fields map[string]any) {
	t.Helper()
	for name, value := range fields {
		if fmt.Sprint(got[name]) != fmt.Sprint(value) {
			t.Errorf("%s is %v, want %v", name, got[name], value)
		}
	}
}

// Not parallel, as the other tests that change the name of the process.
func TestRecordSaysWhoDidWhat_containerd_10418(t *testing.T) {
	journal, file := journald.New(t), filepath.Join(t.TempDir(), "audit.log")
	records := start(t, Options{Level: People, File: file, Journal: journal.Path})
	e := records.Begin(callFrom(t, "crictl"), Request{Verb: Exec, ID: "c1", Command: []string{"sh", "-c", "echo a\necho b"}, Terminal: true})
	e.From("127.0.0.1:4711")
	code := int32(3)
	if n, err := e.Writer(new(strings.Builder)).Write([]byte("a\nb\n")); n != 4 || err != nil {
		t.Fatal(n, err)
	}
	e.End(&code, nil)
	e.End(nil, errors.New("again"))
	r := lines(t, file, 1)
	want(t, r[0], map[string]any{
		"verb": "exec", "namespace": "shop", "pod": "web", "pod_uid": "u1", "pod_id": "p1", "container": "nginx", "container_id": "c1",
		"command": []string{"sh", "-c", "echo a\necho b"}, "terminal": true, "client": "crictl", "client_pid": os.Getpid(), "client_uid": os.Getuid(),
		"remote": "127.0.0.1:4711", "bytes_in": 0, "bytes_out": 4, "exit_code": 3, "error": nil, "kubelet": nil, "ports": nil,
	})
	var entries []journald.Entry
	wait.For(t, "an entry", func() bool { entries = append(entries, journal.Read()...); return len(entries) > 0 })
	for name, value := range map[string]string{
		"CRIUS_AUDIT": "exec", "PRIORITY": "6", "SYSLOG_IDENTIFIER": "crius", "K8S_NAMESPACE_NAME": "shop", "K8S_POD_NAME": "web", "K8S_CONTAINER_NAME": "nginx",
		"CRIUS_CLIENT": "crictl", "CRIUS_COMMAND": `sh -c "echo a\necho b"`, "CRIUS_EXIT_CODE": "3", "CRIUS_BYTES_OUT": "4",
		"MESSAGE": fmt.Sprintf(`audit: exec shop/web nginx by crictl (process %d, user %d), command sh -c "echo a\necho b", exit code 3`, os.Getpid(), os.Getuid()),
	} {
		if entries[0][name] != value {
			t.Errorf("%s is %q, want %q", name, entries[0][name], value)
		}
	}
}

// A probe every second must not hide what people do, nor fill the disk.
func TestProbesOfKubeletsAreApart(t *testing.T) {
	file := filepath.Join(t.TempDir(), "audit.log")
	records := start(t, Options{Level: People, File: file})
	kubelet, crictl := callFrom(t, "kubelet"), callFrom(t, "crictl")
	ask := func(ctx context.Context, verb string) { records.Refuse(ctx, Request{Verb: verb, ID: "c1"}, nil) }
	ask(kubelet, ExecSync)
	ask(kubelet, ReopenLog)
	ask(kubelet, Exec) // kubectl exec
	ask(crictl, ExecSync)
	ask(crictl, ReopenLog)
	records.Set(All, file)
	ask(kubelet, ExecSync)
	records.Set(None, file)
	ask(crictl, Exec)
	records.Set(People, file)
	ask(t.Context(), ExecSync) // by nobody knows whom
	var got []string
	for _, r := range lines(t, file, 5) {
		got = append(got, fmt.Sprint(r["client"], " ", r["verb"], " ", r["kubelet"]))
	}
	if all := []string{"kubelet exec <nil>", "crictl exec-sync <nil>", "crictl reopen-log <nil>", "kubelet exec-sync true", "<nil> exec-sync <nil>"}; !slices.Equal(got, all) {
		t.Errorf("records of %q, want %q", got, all)
	}
}

func TestFileOfRecordsIsRotated(t *testing.T) {
	file := filepath.Join(t.TempDir(), "audit.log")
	records := start(t, Options{Level: People, File: file})
	for i := range 3 {
		records.Refuse(t.Context(), Request{Verb: Attach, ID: fmt.Sprint("c", i)}, fault.Precondition)
		r := lines(t, file, 1)
		want(t, r[0], map[string]any{"container_id": fmt.Sprint("c", i), "error": fault.Precondition.Error()})
		if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%v, %v", info.Mode(), err)
		}
		if err := os.Rename(file, file+"."+fmt.Sprint(i)); err != nil {
			t.Fatal(err)
		}
	}
}

func TestRecordsReachASocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "collector")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	records := start(t, Options{Level: People, File: path})
	records.Refuse(t.Context(), Request{Verb: PortForward, ID: "p1"}, nil)
	conn, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	line, err := bufio.NewReader(conn).ReadString('\n')
	var r map[string]any
	if err := errors.Join(err, json.Unmarshal([]byte(line), &r)); err != nil {
		t.Fatal(err)
	}
	want(t, r, map[string]any{"verb": "port-forward", "pod": "web", "connections": 0, "container": nil})
}

// stuck is a log that takes nothing until it is released.
type stuck struct {
	slog.Handler
	entered chan struct{}
	release chan struct{}
}

func (s stuck) Handle(context.Context, slog.Record) error {
	select {
	case s.entered <- struct{}{}:
	default:
	}
	<-s.release
	return nil
}

// A connection that is being made when its session ends does not change what is recorded.
func TestRecordIsOfTheEnd(t *testing.T) {
	was := slog.Default()
	defer slog.SetDefault(was)
	s := stuck{slog.DiscardHandler, make(chan struct{}, 1), make(chan struct{})}
	slog.SetDefault(slog.New(s))
	file := filepath.Join(t.TempDir(), "audit.log")
	e := start(t, Options{Level: People, File: file}).Begin(t.Context(), Request{Verb: PortForward, ID: "p1"})
	e.Connect(80)
	e.End(nil, nil)
	<-s.entered // before it is written to the file
	e.Connect(81)
	close(s.release)
	want(t, lines(t, file, 1)[0], map[string]any{"ports": []int{80}, "connections": 1})
}

// Nobody waits for a log that hangs: probes would fail, and with them their pods. A file that
// nothing can be written to, such as a FIFO without reader, is no reason to wait either.
func TestNothingWaitsForTheTrail(t *testing.T) {
	was := slog.Default()
	defer slog.SetDefault(was)
	s := stuck{slog.DiscardHandler, make(chan struct{}, 1), make(chan struct{})}
	slog.SetDefault(slog.New(s))
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	records := New(t.Context(), Options{Level: All, File: fifo}, node{})
	records.Refuse(t.Context(), Request{Verb: ExecSync, ID: "c1"}, nil)
	<-s.entered // and hangs
	const more = 10
	for range queueSize + more {
		records.Refuse(t.Context(), Request{Verb: ExecSync, ID: "c1"}, nil)
	}
	if lost := records.lost.Load(); lost != more {
		t.Errorf("%d records lost, want %d", lost, more)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := records.Close(ended); !errors.Is(err, context.Canceled) {
		t.Errorf("Close waited: %v", err)
	}
	close(s.release)
	<-records.ended
	if lost := records.lost.Load(); lost != 0 {
		t.Errorf("%d lost records were not reported", lost)
	}
}

func TestCommandsAreBounded(t *testing.T) {
	t.Parallel()
	for name, command := range map[string][]string{
		"one long argument": {"sh", strings.Repeat("x", 1<<20)},
		"many arguments":    slices.Repeat([]string{"x"}, 10_000),
	} {
		got := bounded(command)
		if size := len(strings.Join(got, " ")); size > maxCommand+300 || len(got) > 65 || !strings.HasSuffix(got[len(got)-1], "...") {
			t.Errorf("%s: %d arguments, %d bytes", name, len(got), size)
		}
	}
	if got := bounded([]string{"ls", "-l"}); !slices.Equal(got, []string{"ls", "-l"}) {
		t.Errorf("%q", got)
	}
	var none *Trail
	none.Refuse(t.Context(), Request{Verb: Exec}, nil)
}
