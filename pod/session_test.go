package pod

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/pod/view"
	"github.com/crius-run/crius/test/kit/refusing"
)

// onTheNode is a pod in the network of the node, as far as dial cares.
func onTheNode() *Sandbox {
	s := &Sandbox{}
	s.view.Store(&view.Sandbox{})
	return s
}

func TestDial(t *testing.T) {
	t.Parallel()
	for _, address := range []string{"127.0.0.1", "::1"} {
		l := refusing.Listen(t, address)
		conn, err := onTheNode().dial(t.Context(), uint16(l.Addr().(*net.TCPAddr).Port))
		if err != nil {
			t.Fatalf("%s: %v", address, err)
		}
		defer conn.Close()
		other, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		io.WriteString(other, "hello")
		other.Close()
		if text, err := io.ReadAll(conn); string(text) != "hello" {
			t.Errorf("%s: %q, %v", address, text, err)
		}
	}
}

func TestDialRefused(t *testing.T) {
	t.Parallel()
	conn, err := onTheNode().dial(t.Context(), uint16(refusing.Port(t)))
	if !errors.Is(err, fault.Unavailable) || !strings.Contains(err.Error(), "TCP port") {
		t.Errorf("%v, %v", conn, err)
	}
}

// A listener that lets connections wait costs neither a thread nor more time than
// the caller has.
func TestDialThatHangs(t *testing.T) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := errors.Join(unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}), unix.Listen(fd, 0)); err != nil {
		t.Fatal(err)
	}
	name, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	port := uint16(name.(*unix.SockaddrInet4).Port)
	first, err := onTheNode().dial(t.Context(), port) // fills the queue
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	threads := func() int {
		entries, err := os.ReadDir("/proc/self/task")
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	const callers = 50
	before := threads()
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	ended := make(chan error, callers)
	for range callers {
		go func() {
			_, err := onTheNode().dial(ctx, port)
			ended <- err
		}()
	}
	<-ctx.Done()
	if after := threads(); after > before+callers/2 {
		t.Errorf("%d threads, before %d", after, before)
	}
	for range callers {
		if err := <-ended; !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, fault.Unavailable) {
			t.Errorf("ended with %v", err)
		}
	}
}

// A client that reads slowly keeps the last output of a container that has
// ended until it has had all of it; one that has stopped reading does not.
func TestLingerIsForWhoReads(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		v := &conversation{container: &Container{exited: make(chan struct{})}}
		over, unread := make(chan struct{}), make(chan struct{})
		go v.linger(over, nil, unread)
		given := func() bool {
			synctest.Wait()
			select {
			case <-unread:
				return true
			default:
				return false
			}
		}
		out := v.heard(io.Discard)
		close(v.container.exited)
		for i := range 10 {
			time.Sleep(lingerTime * 9 / 10)
			if given() {
				t.Fatalf("given up after %d pieces of output that the client took", i)
			}
			if _, err := out.Write([]byte("last words")); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(2 * lingerTime)
		if !given() {
			t.Error("a client that has stopped reading is waited for")
		}
	})
}

// A client whose input has ended leaves once the container has answered it: a reply
// that takes its time is waited for, and neither a container that does not read nor
// one that writes for ever keeps the client.
func TestSettle(t *testing.T) {
	t.Parallel()
	const pause = restTime / 2
	for name, test := range map[string]struct {
		does        func(pauses int) (unread int, writes bool) // the container
		after, upTo int                                        // so many pauses the client leaves
	}{
		"nothing to say":       {func(int) (int, bool) { return 0, false }, 2, 3},
		"replies":              {func(n int) (int, bool) { return 0, n < 3 }, 4, 5},
		"reads slowly":         {func(n int) (int, bool) { return max(0, 20-n), n == 20 }, 22, 23},
		"reads in long pauses": {func(n int) (int, bool) { return max(0, 20-n/3*3), false }, 23, 24},
		"does not read":        {func(int) (int, bool) { return 10, false }, 4, 5},
		"writes for ever":      {func(int) (int, bool) { return 0, true }, 4, 5},
		"never reads, writes":  {func(int) (int, bool) { return 10, true }, 4, 5},
		"others send more":     {func(n int) (int, bool) { return 10 + n%2, false }, 4, 5},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				v := &conversation{}
				out := v.heard(io.Discard)
				over, settled := make(chan struct{}), make(chan struct{})
				defer close(over)
				var unread atomic.Int64
				does := func(pauses int) {
					n, writes := test.does(pauses)
					if unread.Store(int64(n)); writes {
						_, _ = out.Write([]byte("a reply"))
					}
				}
				does(0)
				go v.settle(func() int { return int(unread.Load()) }, over, settled)
				for n := 1; n <= test.upTo; n++ {
					time.Sleep(pause)
					synctest.Wait()
					select {
					case <-settled:
						if n < test.after {
							t.Errorf("the client leaves after %d pauses, too early", n)
						}
						return
					default:
					}
					does(n)
				}
				t.Error("the client does not leave")
			})
		})
	}
}
