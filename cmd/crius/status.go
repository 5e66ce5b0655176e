package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"time"

	"github.com/spf13/cobra"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/cmd/crius/cli"
	"github.com/crius-run/crius/cmd/crius/config"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/nri"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/pod"
	"github.com/crius-run/crius/storage/pull/progress"
)

// vitals is the server's report of itself in a verbose Status.
type vitals struct {
	PID         int       `json:"pid"`
	Since       time.Time `json:"since"`
	Pods        states    `json:"pods"`
	Containers  states    `json:"containers"`
	Monitors    int       `json:"monitors"`
	Unreachable int       `json:"unreachableMonitors"` // that have not answered since the server started
	Logs        int       `json:"logTroubles"`         // running containers whose logs lack what they write
	Cleanups    int       `json:"pending_cleanups"`
	Goroutines  int       `json:"goroutines"`
	Heap        uint64    `json:"heapBytes"`
	Work        []work    `json:"work"`

	Pending []pod.Pending   `json:"pending"` // the cleanups, with the reason of the last attempt
	Pulls   []progress.Pull `json:"pulls"`

	Warnings []progress.Warning `json:"registry_warnings,omitempty"` // the latest ones

	Checkpoints []pod.Checkpointing `json:"checkpoints"` // under way

	Confinement string `json:"confinement,omitempty"` // SELinux, AppArmor and seccomp, for people

	Inherited []string `json:"inherited,omitempty"` // attributes of the server that containers inherit
}

// states counts objects by state.
type states map[string]int

// work is an operation in progress.
type work struct {
	Operation   string  `json:"operation"`
	Object      string  `json:"object"`
	Seconds     float64 `json:"seconds"`
	Step        string  `json:"step,omitempty"`
	StepSeconds float64 `json:"stepSeconds,omitempty"`

	Name     string    `json:"name,omitempty"`     // of the object: namespace/pod or namespace/pod/container
	WaitsFor string    `json:"waitsFor,omitempty"` // what the step waits for, if known
	Until    time.Time `json:"until,omitzero"`     // when the step ends at the latest; zero: unknown
}

func newVitals(since time.Time, inherited []string, s pod.Summary, pulls *progress.Counts) vitals {
	var memory runtime.MemStats
	runtime.ReadMemStats(&memory)
	v := vitals{
		PID: os.Getpid(), Since: since, Inherited: inherited, Monitors: s.Monitors, Unreachable: s.Unreachable, Logs: s.Logs, Cleanups: s.Cleanups,
		Goroutines: runtime.NumGoroutine(), Heap: memory.HeapAlloc, Work: []work{}, Pending: s.Pending, Pulls: pulls.Active(), Warnings: pulls.Warnings(), Checkpoints: s.Checkpoints,
		Pods: states{
			"ready":    s.Pods[cri.PodSandboxState_SANDBOX_READY],
			"notready": s.Pods[cri.PodSandboxState_SANDBOX_NOTREADY],
		},
		Containers: states{
			"created": s.Containers[cri.ContainerState_CONTAINER_CREATED],
			"running": s.Containers[cri.ContainerState_CONTAINER_RUNNING],
			"exited":  s.Containers[cri.ContainerState_CONTAINER_EXITED],
		},
	}
	for _, w := range s.Work {
		v.Work = append(v.Work, newWork(w))
	}
	return v
}

// on adds what the server knows of its node.
func (v vitals) on(h host, c config.Config) vitals {
	v.Confinement = h.confinement(c)
	return v
}

func newWork(w trace.Work) work {
	return work{w.Operation, w.Object, w.Took.Seconds(), w.Step, w.StepTook.Seconds(), w.Name, w.WaitsFor, w.Until}
}

// stuck is the duration from which an operation counts as stuck.
const stuck = 10 * time.Second

