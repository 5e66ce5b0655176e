package server

import (
	"os"
	"time"

	"github.com/crius-run/crius/server/stream"
	"github.com/crius-run/crius/server/tlsfile"
	"github.com/crius-run/crius/server/trail"
)

// Config configures the CRI endpoint.
type Config struct {
	Listen         string      `toml:"listen" apply:"restart: the socket is made at the start" form:"path" help:"unix socket on which CRI is served"`
	SocketMode     os.FileMode `toml:"socket_mode" apply:"restart: the socket is made at the start" help:"permission bits of the socket"`
	SocketGroup    string      `toml:"socket_group" apply:"restart: the socket is made at the start" help:"group of the socket, by name or number; its members can connect if socket_mode lets the group write, and anyone who can connect effectively has root access to the node; empty: root's group"`
	MaxMessageSize int         `toml:"max_message_size" apply:"restart: the connections of clients are made with it" form:"positive" help:"largest gRPC message accepted or sent, in bytes"`
	CrioSocket     string      `toml:"crio_socket" apply:"restart: the socket is made at the start" form:"path or empty" help:"second socket, normally /run/crio/crio.sock, with the part of CRI-O's API that the kubelet's cAdvisor queries, so that container metrics have pod names without the feature gate PodAndContainerStatsFromCRI; cgroups are then named crio-ID instead of crius-ID; empty: none"`

	RuntimeName    string `toml:"runtime_name" apply:"restart: clients learn it once, when they connect" choices:"crius,cri-o,containerd" help:"name that crius reports as its own: crius, cri-o or containerd, and so the beginning of containerRuntimeVersion in the node's status and of the ids of containers there, for installers and agents that know runtimes by it; restart the kubelet after a change"`
	RuntimeVersion string `toml:"runtime_version" apply:"restart: clients learn it once, when they connect" form:"version or empty" help:"version that crius reports with this name; empty: its own or, with another name, one of that runtime with +crius and its own"`

	Audit     string `toml:"audit" apply:"reload" choices:"none,people,all" help:"what the audit trail records of exec, attach, port-forward and log reopening: none, people, or all, which adds probes, hooks and log rotation of the kubelet; to the journal with fields such as CRIUS_AUDIT, or to the log"`
	AuditFile string `toml:"audit_file" apply:"reload" form:"path or empty" help:"file, or unix socket of a collector, that gets the records of the audit trail as lines of JSON as well; opened again once it is rotated; empty: none"`

	StreamAddress         string        `toml:"stream_address" apply:"restart: the listener is opened at the start" help:"HOST:PORT on which exec, attach and port-forward sessions are served; port 0: any free port"`
	StreamIdleTimeout     time.Duration `toml:"stream_idle_timeout" apply:"reload" help:"how long an exec, attach or port-forward session may be idle; 0: no limit"`
	StreamMaxSessions     int           `toml:"stream_max_sessions" apply:"reload" help:"maximum number of concurrent exec, attach and port-forward sessions on the node; 0: no limit"`
	StreamMaxSessionsEach int           `toml:"stream_max_sessions_per_container" apply:"reload" help:"maximum number of concurrent exec and attach sessions of one container, and of port-forward sessions of one pod; 0: no limit"`
	StreamTLSCertFile     string        `toml:"stream_tls_cert_file" apply:"restart: the listener is opened at the start; new content of the file takes effect at once" input:"yes" help:"PEM certificate for sessions over TLS; reloaded when the file changes"`
	StreamTLSKeyFile      string        `toml:"stream_tls_key_file" apply:"restart: the listener is opened at the start; new content of the file takes effect at once" input:"yes" help:"PEM key of that certificate"`
	StreamTLSClientCAFile string        `toml:"stream_tls_client_ca_file" apply:"restart: the listener is opened at the start; new content of the file takes effect at once" input:"yes" help:"PEM file of CA certificates that client certificates must be signed by; empty: clients need no certificate"`

	TLSMinVersion   string   `toml:"tls_min_version" apply:"restart: the listeners are opened at the start" choices:"1.2,1.3" help:"lowest TLS version of sessions and metrics: 1.2 or 1.3"`
	TLSCipherSuites []string `toml:"tls_cipher_suites" apply:"restart: the listeners are opened at the start" help:"cipher suites of TLS 1.2 for sessions and metrics, by their IANA names; empty: those that Go considers safe; those of TLS 1.3 cannot be chosen"`
}

// DefaultConfig returns what an empty configuration file means.
func DefaultConfig() Config {
	return Config{
		Listen:         "/run/crius/crius.sock",
		SocketMode:     0o660,
		MaxMessageSize: 16 << 20,

		RuntimeName: NameCrius,

		Audit: trail.People,

		StreamAddress:     "127.0.0.1:0",
		StreamIdleTimeout: 4 * time.Hour,

		StreamMaxSessions:     512,
		StreamMaxSessionsEach: 128,

		TLSMinVersion: tlsfile.Version12,
	}
}

// Stream returns the part that configures sessions.
func (c Config) Stream() stream.Config {
	return stream.Config{
		Address:     c.StreamAddress,
		IdleTimeout: c.StreamIdleTimeout,

		MaxSessions:             c.StreamMaxSessions,
		MaxSessionsPerContainer: c.StreamMaxSessionsEach,

		TLSCertFile:     c.StreamTLSCertFile,
		TLSKeyFile:      c.StreamTLSKeyFile,
		TLSClientCAFile: c.StreamTLSClientCAFile,
		TLS:             c.TLS(),
	}
}

// TLS returns the rules for everything served over TLS.
func (c Config) TLS() tlsfile.Rules {
	return tlsfile.Rules{MinVersion: c.TLSMinVersion, CipherSuites: c.TLSCipherSuites}
}
