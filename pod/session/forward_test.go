package session

import (
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
)

// fakePod is a pod's end of a connection: what comes from it ends with err.
type fakePod struct {
	net.Conn // the end that is written to
	err      error
}

func (f *fakePod) Read([]byte) (int, error) { return 0, f.err }
func (f *fakePod) CloseWrite() error        { return nil }

// client sends without end.
type client struct {
	once   sync.Once
	closed chan struct{}
}

func (*client) Read(p []byte) (int, error)  { return len(p), nil }
func (*client) Write(p []byte) (int, error) { return len(p), nil }
func (c *client) Close() error              { c.once.Do(func() { close(c.closed) }); return nil }

// However a connection ends, that is no error of the forward: a pod that resets it, and
// one that ends its half and then takes none of what is sent.
func TestForwardOfConnectionThatEnds(t *testing.T) {
	t.Parallel()
	for name, err := range map[string]error{"reset": unix.ECONNRESET, "half closed": io.EOF} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				near, far := net.Pipe()
				c := &client{closed: make(chan struct{})}
				reader, stop := io.Pipe()
				began := time.Now()
				if got := Forward(t.Context(), &fakePod{near, err}, struct {
					io.Reader
					io.WriteCloser
				}{io.MultiReader(io.LimitReader(c, 100_000), reader), c}); got != nil {
					t.Errorf("%v", got)
				}
				<-c.closed
				if long := errors.Is(err, io.EOF); time.Since(began) >= takeTime != long {
					t.Errorf("it took %v", time.Since(began))
				}
				_ = stop.Close()
				_, _ = near.Close(), far.Close()
			})
		})
	}
}

// A pod that has ended its half may go on reading, however slowly.
func TestForwardToPodThatReadsOn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const size = 300_000
		near, far := net.Pipe()
		c := &client{closed: make(chan struct{})}
		read := make(chan int64)
		go func() {
			var n int64
			for n < size {
				got, err := io.CopyN(io.Discard, far, 20_000)
				if n += got; err != nil {
					break
				}
				time.Sleep(takeTime / 4)
			}
			read <- n
		}()
		if err := Forward(t.Context(), &fakePod{near, io.EOF}, struct {
			io.Reader
			io.WriteCloser
		}{io.LimitReader(c, size), c}); err != nil {
			t.Error(err)
		}
		if n := <-read; n != size {
			t.Errorf("the pod has read %d bytes of %d", n, size)
		}
		_, _ = near.Close(), far.Close()
	})
}
