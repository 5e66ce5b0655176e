// Package config is the configuration of crius: one tree of structs. The tags of an option
// are the only place that describes it: its name, its help, its allowed values, and whether
// a reload applies it. The TOML file, its template, the command line flags, `crius config`,
// the manual page and the completions are all derived from the tree, so that they cannot
// become outdated.
//
// Every package has a Config with the options that an operator can set for it
// (server.Config, pod.Config, oci.Config, storage.Config, network.Config, tuning.Config,
// nri.Config) and their defaults (its DefaultConfig); this package only composes them.
// Values that a package needs beyond that are in its Options, which the program fills in.
//
// # Where values come from
//
// Later sources override earlier ones: the defaults, the configuration file, the drop-ins
// in the order of their names, the command line flags. Tables, including those of runtime
// handlers, merge key by key; a list replaces the earlier list.
//
// # What is refused
//
// An unknown key is an error, not a warning: nobody must believe that a misspelt security
// option is in force. The error suggests the key that was probably meant. All problems of
// all sources are reported at once, each with file, line and key.
package config

import (
	"github.com/crius-run/crius/network"
	"github.com/crius-run/crius/nri"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/oci/tuning"
	"github.com/crius-run/crius/pod"
	"github.com/crius-run/crius/server"
	"github.com/crius-run/crius/server/metrics"
	"github.com/crius-run/crius/server/otlp"
	"github.com/crius-run/crius/storage"
)

// DefaultFile is read when no other file is named. It need not exist.
const DefaultFile = "/etc/crius/crius.toml"

// Config has all options that an operator can set.
type Config struct {
	Root      string `toml:"root" apply:"restart: the records of running pods are there" form:"path" help:"directory for state that must survive a reboot: records of pods and containers, writable layers"`
	RunRoot   string `toml:"run_root" apply:"restart: the sockets and mounts of running pods are there" form:"path" help:"directory for state that a reboot may discard: bundles, mounts, sockets"`
	LogLevel  string `toml:"log_level" apply:"reload" choices:"debug,info,warn,error" help:"lowest severity that is logged: debug, info, warn or error"`
	LogFormat string `toml:"log_format" apply:"restart: the log is set up at the start" choices:"text,json" help:"format of the log on standard error: text or json"`

	API     server.Config  `toml:"api" help:"The CRI endpoint."`
	Metrics metrics.Config `toml:"metrics" help:"Prometheus metrics."`
	Tracing otlp.Config    `toml:"tracing" help:"OpenTelemetry traces."`
	Pod     pod.Config     `toml:"pod" help:"The node's policy for pods and containers."`
	Runtime oci.Config     `toml:"runtime" help:"OCI runtimes and cgroups."`
	Image   storage.Config `toml:"image" help:"Images and where they are pulled from."`
	Network network.Config `toml:"network" help:"Pod networks (CNI)."`
	Tuning  tuning.Config  `toml:"tuning" help:"The node's part for containers that have CPUs of their own (whole CPUs of Guaranteed pods)."`
	NRI     nri.Config     `toml:"nri" help:"Node Resource Interface (NRI): plugins that observe and modify pods and containers."`
}

// Default is the configuration of a node without configuration files.
func Default() Config {
	return Config{
		Root:      "/var/lib/crius",
		RunRoot:   "/run/crius",
		LogLevel:  "info",
		LogFormat: "text",
		API:       server.DefaultConfig(),
		Metrics:   metrics.Config{IncludedPodMetrics: server.DefaultPodMetricKinds()},
		Pod:       pod.DefaultConfig(),
		Runtime:   oci.DefaultConfig(),
		Image:     storage.DefaultConfig(),
		Network:   network.DefaultConfig(),
		Tuning:    tuning.DefaultConfig(),
		NRI:       nri.DefaultConfig(),
		Tracing:   otlp.DefaultConfig(),
	}
}
