package session

import (
	"context"
	"io"
	"sync/atomic"
	"time"

	"github.com/crius-run/crius/oci"
)

// takeTime is how long a pod that has ended its half of a connection may take none of
// what the client still sends.
const takeTime = 10 * time.Second

// Forward copies between a connection into a pod and a client's stream until the
// connection has ended: both sides have ended their halves, or either has reset it.
// However it ends, that is no error; the only error is the cause of the end of ctx.
// Closing stream ends what is sent to the client and not what comes from it.
func Forward(ctx context.Context, conn oci.Stream, stream io.ReadWriteCloser) error {
	// The goroutine that reads from the client may outlive this call. It ends when the
	// owner of stream closes it for good.
	sent, received := make(chan struct{}), make(chan bool, 1)
	pod := &podHalf{Stream: conn}
	go func() {
		_, err := io.Copy(pod, stream)
		_ = conn.CloseWrite()
		close(sent)
		if err != nil {
			_, _ = io.Copy(io.Discard, stream) // other connections may wait behind this input
		}
	}()
	go func() {
		_, err := io.Copy(stream, conn)
		_ = stream.Close()
		received <- err == nil
	}()
	select {
	case whole := <-received:
		if !whole { // a reset, which ends both halves
			return nil
		}
		pod.end()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	select {
	case <-sent:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// podHalf is what is sent to the pod. Once the pod has ended its own half, each write
// must end within takeTime: client-go ends the connection then and waits for this side,
// so a pod that reads no more would hold the client for ever.
type podHalf struct {
	oci.Stream
	ended atomic.Bool
}

func (p *podHalf) Write(b []byte) (int, error) {
	if p.ended.Load() {
		p.limit()
	}
	return p.Stream.Write(b)
}

func (p *podHalf) end() {
	p.ended.Store(true)
	p.limit() // for a write under way
}

func (p *podHalf) limit() {
	if conn, ok := p.Stream.(interface{ SetWriteDeadline(time.Time) error }); ok {
		_ = conn.SetWriteDeadline(time.Now().Add(takeTime))
	}
}
