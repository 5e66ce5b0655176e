package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"strings"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/cmd/crius/cli"
	"github.com/crius-run/crius/cmd/crius/config"
	"github.com/crius-run/crius/internal/peer"
)

// checkServer asks the server of this configuration, if one is running, for its conditions.
func (n *node) checkServer(ctx context.Context) []finding {
	socket := n.config.Config.API.Listen
	if cli.Unserved(ctx, socket) != nil {
		return []finding{ok("no server is running at %s", socket)}
	}
	var report statusReport
	err := cli.Ask(ctx, socket, func(ctx context.Context, server cli.Server) (err error) {
		report, err = askStatus(ctx, server)
		return err
	})
	if err != nil {
		return []finding{fail("if that is crius, check its log (journalctl -u crius), and crius status goroutines shows where it hangs; otherwise stop it or set a different api.listen",
			"%s serves %s, but does not answer as crius does: %v", listener(ctx, socket), socket, err)}
	}
	findings := []finding{ok("%s %s has been running for %s", report.Name, report.Version, cli.Brief(time.Since(report.Server.Since)))}
	for _, c := range report.Conditions {
		switch {
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
	then := new(config.Loaded)
	if err := json.Unmarshal(report.Config, &then.Config); err != nil {
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
