package exec

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/cmd/crius/cli"
	"github.com/crius-run/crius/cmd/crius/config"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/oci/stdio"
	"github.com/crius-run/crius/pod"
	"github.com/crius-run/crius/server/stream"
	"github.com/crius-run/crius/test/kit/criserver"
	"github.com/crius-run/crius/test/kit/terminal"
	"github.com/crius-run/crius/test/kit/wait"
)

func TestMain(m *testing.M) {
	stream.LogTo(slog.New(slog.DiscardHandler))
	os.Exit(m.Run())
}

// server is crius's stream server with one container, in which every command is a function.
type server struct {
	criserver.OnePod
	sessions *stream.Server
	command  func(ctx context.Context, cmd oci.Command, client pod.Client) (int32, error)
}

func (s *server) Exec(ctx context.Context, r *cri.ExecRequest) (*cri.ExecResponse, error) {
	url, err := s.sessions.Exec(ctx, r)
	return &cri.ExecResponse{Url: url}, err
}

// engine is the part of the server that runs sessions.
type engine struct{ *server }

func (e engine) Exec(ctx context.Context, id string, cmd oci.Command, client pod.Client) (int32, error) {
	if id != "c1" {
		return 0, errors.New("another container")
	}
	return e.command(ctx, cmd, client)
}

func (engine) Attach(context.Context, string, pod.Client) error { return errors.ErrUnsupported }

func (engine) PortForward(context.Context, string, uint16, io.ReadWriteCloser) error {
	return errors.ErrUnsupported
}

// start serves a command and returns a configuration that names the server.
func start(t *testing.T, cfg stream.Config, command func(context.Context, oci.Command, pod.Client) (int32, error)) config.Config {
	t.Helper()
	s := &server{command: command}
	cfg.Address = "127.0.0.1:0"
	sessions, err := stream.New(cfg, engine{s})
	if err != nil {
		t.Fatal(err)
	}
	s.sessions = sessions
	ended := make(chan error, 1)
	go func() { ended <- sessions.Serve() }()
	t.Cleanup(func() {
		if err := errors.Join(sessions.Close(context.Background()), <-ended); err != nil {
			t.Error(err)
		}
	})
	ours := config.Default()
	ours.API.Listen = criserver.Serve(t, s, nil)
	ours.API.StreamTLSCertFile, ours.API.StreamTLSClientCAFile = cfg.TLSCertFile, cfg.TLSClientCAFile
	return ours
}

// run runs crius exec.
func run(ctx context.Context, cfg config.Config, s streams, args ...string) error {
	cmd := Command(func(*cobra.Command) (*config.Loaded, error) { return &config.Loaded{Config: cfg}, nil })
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	cmd.SetArgs(args)
	cmd.SetIn(s.in)
	cmd.SetOut(s.out)
	cmd.SetErr(s.err)
	return cmd.ExecuteContext(ctx)
}

// upper is a command that repeats its input in capitals and writes a warning.
func upper(_ context.Context, cmd oci.Command, client pod.Client) (int32, error) {
	if client.Stderr != nil {
		fmt.Fprint(client.Stderr, "\x1b[31mwarning\n")
	}
	if client.Stdin != nil {
		text, err := io.ReadAll(client.Stdin)
		if err != nil {
			return 0, err
		}
		fmt.Fprint(client.Stdout, strings.ToUpper(string(text)))
	}
	switch cmd.Args[0] {
	case "seven":
		return 7, nil
	case "missing":
		return 0, errors.New("no such command")
	}
	fmt.Fprintf(client.Stdout, "%q", cmd.Args)
	return 0, nil
}

