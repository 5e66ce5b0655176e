package oci

import "time"

// Config is the table of RuntimeClass handlers and what they share.
type Config struct {
	DefaultHandler string             `toml:"default_handler" help:"handler of pods whose RuntimeClass names none"`
	CgroupDriver   string             `toml:"cgroup_driver" help:"who makes container cgroups: cgroupfs or systemd; must match the kubelet's"`
	Monitor        string             `toml:"monitor" help:"path of crius-conmon; empty: beside the crius program, else searched in PATH"`
	MonitorCgroup  string             `toml:"monitor_cgroup" help:"cgroup in which the monitors live; empty: a child of the service's own"`
	BackportedCVEs []string           `toml:"backported_cves" help:"CVEs whose fixes the distribution has backported to the runtimes of this node, whose versions crius takes for vulnerable"`
	Handlers       map[string]Handler `toml:"handlers" help:"RuntimeClass handlers by name"`
}

// Handler is one RuntimeClass handler.
type Handler struct {
	Type          string        `toml:"type" help:"how the runtime is driven: oci (by its command line) or shim (a containerd shim v2 by ttrpc: Kata 2 and 3, containerd-shim-runc-v2)"`
	Path          string        `toml:"path" help:"runtime binary; a bare name is searched in PATH, and a node where it is missing does not offer the handler"`
	Root          string        `toml:"root" help:"the runtime's own state directory; empty: <run_root>/runtime/<handler name>"`
	Options       []string      `toml:"options" help:"further global flags of the runtime's command line, such as --platform=kvm for gVisor or --kata-config=FILE for Kata 1; of a shim, options of the runtime, such as --ConfigPath=FILE for Kata or --BinaryName=PATH for runc's"`
	CreateTimeout time.Duration `toml:"create_timeout" help:"longest time the runtime may take to create a container"`

	PrivilegedWithoutHostDevices bool     `toml:"privileged_without_host_devices" help:"do not add the host's devices to privileged containers"`
	DefaultAnnotations           []string `toml:"default_annotations" help:"annotations (key=value) for the runtime, on every container; a pod's own take their place if allowed_annotations has the key"`
	AllowedAnnotations           []string `toml:"allowed_annotations" help:"pod annotations, by exact key, that reach the runtime"`
	SeccompProfile               string   `toml:"seccomp_profile" help:"JSON file that replaces the RuntimeDefault seccomp profile for this handler; empty: pod.seccomp_profile"`
	MinMemory                    int64    `toml:"min_memory" help:"least memory limit in bytes that a container may ask for, for what the runtime itself needs in its cgroup; 0: any"`
	MonitorCgroup                string   `toml:"monitor_cgroup" help:"cgroup in which the monitors of this handler's containers live; empty: runtime.monitor_cgroup"`
	CNIConfDir                   string   `toml:"cni_conf_dir" help:"directory of the CNI network configurations for this handler's pods; empty: network.conf_dir"`
	Features                     string   `toml:"features" help:"JSON file that stands in for what the runtime's features command prints, which then is not run: for those that have no such command; empty: the runtime is asked"`
}

// DefaultHandlerConfig is what a handler table without keys means.
func DefaultHandlerConfig(name string) Handler {
	return Handler{Type: "oci", Path: name, CreateTimeout: 4 * time.Minute}
}

// DefaultConfig is what an empty configuration file means.
func DefaultConfig() Config {
	return Config{
		DefaultHandler: "runc",
		CgroupDriver:   "systemd",
		Handlers: map[string]Handler{
			"runc": DefaultHandlerConfig("runc"),
			"crun": DefaultHandlerConfig("crun"),
		},
	}
}
