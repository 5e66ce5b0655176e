package worker

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/storage/unpack/wire"
)

// Client is a worker's connection to the server that has started it.
type Client struct {
	conn    *net.UnixConn
	answers chan *os.File // sockets
	sending sync.Mutex

	fetching sync.Mutex // one question at a time
	fetches  int
}

// Work does the work of a worker process, which the server has started and confined, sends its last
// message, and ends the process. If the server ends, it ends early.
func Work(do func(context.Context, *Client) (last wire.Message, err error)) {
	socket := os.NewFile(wire.SocketFD, "server")
	conn, err := net.FileConn(socket)
	if err != nil {
		fatal(err)
	}
	_ = socket.Close()
	c := &Client{conn: conn.(*net.UnixConn), answers: make(chan *os.File)}
	ctx, cancel := context.WithCancel(context.Background()) //nolint:forbidigo // the root of the worker process
	go c.listen(cancel)
	last, err := do(ctx, c)
	if err != nil {
		last = wire.Message{Failed: wire.FailureOf(err)}
	}
	c.Send(last)
	os.Exit(0)
}

func fatal(err error) {
	fmt.Fprintln(os.Stderr, "pull worker:", err)
	os.Exit(1)
}

// Order reads the worker's order.
func (c *Client) Order(order any) error {
	if err := json.NewDecoder(bufio.NewReader(os.Stdin)).Decode(order); err != nil {
		return fmt.Errorf("read order: %w", err)
	}
	return nil
}

// Send sends a message to the server. It ends the process if the server is gone.
func (c *Client) Send(m wire.Message) {
	line, err := json.Marshal(m)
	c.sending.Lock()
	defer c.sending.Unlock()
	if err == nil {
		_, err = c.conn.Write(append(line, '\n'))
	}
	if err != nil {
		fatal(err)
	}
}

// Lost makes the server log that a layer in the store, which err names, cannot be rebuilt.
func (c *Client) Lost(err error) {
	c.Send(wire.Message{Log: &wire.Line{Level: slog.LevelWarn, Text: wire.Short(err.Error()), Lost: true}})
}

// listen receives the server's answers. The server cancels the work by closing its side.
func (c *Client) listen(cancel context.CancelFunc) {
	defer cancel()
	defer close(c.answers)
	for {
		_, file, err := receive(c.conn, make([]byte, 1))
		if err != nil || file == nil {
			return
		}
		c.answers <- file
	}
}

// receive reads from a socket, and returns the descriptor that came along, or nil.
func receive(conn *net.UnixConn, buffer []byte) (n int, file *os.File, err error) {
	rights := make([]byte, unix.CmsgSpace(4))
	n, size, _, _, err := conn.ReadMsgUnix(buffer, rights)
	if err != nil || size == 0 {
		return n, nil, err
	}
	messages, err := unix.ParseSocketControlMessage(rights[:size])
	if err != nil || len(messages) != 1 {
		return n, nil, errors.Join(err, unix.EBADMSG)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		return n, nil, errors.Join(err, unix.EBADMSG)
	}
	return n, os.NewFile(uintptr(fds[0]), "from the server"), nil
}

// Fetch asks the server for a blob.
func (c *Client) Fetch(blob wire.Blob) (*Fetched, error) {
	c.fetching.Lock()
	defer c.fetching.Unlock()
	c.fetches++
	c.Send(wire.Message{Fetch: &blob})
	socket, ok := <-c.answers
	if !ok {
		return nil, errServerGone
	}
	defer socket.Close()
	conn, err := net.FileConn(socket)
	if err != nil {
		return nil, err
	}
	return &Fetched{conn: conn.(*net.UnixConn), number: c.fetches, packet: make([]byte, wire.MaxPacket)}, nil
}

var errServerGone = errors.New("the server cancelled the pull")

// Fetched is a blob that the server fetches, in a file that only the server writes.
type Fetched struct {
	conn   *net.UnixConn
	number int
	packet []byte   // buffer
	file   *os.File // nil until the first Next
}

// Next implements layers.Arrival.
func (f *Fetched) Next() (size int64, err error) {
	n, file, err := receive(f.conn, f.packet)
	if err != nil || n == 0 {
		return 0, errServerGone
	}
	if file != nil {
		f.file = file
	}
	switch kind, said := f.packet[0], f.packet[1:n]; {
	case kind == wire.PacketShown && len(said) == 8 && f.file != nil:
		return int64(binary.BigEndian.Uint64(said)), nil
	case kind == wire.PacketWhole:
		return 0, io.EOF
	case kind == wire.PacketError:
		return 0, &wire.FetchError{Number: f.number, Text: string(said)}
	}
	return 0, fmt.Errorf("layer from the server: unexpected packet %q", f.packet[:min(n, 16)])
}

// File implements layers.Arrival.
func (f *Fetched) File() *os.File { return f.file }

// Close implements layers.Arrival.
func (f *Fetched) Close() error { return f.conn.Close() }