func TestExec(t *testing.T) {
	t.Parallel()
	cfg := start(t, stream.Config{}, upper)
	large := strings.Repeat("0123456789", 100_000)
	for _, c := range []struct{ args, in, out, err string }{
		{"web -- say -c hello", "unread", `["say" "-c" "hello"]`, ""},
		{"default/web -c main -- say", "", `["say"]`, ""},
		{"-i p1 -- say", "hello ", `HELLO ["say"]`, ""},
		{"-i p1 -- say", "", `["say"]`, ""},
		{"-i web -- say", large, large + `["say"]`, ""},
		{"web -- seven", "", "", "command ended with exit code 7"},
		{"web -- missing", "", "", "no such command"},
		{"none -- say", "", "", `no pod "none"`},
		{"web -c other -- say", "", "", `pod default/web has no container "other": it has main`},
		{"web ls -la", "", "", "unknown shorthand flag: 'l' in -la; flags of the command stand after --: crius exec POD -- COMMAND"},
		{"-t web -- say", "", "", "-t needs a terminal as standard input"},
		{"web say", "", "", "put -- before the command"},
		{"web main -- say", "", "", "name one pod"},
		{"-- say", "", "", "POD is missing"},
		{"", "", "", "POD is missing"},
		{"-t", "", "", "POD is missing"},
		{"web --", "", "", "no command after --"},
		{"web", "", "", "put -- before the command"},
	} {
		var out, errs strings.Builder
		err := run(t.Context(), cfg, streams{strings.NewReader(c.in), &out, &errs, nil}, strings.Fields(c.args)...)
		if out.String() != c.out || fmt.Sprint(err) != "<nil>" && c.err == "" || !strings.Contains(fmt.Sprint(err), c.err) {
			t.Errorf("exec %s: %v, %.80q, want %q", c.args, err, out.String(), c.err)
		}
		if exit := cli.Exit(0); errors.As(err, &exit) != strings.Contains(c.args, "seven") {
			t.Errorf("exec %s: the exit code is %v", c.args, err)
		}
		if ran := c.err == "" || strings.Contains(c.args, "seven"); ran && errs.String() != "\x1b[31mwarning\n" {
			t.Errorf("exec %s: standard error has %q", c.args, errs.String())
		}
	}
}

// A terminal shows the output of a command as text, unless the command was given that
// terminal.
func TestExecDoesNotControlTheTerminal_CVE_2021_25743(t *testing.T) {
	t.Parallel()
	cfg := start(t, stream.Config{}, func(_ context.Context, _ oci.Command, client pod.Client) (int32, error) {
		fmt.Fprint(client.Stdout, "\x1b[2Jout")
		if client.Stderr != nil {
			fmt.Fprint(client.Stderr, "\x1b[2Jerr")
		}
		return 0, nil
	})
	for flags, want := range map[string][]string{
		"":   {`\x1b[2Jout`, `\x1b[2Jerr`},
		"-t": {"\x1b[2Jout"},
	} {
		term := terminal.Open(t)
		args := append(strings.Fields(flags), "web", "--", "say")
		if err := run(t.Context(), cfg, streams{term.File, term.File, term.File, nil}, args...); err != nil {
			t.Errorf("%q: %v", flags, err)
		}
		for _, part := range want {
			if !wait.Until(t.Context(), func() bool { return strings.Contains(term.Shown(), part) }) {
				t.Errorf("%q: the terminal shows %q, without %q", flags, term.Shown(), part)
			}
		}
	}
}

