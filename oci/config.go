package oci

import (
	"time"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/oci/annotation"
)

// Config is the table of RuntimeClass handlers and what they share.
type Config struct {
	DefaultHandler string        `toml:"default_handler" apply:"reload" help:"handler of pods without a RuntimeClass"`
	CgroupDriver   string        `toml:"cgroup_driver" apply:"restart: the cgroups of running pods are found by it" choices:"systemd,cgroupfs" help:"cgroup driver: cgroupfs or systemd; must match the kubelet's"`
	Monitor        string        `toml:"monitor" apply:"restart: it is found at the start, and belongs to the version of the server" form:"path or empty" help:"path of crius-conmon; empty: searched in the directory of crius, then in PATH"`
	MonitorCgroup  string        `toml:"monitor_cgroup" apply:"reload" help:"cgroup of the monitors; empty: a child of the crius service's cgroup"`
	Criu           string        `toml:"criu" apply:"reload" form:"criu or empty" help:"the program criu, which dumps containers for checkpoints: a path that ends in /criu, or the name criu, which is searched in PATH; if it is missing or does not work on this kernel, checkpoints are refused; empty: they are always refused"`
	Restore        bool          `toml:"restore" apply:"reload" help:"let RestorePod run pods from checkpoints: a restored process has the memory that the checkpoint says, so only those are accepted that this node or a key of restore_keys has signed"`
	RestoreKeys    []string      `toml:"restore_keys" apply:"reload" form:"path" help:"files with public keys (PEM, ed25519) of other nodes whose checkpoints RestorePod accepts: a node's is checkpoint.pub below root, made with its first checkpoint of a pod"`
	LogRate        int64         `toml:"container_log_rate" apply:"reload" help:"bytes per second by which the log of each container may grow, each line counted with its time and stream; beyond container_log_burst, lines are discarded and the log says how many bytes are missing; the container is not slowed down; for containers created from now on; 0: no limit"`
	LogBurst       int64         `toml:"container_log_burst" apply:"reload" help:"bytes by which a container's log may exceed container_log_rate at once; at least 64 KiB"`
	LogMaxSize     int64         `toml:"container_log_max_size" apply:"reload" help:"bytes that the log file of a container may have until the kubelet rotates it, as containerLogMaxSize in its configuration says; beyond that, lines are discarded in the same way; at least 64 KiB, and by as much more than containerLogMaxSize; for containers created from now on; 0: no limit"`
	LogJournal     string        `toml:"container_log_journal" apply:"reload" form:"path or empty" help:"socket of journald, /run/systemd/journal/socket or that of a journal namespace (/run/systemd/journal.NAME/socket), to which the output of containers is written beside their logs, without the limits of the logs; what journald does not accept in time is lost to the journal, which says how many bytes are missing; for containers created from now on; empty: none"`
	AttachWait     time.Duration `toml:"container_attach_wait" apply:"reload" help:"how long a container waits in its writes for an attached client that does not read its output; a client that reads, however slowly, gets all of it, and the container writes no faster than the slowest client reads; one that reads nothing for this time is disconnected, and the log is complete in any case; for containers created from now on; 0: containers never wait, and a client that is more than 4 MiB behind is disconnected"`
	BackportedCVEs []string      `toml:"backported_cves" apply:"reload" form:"CVE" help:"CVEs that the distribution has fixed in the runtimes of this node without a new version number, so that crius does not report them"`
	HooksDir       []string      `toml:"hooks_dir" apply:"reload" form:"path" input:"yes" help:"directories of OCI hooks (*.json, oci-hooks(5)), read for every container; a file in a later directory replaces one of the same name in an earlier one; a file that is invalid, or writable by users other than root, keeps containers from being created; empty: no hooks"`
	BlockIOFile    string        `toml:"blockio_config_file" apply:"reload" form:"path or empty" help:"YAML file of block I/O classes (github.com/intel/goresctrl), which annotations of pods name; it is read for every container in one; empty: there are none"`
	RDTFile        string        `toml:"rdt_config_file" apply:"restart: the classes are made at the start" form:"path or empty" help:"YAML file of Intel RDT classes (github.com/intel/goresctrl), which annotations of pods name; at the start of the server other classes are removed from the resctrl file system; empty: there are none"`
	// CRIOHandlersDir is read by the package that reads the configuration.
	CRIOHandlersDir string             `toml:"crio_handlers_dir" apply:"reload" form:"path or empty" input:"yes" help:"directory of CRI-O's drop-ins, such as /etc/crio/crio.conf.d, in which installers such as nvidia-ctk and kata-deploy configure runtimes and the default runtime; read before this configuration, which overrides it; ignored as a whole if it is invalid; other keys in it have no effect; empty: none"`
	Handlers        map[string]Handler `toml:"handlers" help:"RuntimeClass handlers by name"`

	Workloads map[string]annotation.Workload `toml:"workloads" help:"Classes of pods whose containers get their CPUs from here and not from the kubelet, by name. Their keys are CRI-O's."`
}

