package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/crius-run/crius/test/kit/wait"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Connect makes a connection that notices a restarted server within moments.
func Connect(socket string) (*grpc.ClientConn, error) {
	return grpc.NewClient("unix://"+socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)),
		grpc.WithUnaryInterceptor(neverForEver),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 10 * time.Millisecond, Multiplier: 1.5, MaxDelay: 200 * time.Millisecond},
			MinConnectTimeout: time.Second,
		}))
}

// neverForEver gives a call without a deadline one, so that a hanging server
// fails only its test and not the whole run.
func neverForEver(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	if _, bounded := ctx.Deadline(); !bounded {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, wait.Limit)
		defer cancel()
	}
	return invoke(ctx, method, req, reply, cc, opts...)
}

// Start starts the server and returns once it answers.
func (n *Node) Start(ctx context.Context) error {
	if n.PID() != 0 {
		return errors.New("the server runs already")
	}
	if err := n.launch(); err != nil {
		return err
	}
	if err := n.answers(ctx); err != nil {
		return fmt.Errorf("%w\nend of the server's log:\n%s", errors.Join(err, n.Kill()), n.LogTail(40))
	}
	return nil
}

func (n *Node) launch() error {
	log, err := os.OpenFile(n.LogFile(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	argv := n.Argv("serve")
	argv[0] = n.program
	if n.boots > 0 {
		argv = append(n.bootWrapper(), argv...)
	}
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Env = slices.Concat(os.Environ(), []string{"GOTRACEBACK=all"}, n.env)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := n.Do(cmd.Start); err != nil {
		return fmt.Errorf("start the server: %w", err)
	}
	done := make(chan struct{})
	n.mu.Lock()
	n.server, n.done = cmd, done
	n.mu.Unlock()
	go func() {
		err := cmd.Wait()
		n.mu.Lock()
		n.server, n.exitErr = nil, err
		n.mu.Unlock()
		close(done)
	}()
	return nil
}

// Argv returns the command line of a crius subcommand with this node's
// configuration.
func (n *Node) Argv(args ...string) []string {
	return append([]string{n.Program("crius"), "--config", n.Path("crius.toml"), "--config-dir", n.Path("crius.toml.d")}, args...)
}

// answers waits for the first answer, or for the server's end.
func (n *Node) answers(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, wait.Limit)
	defer cancel()
	go func() {
		select {
		case <-n.ended():
			cancel()
		case <-ctx.Done():
		}
	}()
	for {
		_, err := n.Runtime().Version(ctx, &cri.VersionRequest{}, grpc.WaitForReady(true))
		switch {
		case err == nil:
			return nil
		case n.PID() == 0:
			return fmt.Errorf("the server ended before it answered: %v", n.ExitErr())
		case status.Code(err) != codes.Unavailable: // that was a connection to the previous server
			return err
		}
	}
}

// PID returns the server's pid, 0 while it is not running.
func (n *Node) PID() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.server == nil {
		return 0
	}
	return n.server.Process.Pid
}

// ExitErr returns how the server's last run ended; nil means with code 0.
func (n *Node) ExitErr() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.exitErr
}

func (n *Node) ended() <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.done
}

// Signal sends a signal to the server, if it is running.
func (n *Node) Signal(s os.Signal) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.server == nil {
		return nil
	}
	return n.server.Process.Signal(s)
}

// Stop ends the server with SIGTERM, as an operator does, and waits for it. The
// error carries an exit code other than 0.
func (n *Node) Stop() error {
	if n.PID() == 0 {
		return nil
	}
	if err := n.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	select {
	case <-n.ended():
		return n.ExitErr()
	case <-time.After(wait.Limit):
		_ = n.Signal(syscall.SIGQUIT) // for its stacks in the log
		_ = n.Kill()
		return fmt.Errorf("the server did not end within %v of SIGTERM\n%s", wait.Limit, n.LogTail(200))
	}
}

