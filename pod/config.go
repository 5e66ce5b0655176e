package pod

import (
	"context"
	"path/filepath"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/lsm"
	"github.com/crius-run/crius/oci/annotation"
	"github.com/crius-run/crius/oci/classes"
	"github.com/crius-run/crius/oci/spec"
	"github.com/crius-run/crius/oci/tuning"
	"github.com/crius-run/crius/pod/blueprint"
	"github.com/crius-run/crius/pod/files"
	"github.com/crius-run/crius/pod/records"
)

// Config is the node's own policy for pods and containers.
type Config struct {
	NamespacesDir       string   `toml:"namespaces_dir" apply:"restart: the namespaces of running pods are pinned there" form:"path" help:"parent of the netns, ipcns and utsns directories in which pod namespaces are pinned"`
	CgroupParent        string   `toml:"cgroup_parent" apply:"restart: the cgroups of running pods are found by it" help:"parent cgroup of pods that request none; empty: /crius with cgroupfs, system.slice with systemd"`
	PidsLimit           int64    `toml:"pids_limit" apply:"reload" help:"maximum number of processes in a container whose request sets no limit; 0: no limit"`
	DefaultCapabilities []string `toml:"default_capabilities" apply:"reload" help:"default capabilities, to which a container's request adds and from which it drops"`
	DefaultSysctls      []string `toml:"default_sysctls" apply:"reload" help:"sysctls (key=value) of pods that do not set them"`
	UnprivilegedPorts   bool     `toml:"unprivileged_ports" apply:"reload" help:"let processes without capabilities bind ports below 1024 in the network of their pod: net.ipv4.ip_unprivileged_port_start=0 where neither the pod nor default_sysctls sets it"`
	UnprivilegedPing    bool     `toml:"unprivileged_ping" apply:"reload" help:"let processes without capabilities send ping in the network of their pod: net.ipv4.ping_group_range=\"0 2147483647\" where neither the pod nor default_sysctls sets it"`
	DefaultUlimits      []string `toml:"default_ulimits" apply:"reload" help:"resource limits (nofile=1024:4096) of every container"`
	DefaultEnv          []string `toml:"default_env" apply:"reload" help:"environment (NAME=value) of every container, before the image's"`
	AllowedDevices      []string `toml:"allowed_devices" apply:"reload" help:"host devices that a pod may request with the annotation devices.crio.io, if its handler allows that annotation"`
	AllowedUlimits      []string `toml:"allowed_ulimits" apply:"reload" help:"resource limits (nofile=1048576) that a pod may request with the annotation ulimits.crius.run, if its handler allows that annotation, each up to this value"`
	AdditionalDevices   []string `toml:"additional_devices" apply:"reload" help:"host devices (host:container:rwm) given to every container"`
	CDISpecDirs         []string `toml:"cdi_spec_dirs" apply:"reload" input:"yes" help:"directories of CDI specs (Container Device Interface); later directories take precedence"`
	DeviceOwnership     bool     `toml:"device_ownership_from_security_context" apply:"reload" help:"give a container's devices to its run_as_user and run_as_group instead of leaving their owners as on the host"`
	SeccompProfile      string   `toml:"seccomp_profile" apply:"reload" form:"path or empty" input:"yes" help:"JSON file that replaces the built-in RuntimeDefault seccomp profile"`
	AppArmorProfile     string   `toml:"apparmor_profile" apply:"reload" help:"profile of AppArmor for RuntimeDefault; crius loads crius-default itself, any other profile must be loaded by you; empty: none"`
	SELinux             bool     `toml:"selinux" apply:"restart: the labels of running pods are reserved at the start" help:"isolate pods with SELinux, if the node has it: each pod gets its own MCS level"`

	HostNetworkDisablesSELinux bool `toml:"host_network_disables_selinux" apply:"restart: the labels of running pods are reserved at the start" help:"do not confine hostNetwork pods with SELinux"`

	InfraCPUs string `toml:"infra_cpuset" apply:"reload" help:"CPUs of infra containers, such as 0-1,52-53, those that the kubelet reserves for the system; a workload's cpuset comes before it, and infra containers that hold a sandbox (gVisor, Kata) are not confined; empty: all"`

	MountsFiles         []string `toml:"mounts_files" apply:"reload" form:"path" help:"files of directories and files (/SOURCE:/DESTINATION) of which every container gets copies, such as secrets and entitlements (containers-mounts.conf(5)); the first one that exists counts; empty: none"`
	ReadOnly            bool     `toml:"read_only" apply:"reload" help:"make every container's root file system read-only; /run, /tmp and /var/tmp are copies in memory, unless something is mounted there"`
	RejectMissingMounts []string `toml:"reject_missing_mounts" apply:"reload" help:"host paths that are never created for a mount: a container that mounts a missing one is refused"`
	ShmSize             int64    `toml:"shm_size" apply:"reload" form:"positive" help:"size of a pod's /dev/shm in bytes"`
}

