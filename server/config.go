package server

import "os"

// Config is the CRI endpoint.
type Config struct {
	Listen         string      `toml:"listen" help:"unix socket on which CRI is served"`
	SocketMode     os.FileMode `toml:"socket_mode" help:"permission bits of the socket"`
	MaxMessageSize int         `toml:"max_message_size" help:"largest gRPC message accepted or sent, in bytes"`
}

// DefaultConfig is what an empty configuration file means.
func DefaultConfig() Config {
	return Config{
		Listen:         "/run/crius/crius.sock",
		SocketMode:     0o660,
		MaxMessageSize: 16 << 20,
	}
}