func (p *program) statusCommand() *cobra.Command {
	var onlyStuck bool
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show the status of the running server and its operations in progress",
		Long: "Ask the server that runs with this configuration whether it is ready, what is on the node, " +
			"and which operations are in progress, with the current step of each and how long it has taken.",
		Args: cli.Operands,
	}
	cmd.Flags().BoolVar(&onlyStuck, "stuck", false, fmt.Sprintf("show only operations that take longer than %s", stuck))
	format := cli.FormatFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		loaded, err := p.loadForClient(cmd)
		if err != nil {
			return err
		}
		var report statusReport
		socket := loaded.Config.API.Listen
		err = cli.Ask(cmd.Context(), socket, func(ctx context.Context, server cli.Server) (err error) {
			report, err = askStatus(ctx, server)
			return err
		})
		if err != nil {
			return err
		}
		if onlyStuck {
			list := report.Server.stuck()
			return format.Print(cmd.OutOrStdout(), list, func(w io.Writer) { writeStuck(w, list) })
		}
		return format.Print(cmd.OutOrStdout(), report, func(w io.Writer) {
			cli.Table(w, func(w io.Writer) { report.write(w, socket) })
		})
	}
	cmd.AddCommand(p.dumpCommands()...)
	return cmd
}

// statusReport is the document of crius status.
type statusReport struct {
	Name       string                  `json:"name"`
	Version    string                  `json:"version"`
	Conditions []*cri.RuntimeCondition `json:"conditions"`
	Handlers   []oci.Report            `json:"handlers"`
	Plugins    nri.Report              `json:"plugins"`
	Server     vitals                  `json:"server"`
	Config     json.RawMessage         `json:"config"`
	Settings   []config.Setting        `json:"settings"` // options that do not have their defaults
}

func askStatus(ctx context.Context, server cri.RuntimeServiceClient) (statusReport, error) {
	version, err := server.Version(ctx, &cri.VersionRequest{})
	if err != nil {
		return statusReport{}, err
	}
	status, err := server.Status(ctx, &cri.StatusRequest{Verbose: true})
	if err != nil {
		return statusReport{}, err
	}
	r := statusReport{
		Name:       version.RuntimeName,
		Version:    version.RuntimeVersion,
		Conditions: status.Status.GetConditions(),
		Config:     json.RawMessage(status.Info["config"]),
	}
	for key, part := range map[string]any{"server": &r.Server, "settings": &r.Settings, "handlers": &r.Handlers, "plugins": &r.Plugins} {
		err = errors.Join(err, json.Unmarshal([]byte(status.Info[key]), part))
	}
	if err != nil {
		return r, fmt.Errorf("%s %s sent a status that cannot be parsed (server older than this client?): %w", r.Name, r.Version, err)
	}
	return r, nil
}

func (v vitals) stuck() []work {
	list := []work{}
	for _, w := range v.Work {
		if w.Seconds > stuck.Seconds() {
			list = append(list, w)
		}
	}
	return list
}

func (r statusReport) write(w io.Writer, socket string) {
	v := r.Server
	fmt.Fprintf(w, "server\t%s %s at %s, up %s, pid %d\n", r.Name, r.Version, socket, cli.Brief(time.Since(v.Since)), v.PID)
	for _, c := range r.Conditions {
		answer := "yes"
		switch {
		case !c.Status:
			answer = "NO: " + cli.Printable(c.Message)
		case c.Message != "":
			answer = "yes, but " + cli.Printable(c.Message)
		}
		fmt.Fprintf(w, "%s\t%s\n", c.Type, answer)
	}
	writeHandlers(w, r.Handlers)
	writePlugins(w, r.Plugins)
	fmt.Fprintf(w, "pods\t%d ready, %d not ready\n", v.Pods["ready"], v.Pods["notready"])
	fmt.Fprintf(w, "containers\t%d created, %d running, %d exited; %s\n",
		v.Containers["created"], v.Containers["running"], v.Containers["exited"], cli.Count(v.Monitors, "monitor"))
	if v.Unreachable > 0 {
		fmt.Fprintf(w, "unreachable\t%s without an answer since the server started; crius check lists them\n", cli.Count(v.Unreachable, "monitor"))
	}
	if v.Logs > 0 {
		fmt.Fprintf(w, "logs\t%d running containers write what does not reach their logs; crius check lists them\n", v.Logs)
	}
	if v.Cleanups > 0 {
		fmt.Fprintf(w, "pending cleanups\t%d, retrying\n", v.Cleanups)
		writePending(w, v.Pending)
	}
	writeCheckpoints(w, v.Checkpoints)
	if v.Confinement != "" {
		fmt.Fprintf(w, "confinement\t%s\n", cli.Printable(v.Confinement))
	}
	fmt.Fprintf(w, "uses\t%.1f MiB of heap, %d goroutines\n", float64(v.Heap)/(1<<20), v.Goroutines)
	writeWork(w, v.Work)
	for i, s := range r.Settings {
		heading := ""
		if i == 0 {
			heading = "configured"
		}
		fmt.Fprintf(w, "%s\t%s = %s (%s)\n", heading, cli.Printable(s.Key), cli.Printable(s.Value), cli.Printable(s.Origin))
	}
}

