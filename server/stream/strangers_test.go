package stream

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/wait"
)

const nobody = 65534

// attack opens connections to address as the user for each, says text on them, and
// replaces the oldest for ever once there are more than the server takes.
func attack(t *testing.T, address *net.TCPAddr, uid func(i int) int, text string) (opened *atomic.Int64) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	opened = new(atomic.Int64)
	var work sync.WaitGroup
	work.Go(func() {
		runtime.LockOSThread() // and never unlocks it: the thread is another user's
		to := &unix.SockaddrInet4{Port: address.Port, Addr: [4]byte(address.IP.To4())}
		held := make([]int, maxStrangers+20)
		for i := range held {
			held[i] = -1
		}
		for i := 0; ctx.Err() == nil; i = (i + 1) % len(held) {
			if held[i] >= 0 {
				_ = unix.Close(held[i])
			}
			_, _, _ = unix.RawSyscall(unix.SYS_SETFSUID, uintptr(uid(i)), 0, 0)
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				t.Error(err)
				return
			}
			held[i] = fd
			if unix.Connect(fd, to) == nil {
				_, _ = unix.SendmsgN(fd, []byte(text), nil, nil, unix.MSG_NOSIGNAL)
				opened.Add(1)
			}
		}
		for _, fd := range held {
			if fd >= 0 {
				_ = unix.Close(fd)
			}
		}
	})
	t.Cleanup(func() {
		cancel()
		work.Wait()
	})
	return opened
}

// Any user of the node may open connections: 1000 of them were all that there might be
// without a ticket, and who came next was refused although it had one.
func TestStrangersDoNotKeepOutWhoHasATicket(t *testing.T) {
	cert, key := certificate(t)
	for name, c := range map[string]struct {
		cfg  Config
		text string
	}{
		"silent":             {Config{}, ""},
		"begins a request":   {Config{}, "GET /exec/"},
		"made-up token":      {Config{}, "GET /exec/ABCDEFGHIJKLMNOPQRSTUVWXYZ HTTP/1.1\r\nHost: x\r\n\r\n"},
		"endless header":     {Config{}, "POST /exec/ABCDEFGHIJKLMNOPQRSTUVWXYZ HTTP/1.1\r\nHost: "},
		"silent, TLS":        {Config{TLSCertFile: cert, TLSKeyFile: key}, ""},
		"endless handshake":  {Config{TLSCertFile: cert, TLSKeyFile: key}, "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"},
		"nonsense, then TLS": {Config{TLSCertFile: cert, TLSKeyFile: key}, "GET / HTTP/1.1\r\n\r\n"},
	} {
		t.Run(name, func(t *testing.T) {
			s := serveWith(t, c.cfg, &fakeEngine{exec: echo})
			opened := attack(t, s.listener.Addr().(*net.TCPAddr), func(int) int { return nobody }, c.text)
			wait.For(t, "the crowd", func() bool { return opened.Load() > 2*maxStrangers })
			for range 20 {
				execEcho(t, s)
			}
		})
	}
}

// A process with CAP_SETUID may give each of its connections another user, who has one alone.
func TestStrangersOfManyUsersDoNotKeepOutWhoHasATicket(t *testing.T) {
	s := serveWith(t, Config{}, &fakeEngine{exec: echo})
	opened := attack(t, s.listener.Addr().(*net.TCPAddr), func(i int) int { return 100000 + i }, "GET /exec/")
	wait.For(t, "the crowd", func() bool { return opened.Load() > 2*maxStrangers })
	var work sync.WaitGroup
	for range 6 {
		work.Go(func() {
			for range 20 {
				execEcho(t, s)
			}
		})
	}
	work.Wait()
}

// execEcho runs one session to its end.
func execEcho(t *testing.T, s *Server) {
	t.Helper()
	address, err := s.Exec(t.Context(), &cri.ExecRequest{ContainerId: "x", Cmd: []string{"true"}, Stdin: true, Stdout: true})
	if err != nil {
		t.Error(err)
		return
	}
	u, err := url.Parse(address)
	if err != nil {
		t.Error(err)
		return
	}
	e, err := remotecommand.NewSPDYExecutor(&rest.Config{TLSClientConfig: rest.TLSClientConfig{Insecure: true}}, http.MethodPost, u)
	if err != nil {
		t.Error(err)
		return
	}
	var stdout bytes.Buffer
	if err := e.StreamWithContext(t.Context(), streamOptions(strings.NewReader("hello"), &stdout)); err != nil || stdout.String() != "hello" {
		t.Errorf("exec among strangers: %v, %q", err, stdout.String())
	}
}

// certificate makes a certificate for loopback.
func certificate(t *testing.T) (cert, key string) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	write := func(name, kind string, der []byte) string {
		file := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	return write("cert.pem", "CERTIFICATE", der), write("key.pem", "PRIVATE KEY", secret)
}
