package exec

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"os/signal"
	"strconv"
	"sync"

	"golang.org/x/net/websocket"
	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"github.com/crius-run/crius/cmd/crius/cli"
	"github.com/crius-run/crius/oci/stdio"
)

// protocol is Kubernetes' WebSocket subprotocol for exec: the first byte of each message
// names its channel, and the last message is the result, a status of the Kubernetes API.
// client-go has a client as well (tools/remotecommand), but it depends on much of
// client-go; this one is short, and the server already links the WebSocket library.
const protocol = "v5.channel.k8s.io"

// The channels of the protocol.
const (
	stdin  = 0
	stdout = 1
	stderr = 2
	result = 3
	resize = 4
	ending = 255 // ends the channel named by the next byte
)

// streams are the local ends of a session.
type streams struct {
	in       io.Reader // nil: none
	out, err io.Writer
	terminal *os.File // its size is passed to the command; nil: no terminal
}

// session is a connection to a command.
type session struct {
	conn net.Conn
	ws   *websocket.Conn
}

// converse connects the streams to a command until the command ends.
func converse(ctx context.Context, address string, secure *tls.Config, to streams) error {
	s, err := dial(ctx, address, secure)
	if err != nil {
		return fmt.Errorf("connect with the command: %w", err)
	}
	var sizes sync.WaitGroup
	defer sizes.Wait()
	defer s.conn.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(ctx, func() { _ = s.conn.Close() })()
	if to.terminal != nil && to.in != nil {
		before, err := term.MakeRaw(int(to.terminal.Fd()))
		if err != nil {
			return fmt.Errorf("set up the terminal: %w", err)
		}
		defer func() { _ = term.Restore(int(to.terminal.Fd()), before) }()
	}
	if to.terminal != nil {
		sizes.Go(func() { s.passSizes(ctx, to.terminal) })
	}
	if to.in != nil {
		go s.passInput(to.in) // a read cannot be cancelled, so it ends with the program at the latest
	}
	return s.receive(to)
}

// dial opens the session that the server has prepared at the address.
func dial(ctx context.Context, address string, secure *tls.Config) (*session, error) {
	location, err := url.Parse(address)
	if err != nil {
		return nil, err
	}
	var dialer interface {
		DialContext(ctx context.Context, network, address string) (net.Conn, error)
	} = new(net.Dialer)
	if location.Scheme == "https" {
		dialer = &tls.Dialer{Config: secure}
	}
	conn, err := dialer.DialContext(ctx, "tcp", location.Host)
	if err != nil {
		return nil, err
	}
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	ws, err := websocket.NewClient(&websocket.Config{
		Location: location, Origin: &url.URL{Scheme: location.Scheme, Host: location.Host},
		Version: websocket.ProtocolVersionHybi13, Protocol: []string{protocol},
	}, conn)
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	return &session{conn, ws}, nil
}

// send sends a message. Several goroutines may call it.
func (s *session) send(channel byte, data []byte) error {
	return websocket.Message.Send(s.ws, append([]byte{channel}, data...))
}

func (s *session) passInput(in io.Reader) {
	if _, err := io.Copy(input{s}, in); err == nil {
		_ = s.send(ending, []byte{stdin})
	}
}

// input is the channel of the command's standard input.
type input struct{ *session }

func (i input) Write(p []byte) (int, error) {
	if err := i.send(stdin, p); err != nil {
		return 0, err
	}
	return len(p), nil
}

// passSizes sends the terminal's size to the command whenever it changes.
func (s *session) passSizes(ctx context.Context, terminal *os.File) {
	changes := make(chan os.Signal, 1)
	signal.Notify(changes, unix.SIGWINCH)
	defer signal.Stop(changes)
	for {
		if width, height, err := term.GetSize(int(terminal.Fd())); err == nil {
			size, _ := json.Marshal(stdio.Size{Width: uint16(width), Height: uint16(height)}) // two numbers cannot fail
			_ = s.send(resize, size)                                                          // fails only if the session is over
		}
		select {
		case <-changes:
		case <-ctx.Done():
			return
		}
	}
}

// receive writes the command's output to the streams until the result comes.
func (s *session) receive(to streams) error {
	for {
		var message []byte
		err := websocket.Message.Receive(s.ws, &message)
		if err != nil {
			return fmt.Errorf("connection ended before the command did: %w", err)
		}
		if len(message) == 0 {
			continue
		}
		switch channel, data := message[0], message[1:]; channel {
		case stdout:
			_, err = to.out.Write(data)
		case stderr:
			_, err = to.err.Write(data)
		case result:
			return outcome(data)
		}
		if err != nil {
			return err
		}
	}
}

// outcome parses a result. A command that failed is a cli.Exit.
func outcome(document []byte) error {
	var status struct {
		Status, Message string
		Details         struct {
			Causes []struct{ Reason, Message string }
		}
	}
	if err := json.Unmarshal(document, &status); err != nil {
		return fmt.Errorf("result of the command: %w", err)
	}
	if status.Status == "Success" {
		return nil
	}
	for _, cause := range status.Details.Causes {
		if code, err := strconv.ParseUint(cause.Message, 10, 8); cause.Reason == "ExitCode" && err == nil && code != 0 {
			return cli.Exit(code)
		}
	}
	return errors.New(status.Message)
}