func writeHandlers(w io.Writer, list []oci.Report) {
	for i, h := range list {
		heading := ""
		if i == 0 {
			heading = "handlers"
		}
		name := h.Name
		if h.Default {
			name += " (default)"
		}
		answer := fmt.Sprintf("%s; %s", h.Version, abilities(h))
		if !h.Ready {
			answer = "NO: " + h.Error
		}
		fmt.Fprintf(w, "%s\t%s: %s\n", heading, cli.Printable(name), cli.Printable(answer))
	}
}

// writePlugins writes nothing on a node without plugins.
func writePlugins(w io.Writer, r nri.Report) {
	if r.Error != "" {
		fmt.Fprintf(w, "plugins\tNO: %s\n", cli.Printable(r.Error))
		return
	}
	for i, p := range r.Plugins {
		heading := ""
		if i == 0 {
			heading = fmt.Sprintf("plugins, %d connected", r.Connected)
		}
		fmt.Fprintf(w, "%s\t%s: %s, the slowest took %s", heading, cli.Printable(p.Name), cli.Count(p.Requests, "request"), cli.Brief(p.Slowest))
		if p.Failures > 0 {
			fmt.Fprintf(w, "; %d failed, the last %s ago: %s", p.Failures, cli.Brief(time.Since(p.FailedAt)), cli.Printable(p.LastError))
		}
		fmt.Fprintln(w)
	}
}

// mostPending is how many pending cleanups are listed; crius check lists all of them.
const mostPending = 10

func writePending(w io.Writer, list []pod.Pending) {
	for i, p := range list {
		if i == mostPending {
			fmt.Fprintf(w, "\tand %d more; crius check lists them\n", len(list)-i)
			return
		}
		fmt.Fprintf(w, "\t%s, for %s", named(p.ID, p.Name), cli.Brief(time.Since(p.Since)))
		if p.Err != "" {
			fmt.Fprintf(w, ": %s", cli.Printable(p.Err))
		}
		fmt.Fprintln(w)
	}
}

// named returns an id with its name, if it has one.
func named(id, name string) string {
	if name == "" {
		return cli.Printable(id)
	}
	return cli.Printable(name) + " (" + cli.Printable(id) + ")"
}

func writeCheckpoints(w io.Writer, list []pod.Checkpointing) {
	for i, c := range list {
		heading, state := "", "runs"
		if i == 0 {
			heading = "checkpoints"
		}
		if c.Frozen {
			state = "frozen"
		}
		fmt.Fprintf(w, "%s\t%s: %s, for %s\n", heading, named(c.ID, c.Name), state, cli.Brief(time.Since(c.Since)))
	}
}

func writeWork(w io.Writer, list []work) {
	for i, one := range list {
		heading := ""
		if i == 0 {
			heading = "operations"
		}
		fmt.Fprintf(w, "%s\t%s %s, running for %s", heading, one.Operation, named(one.Object, one.Name), cli.Brief(seconds(one.Seconds)))
		if one.Step != "" {
			fmt.Fprintf(w, "; step: %s, for %s", one.Step, cli.Brief(seconds(one.StepSeconds)))
		}
		if one.WaitsFor != "" {
			fmt.Fprintf(w, "; waits for %s", cli.Printable(one.WaitsFor))
		}
		if !one.Until.IsZero() {
			fmt.Fprintf(w, ", until %s at the latest", one.Until.Local().Format(time.TimeOnly))
		}
		fmt.Fprintln(w)
	}
}

// writeStuck says so if no operation is stuck.
func writeStuck(w io.Writer, list []work) {
	if len(list) == 0 {
		fmt.Fprintf(w, "no operation takes longer than %s\n", stuck)
	}
	cli.Table(w, func(w io.Writer) { writeWork(w, list) })
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
