package network

import "time"

// Config says where CNI's configuration and plugins are.
type Config struct {
	ConfDir        string        `toml:"conf_dir" apply:"reload" form:"path" input:"yes" help:"directory of CNI network configurations; read again at each use"`
	PluginDirs     []string      `toml:"plugin_dirs" apply:"reload" form:"path" input:"yes" help:"directories searched for CNI plugins, in this order"`
	DefaultNetwork string        `toml:"default_network" apply:"reload" help:"name of the network to use; empty: the first configuration in alphabetical order"`
	Timeout        time.Duration `toml:"timeout" apply:"reload" form:"positive" help:"time limit of one CNI ADD, DEL or CHECK of a whole plugin chain"`
	ReadyGrace     time.Duration `toml:"ready_grace_period" apply:"reload" help:"how long NetworkReady stays true after the network stops being ready, so that a network add-on can restart or update; 0: not at all"`
	ConfTemplate   string        `toml:"conf_template" apply:"reload" input:"yes" help:"Go template rendered into conf_dir when the kubelet announces the pod CIDR; empty: none"`
	PrimaryIP      string        `toml:"primary_ip" apply:"reload" choices:"ipv4,ipv6,cni" help:"address family that comes first in a dual-stack pod: ipv4, ipv6, or cni for the order of the plugins"`
	HostPorts      string        `toml:"host_ports" apply:"reload" choices:"auto,crius,cni" help:"who forwards host ports to pods: crius (by its own nftables rules), cni (only the CNI plugins; also for networks that implement host ports themselves, such as Cilium), or auto (the plugin with the capability portMappings if the network has one, else crius)"`
}

// Options configure a Network.
type Options struct {
	Config
	// PodCIDRFile keeps the pod CIDR across restarts, because the kubelet
	// announces it only once. Empty: it is kept in memory only.
	PodCIDRFile string
}

// DefaultConfig returns what an empty configuration file means.
func DefaultConfig() Config {
	return Config{
		ConfDir:    "/etc/cni/net.d",
		PluginDirs: []string{"/opt/cni/bin", "/usr/lib/cni", "/usr/libexec/cni"},
		Timeout:    2 * time.Minute,
		ReadyGrace: 30 * time.Second,
		PrimaryIP:  "ipv4",
		HostPorts:  portsByAuto,
	}
}
