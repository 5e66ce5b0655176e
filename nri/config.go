package nri

import (
	"time"

	validator "github.com/containerd/nri/plugins/default-validator"
)

// Config says which plugins are allowed, and what they may do.
type Config struct {
	Enable              bool          `toml:"enable" apply:"restart: plugins have been started and registered with it" help:"whether NRI plugins can observe and modify pods and containers"`
	Socket              string        `toml:"socket" apply:"restart: plugins have been started and registered with it" form:"path" help:"socket that plugins connect to; accessible to root only"`
	Connections         bool          `toml:"connections" apply:"restart: plugins have been started and registered with it" help:"whether external plugins may connect; false: only plugins in plugin_dir are used"`
	PluginDir           string        `toml:"plugin_dir" apply:"restart: plugins have been started and registered with it" form:"path" input:"yes" help:"directory of plugins that the server starts, with names of the form INDEX-NAME such as 10-example"`
	PluginConfigDir     string        `toml:"plugin_config_dir" apply:"restart: plugins have been started and registered with it" form:"path" input:"yes" help:"directory of plugin configurations, INDEX-NAME.conf or NAME.conf"`
	RegistrationTimeout time.Duration `toml:"registration_timeout" apply:"restart: plugins have been started and registered with it" form:"positive" help:"how long a plugin may take to register"`
	RequestTimeout      time.Duration `toml:"request_timeout" apply:"restart: plugins have been started and registered with it" form:"positive" help:"how long a plugin may take to answer; one that does not is disconnected"`
	Validator           Validator     `toml:"validator" help:"Changes that plugins must not make, and plugins that are required."`
}

// Validator refuses containers because of what plugins have changed.
type Validator struct {
	Enable              bool     `toml:"enable" apply:"restart: the rules are registered beside the plugins at the start" help:"whether the rules of this table are in force"`
	RejectHooks         bool     `toml:"reject_oci_hook_adjustment" apply:"restart: the rules are registered beside the plugins at the start" help:"refuse containers whose OCI hooks a plugin has changed"`
	RejectDefault       bool     `toml:"reject_runtime_default_seccomp_adjustment" apply:"restart: the rules are registered beside the plugins at the start" help:"refuse containers whose default seccomp profile a plugin has changed"`
	RejectUnconfined    bool     `toml:"reject_unconfined_seccomp_adjustment" apply:"restart: the rules are registered beside the plugins at the start" help:"refuse unconfined containers to which a plugin has added a seccomp profile"`
	RejectCustom        bool     `toml:"reject_custom_seccomp_adjustment" apply:"restart: the rules are registered beside the plugins at the start" help:"refuse containers whose own seccomp profile a plugin has changed"`
	RejectNamespaces    bool     `toml:"reject_namespace_adjustment" apply:"restart: the rules are registered beside the plugins at the start" help:"refuse containers whose namespaces a plugin has changed"`
	RejectSysctls       bool     `toml:"reject_sysctl_adjustment" apply:"restart: the rules are registered beside the plugins at the start" help:"refuse containers whose sysctls a plugin has changed"`
	RequiredPlugins     []string `toml:"required_plugins" apply:"restart: the rules are registered beside the plugins at the start" help:"plugins that must be connected before containers are created"`
	TolerateMissingWith string   `toml:"tolerate_missing_plugins_annotation" apply:"restart: the rules are registered beside the plugins at the start" help:"annotation by which a pod tolerates missing required plugins; empty: none"`
}

// DefaultConfig returns what an empty configuration file means, as in CRI-O and
// containerd.
func DefaultConfig() Config {
	return Config{
		Enable:              true,
		Socket:              "/var/run/nri/nri.sock",
		Connections:         true,
		PluginDir:           "/opt/nri/plugins",
		PluginConfigDir:     "/etc/nri/conf.d",
		RegistrationTimeout: 5 * time.Second,
		RequestTimeout:      2 * time.Second,
	}
}

// library converts v to the library's type.
func (v Validator) library() *validator.DefaultValidatorConfig {
	return &validator.DefaultValidatorConfig{
		Enable:                                v.Enable,
		RejectOCIHookAdjustment:               v.RejectHooks,
		RejectRuntimeDefaultSeccompAdjustment: v.RejectDefault,
		RejectUnconfinedSeccompAdjustment:     v.RejectUnconfined,
		RejectCustomSeccompAdjustment:         v.RejectCustom,
		RejectNamespaceAdjustment:             v.RejectNamespaces,
		RejectSysctlAdjustment:                v.RejectSysctls,
		RequiredPlugins:                       v.RequiredPlugins,
		TolerateMissingAnnotation:             v.TolerateMissingWith,
	}
}
