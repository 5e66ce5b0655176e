package node

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
	"runtime"
	"strings"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// network is a network namespace that lives as long as its handle is open or a
// process is in it.
type network struct {
	handle netns.NsHandle
	inode  uint64
}

func newNetwork() (*network, error) {
	n := new(network)
	err := onOwnThread(func() (err error) {
		if n.handle, err = netns.New(); err != nil {
			return fmt.Errorf("network namespace: %w", err)
		}
		return loopbackUp()
	})
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(n.handle), &st); err != nil {
		return nil, err
	}
	n.inode = st.Ino
	return n, nil
}

func (n *network) close() error { return n.handle.Close() }

// onOwnThread runs f on a thread that ends afterwards, because f changes its
// network namespace.
func onOwnThread(f func() error) error {
	result := make(chan error)
	go func() {
		runtime.LockOSThread()
		result <- f()
	}()
	return <-result
}

func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("loopback: %w", err)
	}
	defer unix.Close(fd)
	req, err := unix.NewIfreq("lo")
	if err != nil {
		return fmt.Errorf("loopback: %w", err)
	}
	req.SetUint16(unix.IFF_UP)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, req); err != nil {
		return fmt.Errorf("loopback: %w", err)
	}
	return nil
}

// Do runs f on a thread inside the node's network namespace. A program that f
// starts and a socket that f opens are in it; goroutines that f starts are not.
func (n *Node) Do(f func() error) error {
	return onOwnThread(func() error {
		if err := netns.Set(n.net.handle); err != nil {
			return fmt.Errorf("enter the node's network: %w", err)
		}
		return f()
	})
}

// Listen opens a TCP listener in the node's network.
func (n *Node) Listen(address string) (l net.Listener, err error) {
	err = n.Do(func() error {
		l, err = net.Listen("tcp", address)
		return err
	})
	return l, err
}

// Dial connects from the node's network.
func (n *Node) Dial(ctx context.Context, network, address string) (c net.Conn, err error) {
	err = n.Do(func() error {
		c, err = new(net.Dialer).DialContext(ctx, network, address)
		return err
	})
	return c, err
}

// Get fetches a page from the node's network, and retries until ctx ends: the
// server behind it may still be starting. address is a host and a port.
func (n *Node) Get(ctx context.Context, address, path string) (string, error) {
	client := http.Client{
		Timeout:   5 * time.Second,
		Transport: &http.Transport{DialContext: n.Dial, DisableKeepAlives: true},
	}
	for {
		body, err := get(ctx, &client, "http://"+address+path)
		if err == nil {
			return body, nil
		}
		select {
		case <-ctx.Done():
			return "", err
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func get(ctx context.Context, client *http.Client, url string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	resp, err := client.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return string(body), err
}

// Run executes a program in the node's network and returns its output.
func (n *Node) Run(ctx context.Context, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.WaitDelay = time.Second
	var out []byte
	err := n.Do(func() (err error) {
		out, err = cmd.CombinedOutput()
		return err
	})
	if err != nil {
		return string(out), fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, out)
	}
	return string(out), nil
}
