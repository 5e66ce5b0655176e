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

// answerTime bounds the server's answer to a probe.
const answerTime = 3 * time.Second

// manager is the service manager that is notified of the service's state (sd_notify(3)).
type manager struct {
	socket   string        // empty: no manager
	watchdog time.Duration // longest time between notifications that the service is healthy; 0: none are wanted
}

// findManager removes the variables from the environment, so that runtimes and plugins,
// which inherit the rest, cannot notify the manager on behalf of the server.
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
	// sd_watchdog_enabled(3): the variable is for the process WATCHDOG_PID, if that is set.
	micros, err := strconv.ParseInt(take("WATCHDOG_USEC"), 10, 64)
	if pid := take("WATCHDOG_PID"); err == nil && micros > 0 && (pid == "" || pid == strconv.Itoa(os.Getpid())) {
		m.watchdog = time.Duration(micros) * time.Microsecond
	}
	return m
}

// patient returns a function that asks the manager for more time to start, at most once
// every few seconds. Without calls, that is without progress, the time runs out.
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

// watch notifies the manager as long as the server behind the CRI socket answers, until ctx
// ends or stop is called. The manager kills and restarts a server that hangs; containers
// are not affected.
func (m manager) watch(ctx context.Context, socket string) (stop func()) {
	if m.socket == "" || m.watchdog == 0 {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		often := m.watchdog / 3 // early enough to log a missing answer before the deadline
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

// alive checks that the server answers a call that needs only its own memory: a restart
// would not fix a slow disk or a hung runtime.
func alive(ctx context.Context, server cri.RuntimeServiceClient, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	const none = "watchdog"
	_, pods := server.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{Filter: &cri.PodSandboxFilter{Id: none}})
	_, containers := server.ListContainers(ctx, &cri.ListContainersRequest{Filter: &cri.ContainerFilter{Id: none}})
	return errors.Join(pods, containers)
}

// healthy returns an error if the server behind the CRI socket does not answer, or cannot
// run pods of the default handler.
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

// notify sends a state to the manager. Errors are logged and otherwise ignored.
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