// Paths are the two roots of an engine's disk layout (see the package documentation).
type Paths struct {
	StateDir string // what must survive a reboot
	RunDir   string // what a reboot may discard
}

// Options are what an engine works by: the operator's policy for pods, and what it needs to
// know of the rest of the node's configuration.
type Options struct {
	Config
	Paths
	// CgroupDriver is that of the runtimes (oci.Config): cgroupfs or systemd.
	CgroupDriver string
	// CgroupPrefix is what the names of new cgroups begin with; empty: crius.
	CgroupPrefix string
	// PauseProgram is the first process of a shared PID namespace: a static
	// program that, called with the argument pause, reaps and waits.
	PauseProgram string
	// ImageVolumes says how volumes that images declare are treated (storage.Config.Volumes):
	// mkdir, bind or ignore.
	ImageVolumes string
	// HookDirs are the directories of OCI hooks (oci.Config.HooksDir).
	HookDirs []string
	// Restore: pods may be restored from checkpoints of this node and of RestoreKeys (oci.Config).
	Restore     bool
	RestoreKeys []string
	// Classes are the classes of block I/O and RDT (oci.Config).
	Classes classes.Config
	// Tuning says what the node does for containers with CPUs of their own.
	Tuning tuning.Config
	// CPUs is the machine whose CPUs are tuned; the zero value is this one.
	CPUs tuning.Node
	// Workloads are the workloads that pods may be in, by name (oci.Config.Workloads).
	Workloads map[string]annotation.Workload
}

// policy is what an engine works by until the next reload. It never changes.
type policy struct {
	Options
	planner *blueprint.Planner
}

// Prepare checks options that a reload has changed, and returns a function that has them take effect
// for pods and containers made afterwards, which cannot fail. Options that need a restart must be as
// they were.
func (e *Engine) Prepare(ctx context.Context, cfg Options) (apply func(), err error) {
	if err := e.classes.CheckBlockIO(cfg.Classes.BlockIOFile); err != nil {
		return nil, err
	}
	planner := e.planner()
	next, err := cfg.policy(ctx, planner.Boot, planner.Host, planner.Defaults.SELinux, e.paths.HostPaths)
	if err != nil {
		return nil, err
	}
	return func() {
		e.classes.UseBlockIO(cfg.Classes.BlockIOFile)
		e.now.Store(next)
	}, nil
}

func (e *Engine) policy() *policy { return e.now.Load() }

func (e *Engine) planner() *blueprint.Planner { return e.policy().planner }

// policy returns the policy of a node with these options, and with what its defaults name.
func (o *Options) policy(ctx context.Context, boot string, host spec.Host, selinux *spec.SELinux, paths *conmon.HostPaths) (*policy, error) {
	defaults, err := o.defaults(ctx, paths)
	if err != nil {
		return nil, err
	}
	if host.AppArmor {
		defaults.AppArmorProfile = loadedProfile(ctx, o.AppArmorProfile)
	}
	defaults.SELinux = selinux
	return &policy{Options: *o, planner: o.planner(boot, host, defaults)}, nil
}

// DefaultConfig is what an empty configuration file means.
func DefaultConfig() Config {
	return Config{
		NamespacesDir: "/run",
		MountsFiles:   []string{"/etc/containers/mounts.conf", "/usr/share/containers/mounts.conf"},
		ShmSize:       64 << 20,
		SELinux:       true,

		HostNetworkDisablesSELinux: true,

		UnprivilegedPorts: true,
		UnprivilegedPing:  true,

		AppArmorProfile: lsm.DefaultProfile,
		AllowedDevices:  []string{"/dev/fuse", "/dev/net/tun"},
		CDISpecDirs:     []string{"/etc/cdi", "/var/run/cdi"},
		DefaultCapabilities: []string{
			"CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "SETGID", "SETUID",
			"SETPCAP", "NET_BIND_SERVICE", "KILL",
		},
	}
}

// planner returns the planner of a node with these options.
func (o *Options) planner(boot string, host spec.Host, defaults spec.Defaults) *blueprint.Planner {
	return &blueprint.Planner{
		Boot: boot, Host: host, Defaults: defaults,
		NamespacesDir: o.NamespacesDir,
		CgroupDriver:  o.CgroupDriver, CgroupParent: o.CgroupParent, CgroupPrefix: o.CgroupPrefix,
		InfraCPUs:      o.InfraCPUs,
		AllowedDevices: o.AllowedDevices, AllowedUlimits: o.AllowedUlimits, Workloads: o.Workloads,
	}
}

func (o *Options) filesOf(id string, plan *records.PodPlan) files.Pod {
	return files.Of(filepath.Join(o.RunDir, "pods", id), plan)
}
