package server

import (
	"os"
	"time"

	"github.com/crius-run/crius/server/stream"
)

// Config is the CRI endpoint.
type Config struct {
	// PodMetrics are the kinds of metrics that pods have, of PodMetricKinds or
	// AllPodMetrics. They come from the section of metrics.
	PodMetrics []string `toml:"-"`

	Listen         string      `toml:"listen" help:"unix socket on which CRI is served"`
	SocketMode     os.FileMode `toml:"socket_mode" help:"permission bits of the socket"`
	SocketGroup    string      `toml:"socket_group" help:"group of the socket, by name or number, whose members may connect where socket_mode lets the group write; whoever may connect is root on the node; empty: root's group"`
	MaxMessageSize int         `toml:"max_message_size" help:"largest gRPC message accepted or sent, in bytes"`
	CrioSocket     string      `toml:"crio_socket" help:"second socket, /run/crio/crio.sock, at which a kubelet without the feature gate PodAndContainerStatsFromCRI finds crius as it finds CRI-O, so that its metrics of containers have names of pods; cgroups are named crio-ID then instead of crius-ID; empty: none"`

	StreamAddress         string        `toml:"stream_address" help:"HOST:PORT at which exec, attach and port-forward are served to the kubelet; port 0 is any free one"`
	StreamIdleTimeout     time.Duration `toml:"stream_idle_timeout" help:"how long such a session may be silent"`
	StreamMaxSessions     int           `toml:"stream_max_sessions" help:"exec, attach and port-forward sessions that the node may have at once; 0: any number"`
	StreamMaxSessionsEach int           `toml:"stream_max_sessions_per_container" help:"exec and attach sessions that one container may have at once, and port-forward sessions that one pod may have; 0: any number"`
	StreamTLSCertFile     string        `toml:"stream_tls_cert_file" help:"certificate for sessions over TLS, in PEM; noticed when it is replaced"`
	StreamTLSKeyFile      string        `toml:"stream_tls_key_file" help:"key of that certificate"`
	StreamTLSClientCAFile string        `toml:"stream_tls_client_ca_file" help:"authorities whose certificate a client must have, in PEM; empty: none is asked for"`
}

// DefaultConfig is what an empty configuration file means.
func DefaultConfig() Config {
	return Config{
		Listen:         "/run/crius/crius.sock",
		SocketMode:     0o660,
		MaxMessageSize: 16 << 20,
		PodMetrics:     DefaultPodMetricKinds(),

		StreamAddress:     "127.0.0.1:0",
		StreamIdleTimeout: 4 * time.Hour,

		StreamMaxSessions:     512,
		StreamMaxSessionsEach: 128,
	}
}

// Stream is the part that is about sessions.
func (c Config) Stream() stream.Config {
	return stream.Config{
		Address:     c.StreamAddress,
		IdleTimeout: c.StreamIdleTimeout,

		MaxSessions:             c.StreamMaxSessions,
		MaxSessionsPerContainer: c.StreamMaxSessionsEach,

		TLSCertFile:     c.StreamTLSCertFile,
		TLSKeyFile:      c.StreamTLSKeyFile,
		TLSClientCAFile: c.StreamTLSClientCAFile,
	}
}
