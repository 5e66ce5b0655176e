package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	podstatus "github.com/crius-run/crius/pod/status"

	"github.com/crius-run/crius/cmd/crius/cli"
)

// answerTime is how long the server may take to answer a probe's own question.
const answerTime = 3 * time.Second

// manager is the service manager that wants to know how the service is
// (sd_notify(3)).
type manager struct {
	socket   string        // empty: nobody asks
	watchdog time.Duration // how often it wants to hear that the service is well; 0: never
}

// findManager takes the variables out of the environment: to runtimes and plugins,
// which inherit the rest, they would be an invitation to speak for the server.
func findManager() manager {
	take := func(name string) string {
		value := os.Getenv(name)
		_ = os.Unsetenv(name)
		return value
	}
	m := manager{socket: take("NOTIFY_SOCKET")}
	if abstract, ok := strings.CutPrefix(m.socket, "@"); ok {
		m.socket = "\x00" + abstract
	}
	// sd_watchdog_enabled(3): meant for another process if there is a pid and it is not ours.
	micros, err := strconv.ParseInt(take("WATCHDOG_USEC"), 10, 64)
	if pid := take("WATCHDOG_PID"); err == nil && micros > 0 && (pid == "" || pid == strconv.Itoa(os.Getpid())) {
		m.watchdog = time.Duration(micros) * time.Microsecond
	}
	return m
}

// patient asks the manager for more time to start, as often as it is called but
// for a few seconds in between: without progress the time runs out.
func (m manager) patient() func() {
	const often, more = 10 * time.Second, 2 * time.Minute
	var last time.Time
	return func() {
		if time.Since(last) > often {
			last = time.Now()
			m.notify(fmt.Sprintf("EXTEND_TIMEOUT_USEC=%d", more.Microseconds()))
		}
	}
}

// watch tells the manager that the service is well, as long as the server behind the
// CRI socket answers, until ctx ends or the function that it returns is called. One that has
// hung is killed by the manager and started again; containers do not notice.
func (m manager) watch(ctx context.Context, socket string) (stop func()) {
	if m.socket == "" || m.watchdog == 0 {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		often := m.watchdog / 3 // so that an answer that does not come is told before the end
		tick := time.NewTicker(often)
		defer tick.Stop()
		for {
			err := cli.Ask(ctx, socket, func(ctx context.Context, server cli.Server) error {
				return alive(ctx, server, often)
			})
			switch {
			case ctx.Err() != nil:
				return
			case err != nil:
				slog.ErrorContext(ctx, "server does not answer its own health check, the service manager will restart it", "err", err)
			default:
				m.notify("WATCHDOG=1")
			}
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
		}
	}()
	return func() {
		cancel()
		<-done
	}
}

// alive asks what needs no more than the server's own memory: a slow disk or a hung
// runtime, which a restart would not cure, does not count.
func alive(ctx context.Context, server cri.RuntimeServiceClient, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	const none = "watchdog"
	_, pods := server.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{Filter: &cri.PodSandboxFilter{Id: none}})
	_, containers := server.ListContainers(ctx, &cri.ListContainersRequest{Filter: &cri.ContainerFilter{Id: none}})
	return errors.Join(pods, containers)
}

// healthy says why the server behind the CRI socket does not serve its kubelet: it does
// not answer, or no pod of the default handler can be run.
func healthy(ctx context.Context, socket string, node *podstatus.Node) error {
	err := cli.Ask(ctx, socket, func(ctx context.Context, server cli.Server) error {
		return alive(ctx, server, answerTime)
	})
	if err != nil {
		return err
	}
	runtime, err := node.RuntimeStatus(ctx)
	if err != nil {
		return err
	}
	if runtime.NotReady != nil {
		return fmt.Errorf("%s is false: %w", cri.RuntimeReady, runtime.NotReady)
	}
	return nil
}

// notify tells the manager. That it does not listen is its own loss.
func (m manager) notify(state string) {
	if m.socket == "" {
		return
	}
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: m.socket, Net: "unixgram"})
	if err == nil {
		_, err = conn.Write([]byte(state))
		err = errors.Join(err, conn.Close())
	}
	if err != nil {
		slog.Warn("cannot notify the service manager", "state", state, "err", err)
	}
}
