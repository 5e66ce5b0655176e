package stream

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/crius-run/crius/internal/fault"
)

// certificates serves TLS by files that may be replaced at any time: each new
// connection looks whether they were. What cannot be read keeps the last good
// ones in force.
type certificates struct {
	cert, key, clientCA string

	mu     sync.Mutex
	stamps [3]stamp
	config *tls.Config
}

// stamp tells two states of a file apart.
type stamp struct {
	modified time.Time
	size     int64
}

// tlsConfig is nil if cfg asks for none.
func tlsConfig(cfg Config) (*tls.Config, error) {
	c := &certificates{cert: cfg.TLSCertFile, key: cfg.TLSKeyFile, clientCA: cfg.TLSClientCAFile}
	switch {
	case c.cert == "" && c.key == "" && c.clientCA == "":
		return nil, nil
	case c.cert == "" || c.key == "":
		return nil, fmt.Errorf("stream_tls_cert_file and stream_tls_key_file: give both: %w", fault.Invalid)
	}
	c.stamps = c.look() // before: what comes meanwhile is new
	var err error
	if c.config, err = c.load(); err != nil {
		return nil, fmt.Errorf("streaming over TLS: %w", err)
	}
	return &tls.Config{
		MinVersion:         tls.VersionTLS12,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return c.current(), nil },
	}, nil
}

func (c *certificates) look() (stamps [3]stamp) {
	for i, path := range []string{c.cert, c.key, c.clientCA} {
		if info, err := os.Stat(path); err == nil {
			stamps[i] = stamp{info.ModTime(), info.Size()}
		}
	}
	return stamps
}

func (c *certificates) current() *tls.Config {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.look()
	if now == c.stamps {
		return c.config
	}
	config, err := c.load()
	c.stamps = now // a broken file is complained about once
	if err != nil {
		slog.Error("new certificates for streaming cannot be used, the old ones stay", "err", err)
		return c.config
	}
	slog.Info("new certificates for streaming", "file", c.cert)
	c.config = config
	return config
}

func (c *certificates) load() (*tls.Config, error) {
	pair, err := tls.LoadX509KeyPair(c.cert, c.key)
	if err != nil {
		return nil, fmt.Errorf("%s, %s: %w", c.cert, c.key, err)
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}}
	if c.clientCA == "" {
		return config, nil
	}
	text, err := os.ReadFile(c.clientCA)
	if err != nil {
		return nil, err
	}
	config.ClientCAs, config.ClientAuth = x509.NewCertPool(), tls.RequireAndVerifyClientCert
	if !config.ClientCAs.AppendCertsFromPEM(text) {
		return nil, errors.New(c.clientCA + " has no certificate in PEM")
	}
	return config, nil
}
