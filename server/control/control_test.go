package control

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"runtime/pprof"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/crius-run/crius/test/kit/wait"
)

// Invalid requests are refused, and only root may send any.
func TestServer(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	if err := os.WriteFile(socket, nil, 0o600); err != nil { // of a dead server
		t.Fatal(err)
	}
	s, err := Listen(t.Context(), socket, Node{Reload: func(context.Context) (Reloaded, error) {
		return Reloaded{}, errors.New("line 7: no such key")
	}})
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve() }()
	if info, err := os.Stat(socket); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
	c := NewClient(socket)
	for path, form := range map[string]url.Values{checkPath: {repairKey: {"perhaps"}}, wipePath: nil, holdingsPath: nil, "/": nil} {
		if err := c.ask(t.Context(), http.MethodPost, path, form, new(Checked)); !errors.Is(err, ErrRefused) {
			t.Errorf("%s: %v", path, err)
		}
	}
	// A failure is not a malformed request, and only its reason is shown.
	if _, err := c.Reload(t.Context()); err == nil || errors.Is(err, ErrRefused) || !strings.HasSuffix(err.Error(), socket+": line 7: no such key") {
		t.Errorf("reload: %v", err)
	}
	if err := s.Close(context.Background()); err != nil {
		t.Error(err)
	}
	if err := <-served; err != nil {
		t.Error(err)
	}
	if _, err := c.Holdings(t.Context()); err == nil || !strings.Contains(err.Error(), socket) {
		t.Errorf("without a server: %v", err)
	}
}

// The node is closed after its server: no work continues after Close, whether
// Close ends it or it ignores that.
func TestCloseEndsWork(t *testing.T) {
	for name, deaf := range map[string]bool{"work that ends when told": false, "work that ends in its own time": true} {
		t.Run(name, func(t *testing.T) {
			socket := filepath.Join(t.TempDir(), "s")
			listener, err := net.Listen("unix", socket)
			if err != nil {
				t.Fatal(err)
			}
			under, release := make(chan struct{}), make(chan struct{})
			var ended atomic.Bool
			s := newServer(t.Context(), listener, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				close(under)
				<-r.Context().Done()
				if deaf {
					<-release
				}
				ended.Store(true)
				http.Error(w, "the server is stopping", http.StatusBadRequest)
			}))
			served, asked := make(chan error, 1), make(chan error, 1)
			go func() { served <- s.Serve() }()
			go func() { _, err := NewClient(socket).Wipe(t.Context(), true); asked <- err }()
			<-under
			ctx, cancel := context.WithTimeout(t.Context(), wait.Limit)
			if deaf { // its client has no answer when the time is up
				cancel()
				go func() { <-served; <-asked; close(release) }()
			}
			defer cancel()
			if err := s.Close(ctx); err != nil {
				t.Error(err)
			}
			if !ended.Load() {
				t.Error("Close returned, and the work goes on")
			}
			if deaf {
				return
			}
			if err := <-asked; !errors.Is(err, ErrRefused) {
				t.Errorf("whoever had asked was told %v", err)
			}
			if err := <-served; err != nil {
				t.Error(err)
			}
		})
	}
}

func TestDumps(t *testing.T) {
	s, err := Listen(t.Context(), filepath.Join(t.TempDir(), "s"), Node{})
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve() }()
	defer func() {
		if err := errors.Join(s.Close(context.Background()), <-served); err != nil {
			t.Error(err)
		}
	}()
	c := NewClient(s.listener.Addr().String())
	var stacks, heap strings.Builder
	if err := c.Goroutines(t.Context(), &stacks); err != nil || !strings.Contains(stacks.String(), "control.TestDumps(") {
		t.Errorf("the stacks lack this test: %v: %.300s", err, stacks.String())
	}
	if err := c.Heap(t.Context(), &heap); err != nil || !strings.HasPrefix(heap.String(), "\x1f\x8b") {
		t.Errorf("not a compressed profile: %v: %.20q", err, heap.String())
	}
}

// There is one CPU profile at a time. It ends early if its client leaves or the server stops, so that
// neither waits for it.
func TestCPUProfile(t *testing.T) {
	s, err := Listen(t.Context(), filepath.Join(t.TempDir(), "s"), Node{})
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve() }()
	c := NewClient(s.listener.Addr().String())
	const long = 600 // seconds
	for _, seconds := range []int{-1, 0, long + 1, 1 << 20} {
		if err := c.CPU(t.Context(), seconds, io.Discard); !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), "from 1 to 600") {
			t.Errorf("%d seconds: %v", seconds, err)
		}
	}
	idle := func() bool { // in this process, which is the server's
		if pprof.StartCPUProfile(io.Discard) != nil {
			return false
		}
		pprof.StopCPUProfile()
		return true
	}
	begin := func(ctx context.Context) (result chan error, profile *bytes.Buffer) {
		result, profile = make(chan error, 1), new(bytes.Buffer)
		go func() {
			err := c.CPU(ctx, long, profile)
			for err != nil && strings.Contains(err.Error(), "another one is being taken") { // by idle
				err = c.CPU(ctx, long, profile)
			}
			result <- err
		}()
		wait.For(t, "a profile", func() bool { return !idle() })
		return result, profile
	}
	leaving, leave := context.WithCancel(t.Context())
	left, _ := begin(leaving)
	leave()
	if err := <-left; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	wait.For(t, "the end of the profile whose client has left", idle)
	result, profile := begin(t.Context())
	if err := s.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if err := errors.Join(<-result, <-served); err != nil || !strings.HasPrefix(profile.String(), "\x1f\x8b") {
		t.Errorf("a server that stops: %v, %.20q", err, profile)
	}
}

func TestDumpsAreBounded(t *testing.T) {
	const most = 200
	if stacks := goroutines(100, most); len(stacks) != most || !strings.HasSuffix(string(stacks), "fit]\n") {
		t.Errorf("%d bytes of stacks, want %d: %q", len(stacks), most, stacks)
	}
	var out strings.Builder
	if err := copyDump(&out, endless{}); err == nil {
		t.Errorf("took a dump of %d bytes", out.Len())
	}
}

type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

func TestDone(t *testing.T) {
	if !(Wiped{}).Done() || (Wiped{Errors: texts(nil, errors.New("x"))}).Done() {
		t.Error("what could not be done is not done")
	}
}