// With -it the command has the terminal: it receives input unchanged and learns the size,
// and afterwards the terminal is as before.
func TestExecOnTerminal(t *testing.T) {
	t.Parallel()
	typed, sizes := make(chan string), make(chan stdio.Size)
	cfg := start(t, stream.Config{}, func(_ context.Context, cmd oci.Command, client pod.Client) (int32, error) {
		if !cmd.Terminal {
			return 0, errors.New("no terminal")
		}
		sizes <- <-client.Resize
		sizes <- <-client.Resize
		key := make([]byte, 1)
		if _, err := client.Stdin.Read(key); err != nil {
			return 0, err
		}
		typed <- string(key)
		return 3, nil
	})
	term := terminal.Open(t)
	term.Resize(t, 100, 30)
	before, err := unix.IoctlGetTermios(int(term.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() {
		ended <- run(t.Context(), cfg, streams{term.File, term.File, io.Discard, nil}, "-it", "web", "--", "sh")
	}()
	if got, want := <-sizes, (stdio.Size{Width: 100, Height: 30}); got != want {
		t.Errorf("size %v, want %v", got, want)
	}
	term.Resize(t, 80, 24)
	if err := unix.Kill(os.Getpid(), unix.SIGWINCH); err != nil {
		t.Fatal(err)
	}
	if got, want := <-sizes, (stdio.Size{Width: 80, Height: 24}); got != want {
		t.Errorf("then size %v, want %v", got, want)
	}
	term.Type(t, "\x03") // an interrupt, if the terminal were not raw
	if got := <-typed; got != "\x03" {
		t.Errorf("typed %q", got)
	}
	if err := <-ended; !errors.Is(err, cli.Exit(3)) {
		t.Errorf("it ends with %v", err)
	}
	after, err := unix.IoctlGetTermios(int(term.Fd()), unix.TCGETS)
	if err != nil || *after != *before {
		t.Errorf("the terminal is left as %+v, %v", after, err)
	}
}

func TestExecInterrupted(t *testing.T) {
	t.Parallel()
	began := make(chan bool, 1)
	cfg := start(t, stream.Config{}, func(ctx context.Context, _ oci.Command, _ pod.Client) (int32, error) {
		began <- true
		<-ctx.Done()
		return 0, ctx.Err()
	})
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-began; cancel() }()
	err := run(ctx, cfg, streams{nil, io.Discard, io.Discard, nil}, "web", "--", "sleep")
	if err == nil || !strings.Contains(err.Error(), "interrupted; the command may still be running") {
		t.Errorf("%v", err)
	}
}

// A session that ends without a result is a failure.
func TestExecWithoutResult(t *testing.T) {
	t.Parallel()
	cfg := start(t, stream.Config{}, func(_ context.Context, _ oci.Command, client pod.Client) (int32, error) {
		client.Hangup()
		return 0, nil
	})
	err := run(t.Context(), cfg, streams{nil, io.Discard, io.Discard, nil}, "web", "--", "say")
	if err == nil || !strings.Contains(err.Error(), "connection ended before the command did") {
		t.Errorf("%v", err)
	}
}

// The server's certificate must be the one in the configuration, whatever names it
// contains. If the server requires a certificate of clients, the flags name it.
func TestExecOverTLS(t *testing.T) {
	t.Parallel()
	cert, key := selfSigned(t)
	other, otherKey := selfSigned(t)
	plain := start(t, stream.Config{TLSCertFile: cert, TLSKeyFile: key}, upper)
	mutual := start(t, stream.Config{TLSCertFile: cert, TLSKeyFile: key, TLSClientCAFile: other}, upper)
	with := func(cfg config.Config, cert, clientCA string) config.Config {
		cfg.API.StreamTLSCertFile, cfg.API.StreamTLSClientCAFile = cert, clientCA
		return cfg
	}
	for name, c := range map[string]struct {
		cfg  config.Config
		args []string
		err  string
	}{
		"right":                 {plain, nil, ""},
		"another certificate":   {with(plain, other, ""), nil, "the server's certificate is not the one in " + other},
		"none configured":       {with(plain, "", ""), nil, "api.stream_tls_cert_file is not set"},
		"no client certificate": {mutual, nil, "pass --tls-cert and --tls-key"},
		"not even known of":     {with(mutual, cert, ""), nil, "certificate required"},
		"client certificate":    {mutual, []string{"--tls-cert", other, "--tls-key", otherKey}, ""},
		"no such file":          {mutual, []string{"--tls-cert", other, "--tls-key", "/none"}, "--tls-cert and --tls-key: open /none"},
	} {
		var out strings.Builder
		err := run(t.Context(), c.cfg, streams{nil, &out, io.Discard, nil}, append(c.args, "web", "--", "say")...)
		if (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s: %v, want %q", name, err, c.err)
		}
		if ran := out.String() == `["say"]`; ran != (c.err == "") {
			t.Errorf("%s: the command says %q", name, out.String())
		}
	}
}

// selfSigned makes a certificate without names, and its key.
func selfSigned(t *testing.T) (cert, key string) {
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
	privateDER, err := x509.MarshalECPrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	cert, key = filepath.Join(dir, "cert"), filepath.Join(dir, "key")
	err = errors.Join(
		os.WriteFile(cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600),
		os.WriteFile(key, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: privateDER}), 0o600))
	if err != nil {
		t.Fatal(err)
	}
	return cert, key
}
