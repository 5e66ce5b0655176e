package main

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/cmd/crius/cli"
	"github.com/crius-run/crius/cmd/crius/config"
	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/peer"
	"github.com/crius-run/crius/server"
)

// checkServer asks the server of this configuration, if one is running, for its conditions.
func (n *node) checkServer(ctx context.Context) []finding {
	socket := n.config.Config.API.Listen
	if cli.Unserved(ctx, socket) != nil {
		return []finding{n.serverAway(socket)}
	}
	var report statusReport
	err := cli.Ask(ctx, socket, func(ctx context.Context, asked cli.Server) (err error) {
		report, err = askStatus(ctx, asked)
		return err
	})
	if err != nil {
		return []finding{fail("if that is crius, check its log (journalctl -u crius), and crius status goroutines shows where it hangs; otherwise stop it or set a different api.listen",
			"%s serves %s, but does not answer as crius does: %v", listener(ctx, socket), socket, err)}
	}
	findings := []finding{ok("%s %s has been running for %s", report.Name, report.Version, cli.Brief(time.Since(report.Server.Since)))}
	if len(n.flags) > 0 {
		findings = append(findings, ok("checked with flags that it was started with: %s", strings.Join(n.flags, " ")))
	}
	for _, c := range report.Conditions {
		switch {
		case c.GetStatus() && c.GetMessage() != "":
			findings = append(findings, warn("", "%s is still true: %s", c.GetType(), c.GetMessage()))
		case c.GetStatus():
		case c.GetType() == cri.NetworkReady: // hostNetwork pods run, as on every new node
			findings = append(findings, warn("", "%s is false: %s", c.GetType(), c.GetMessage()))
		default:
			findings = append(findings, fail("", "%s is false: %s", c.GetType(), c.GetMessage()))
		}
	}
	if late := report.Server.stuck(); len(late) > 0 {
		findings = append(findings, warn("crius status --stuck says what they wait for", "%s in progress for more than %s", cli.Count(len(late), "operation"), stuck))
	}
	for _, what := range report.Server.Inherited {
		findings = append(findings, warn("change the server's unit, or how it is started", "containers inherit from the server: %s", what))
	}
	return append(findings, n.olderConfiguration(report)...)
}

// askServer lets the checks be of the configuration that the running server has from flags of its own
// command line, which no file has: a check without them would be of a node that does not exist.
func (n *node) askServer(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, stuck)
	defer cancel()
	var report statusReport
	err := cli.Ask(ctx, n.config.Config.API.Listen, func(ctx context.Context, asked cli.Server) (err error) {
		report, err = askStatus(ctx, asked)
		return err
	})
	if err != nil {
		return // checkServer says why
	}
	if server, err := config.ReadTables(report.Config); err == nil {
		n.config, n.flags = n.config.WithFlags(server, report.Settings)
	}
}

// serverAway says what it means that no server is running: nobody stops, restarts and executes in
// the containers that run, and a node whose unit is enabled should have a server.
func (n *node) serverAway(socket string) finding {
	const advice = "systemctl start crius; if it has ended, its log says why: journalctl -u crius"
	live := liveContainers(n.config.Config.RunRoot)
	switch {
	case live > 0:
		return fail(advice, "no server is running at %s, but %s: nobody can stop or restart them, and the kubelet takes the node for not ready",
			socket, counted(live, "container runs", "containers run"))
	case socket == server.DefaultConfig().Listen && n.host.enabled("crius.service"):
		return warn(advice, "no server is running at %s, although its unit crius.service is enabled", socket)
	}
	return ok("no server is running at %s", socket)
}

// liveContainers counts the containers of a run root whose process lives.
func liveContainers(runRoot string) (live int) {
	dirs, _ := filepath.Glob(filepath.Join(runRoot, "containers", "*"))
	for _, dir := range dirs {
		if p, err := conmon.ReadProcesses(dir); err == nil && conmon.Alive(p.Container) {
			live++
		}
	}
	return live
}

// enabled reports whether systemd starts a unit at boot.
func (h host) enabled(unit string) bool {
	for _, dir := range []string{"etc/systemd/system", "usr/lib/systemd/system", "lib/systemd/system"} {
		links, _ := filepath.Glob(filepath.Join(h.root, dir, "*.wants", unit))
		if len(links) > 0 {
			return true
		}
	}
	return false
}

// listener names the process that listens on a socket.
func listener(ctx context.Context, socket string) string {
	conn, err := new(net.Dialer).DialContext(ctx, "unix", socket)
	if err != nil {
		return "a process"
	}
	defer conn.Close()
	return peer.Of(conn)
}

// olderConfiguration reports the options that have changed since the server read its
// configuration.
func (n *node) olderConfiguration(report statusReport) []finding {
	then, err := config.ReadTables(report.Config)
	if err != nil {
		return []finding{warn("restart the server: its version differs from that of this command", "the configuration of the running server cannot be read: %v", err)}
	}
	keys := config.Differences(then, n.config)
	if len(keys) == 0 {
		return nil
	}
	return []finding{warn("run crius reload: it applies what a running server can change and lists what needs a restart",
		"%s changed since the server read the configuration: %s", counted(len(keys), "option has", "options have"), strings.Join(keys, ", "))}
}

func counted(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}