// Handler is one RuntimeClass handler.
type Handler struct {
	Type          string        `toml:"type" json:"Type" apply:"reload" choices:"oci,shim" help:"interface of the runtime: oci (command line) or shim (containerd shim v2 over ttrpc: Kata 2 and 3, containerd-shim-runc-v2)"`
	Path          string        `toml:"path" json:"Path" apply:"reload" form:"program" help:"runtime binary; a bare name is searched in PATH; if it is missing, the node does not offer the handler"`
	Root          string        `toml:"root" json:"Root" apply:"reload" form:"path or empty" help:"the runtime's own state directory; empty: <run_root>/runtime/<handler name>"`
	Options       []string      `toml:"options" json:"Options,omitempty" apply:"reload" form:"flag" help:"additional global flags of the runtime's command line, such as --platform=kvm for gVisor or --kata-config=FILE for Kata 1; for a shim, options of the runtime, such as --ConfigPath=FILE for Kata or --BinaryName=PATH for runc's"`
	CreateTimeout time.Duration `toml:"create_timeout" json:"CreateTimeout,omitempty" apply:"reload" form:"positive" help:"time limit for creating a container"`

	PrivilegedWithoutHostDevices bool     `toml:"privileged_without_host_devices" json:"PrivilegedWithoutHostDevices,omitempty" apply:"reload" help:"do not add the host's devices to privileged containers"`
	AllDevicesAllowed            bool     `toml:"privileged_without_host_devices_all_devices_allowed" json:"AllDevicesAllowed,omitempty" apply:"reload" help:"with privileged_without_host_devices: let privileged containers make and use nodes of any device nevertheless"`
	CgroupWritable               bool     `toml:"cgroup_writable" json:"CgroupWritable,omitempty" apply:"reload" help:"mount /sys/fs/cgroup writable in all containers, for systemd or nested runtimes in them; needs cgroup v2"`
	BaseRuntimeSpec              string   `toml:"base_runtime_spec" json:"BaseRuntimeSpec,omitempty" apply:"reload" form:"path or empty" input:"yes" help:"JSON file with an OCI runtime spec from which containers get the environment variables, rlimits, mounts, hooks, cgroup v2 files, scheduler, I/O priority and RDT class that neither the request nor this configuration sets; its other parts have no effect; it is read for every container; empty: none"`
	DefaultAnnotations           []string `toml:"default_annotations" json:"DefaultAnnotations,omitempty" apply:"reload" form:"annotation" help:"annotations (key=value) passed to the runtime for every container; an allowed annotation of the pod or the container overrides one with the same key"`
	AllowedAnnotations           []string `toml:"allowed_annotations" json:"AllowedAnnotations,omitempty" apply:"reload" form:"annotation pattern" help:"annotations of the pod that are passed to the runtime, by key or by a pattern such as io.katacontainers.*, in which * does not match a slash; CRI-O's annotations on which crius itself acts, such as shm-size.crio.io, are allowed by key only"`
	AllowedContainerAnnotations  []string `toml:"allowed_container_annotations" json:"AllowedContainerAnnotations,omitempty" apply:"reload" form:"annotation pattern" help:"annotations of the container that are passed to the runtime, by key or by pattern as in allowed_annotations; they override the pod's"`
	SeccompProfile               string   `toml:"seccomp_profile" json:"SeccompProfile,omitempty" apply:"reload" form:"path or empty" input:"yes" help:"JSON file that replaces the RuntimeDefault seccomp profile for this handler; empty: pod.seccomp_profile"`
	MinMemory                    int64    `toml:"min_memory" json:"MinMemory,omitempty" apply:"reload" help:"lowest memory limit in bytes accepted for a container, since the runtime needs memory in the container's cgroup; 0: no minimum"`
	ExecCPUAffinity              string   `toml:"exec_cpu_affinity" json:"ExecCPUAffinity,omitempty" apply:"reload" form:"first or empty" help:"CPUs of exec processes in containers with CPUs of their own (whole CPUs of Guaranteed pods): first is the first of them, so that probes and shells do not disturb the others; needs runc 1.3 or crun 1.19; empty: all"`
	MonitorCgroup                string   `toml:"monitor_cgroup" json:"MonitorCgroup,omitempty" apply:"reload" form:"path or empty" help:"cgroup of the monitors of this handler's containers; empty: runtime.monitor_cgroup"`
	CNIConfDir                   string   `toml:"cni_conf_dir" json:"CNIConfDir,omitempty" apply:"reload" form:"path or empty" input:"yes" help:"directory of the CNI network configurations for this handler's pods; empty: network.conf_dir"`
	Features                     string   `toml:"features" json:"Features,omitempty" apply:"reload" form:"path or empty" input:"yes" help:"JSON file used instead of the output of the runtime's features command, for runtimes without that command; empty: the command is run"`
}

// FirstCPU is the value of Handler.ExecCPUAffinity other than "".
const FirstCPU = "first"

// DefaultHandlerConfig returns what a handler table without keys means.
func DefaultHandlerConfig(name string) Handler {
	return Handler{Type: "oci", Path: name, CreateTimeout: 4 * time.Minute}
}

// DefaultConfig returns what an empty configuration file means.
func DefaultConfig() Config {
	return Config{
		DefaultHandler: "runc",
		CgroupDriver:   "systemd",
		Criu:           "criu",
		LogBurst:       16 << 20,
		AttachWait:     conmon.UsualAttachWait,
		HooksDir:       []string{"/usr/share/containers/oci/hooks.d", "/etc/containers/oci/hooks.d"},
		Handlers: map[string]Handler{
			"runc": DefaultHandlerConfig("runc"),
			"crun": DefaultHandlerConfig("crun"),
		},
		Workloads: map[string]annotation.Workload{},
	}
}