// Kill ends the server with SIGKILL and waits for it.
func (n *Node) Kill() error {
	if n.PID() == 0 {
		return nil
	}
	if err := n.Signal(syscall.SIGKILL); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	<-n.ended()
	return nil
}

// Restart is Stop and Start.
func (n *Node) Restart(ctx context.Context) error {
	if err := n.Stop(); err != nil {
		return err
	}
	return n.Start(ctx)
}

// Crash is Kill and Start.
func (n *Node) Crash(ctx context.Context) error {
	if err := n.Kill(); err != nil {
		return err
	}
	return n.Start(ctx)
}

// Stacks ends the server with SIGQUIT and returns the goroutines it had.
func (n *Node) Stacks() (string, error) {
	if n.PID() == 0 {
		return "", errors.New("the server does not run")
	}
	before, err := os.ReadFile(n.LogFile())
	if err != nil {
		return "", err
	}
	if err := n.Signal(syscall.SIGQUIT); err != nil {
		return "", err
	}
	<-n.ended()
	after, err := os.ReadFile(n.LogFile())
	return string(bytes.TrimPrefix(after, before)), err
}

// LogFile returns the file with the server's output, of all runs one after the
// other.
func (n *Node) LogFile() string { return n.Path("server.log") }

// LogTail returns the end of the server's log.
func (n *Node) LogTail(lines int) string {
	data, err := os.ReadFile(n.LogFile())
	if err != nil {
		return err.Error()
	}
	all := strings.Split(strings.TrimRight(string(data), "\n"), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

// LogAbout returns the last lines of the server's log that name one of the ids,
// without debug messages.
func (n *Node) LogAbout(lines int, ids ...string) string {
	data, err := os.ReadFile(n.LogFile())
	if err != nil {
		return err.Error()
	}
	var out []string
	for _, line := range strings.Split(string(data), "\n") {
		if strings.Contains(line, "level=DEBUG") {
			continue
		}
		if slices.ContainsFunc(ids, func(id string) bool { return strings.Contains(line, id) }) {
			out = append(out, line)
		}
	}
	return strings.Join(out[max(0, len(out)-lines):], "\n")
}

// stack matches the beginning of a stack that a program prints of itself. In
// the stacks of Stacks, which may catch a goroutine running as well, addresses
// stand before the state.
var stack = regexp.MustCompile(`goroutine \d+ \[running`)

// Faults returns the parts of the server's log that must not occur: data races,
// panics and fatal errors of the Go runtime, each with some lines around it.
func (n *Node) Faults() []string {
	data, err := os.ReadFile(n.LogFile())
	if err != nil {
		return nil
	}
	var out []string
	all := strings.Split(string(data), "\n")
	for i, line := range all {
		if strings.Contains(line, "DATA RACE") && !ofLibrary(all[i+1:]) || stack.MatchString(line) ||
			strings.HasPrefix(line, "panic: ") || strings.HasPrefix(line, "fatal error: ") {
			out = append(out, strings.Join(all[max(0, i-1):min(len(all), i+60)], "\n"))
		}
	}
	return out
}

// ofLibrary reports whether a report of the race detector is of a known race
// within a library that crius can neither avoid nor synchronize.
//
// In containerd/nri v0.12.5, the callback for the end of a plugin's connection
// logs the plugin's name, while the plugin's registration may still set it. The
// plugin is dropped either way.
func ofLibrary(report []string) bool {
	const plugin = "github.com/containerd/nri/pkg/adaptation.(*plugin)."
	var accesses []string
	for i, line := range report {
		if strings.HasPrefix(line, "=====") {
			break
		}
		if access.MatchString(line) && i+1 < len(report) {
			accesses = append(accesses, strings.TrimSpace(report[i+1]))
		}
	}
	slices.Sort(accesses)
	return slices.Equal(accesses, []string{plugin + "RegisterPlugin()", plugin + "name()"})
}

// access matches the line above the stack of an access to the raced memory.
var access = regexp.MustCompile(`^\s*(Previous )?([Rr]ead|[Ww]rite) at 0x`)
