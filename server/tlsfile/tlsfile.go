// Package tlsfile serves TLS from files that may be replaced at any time: each
// new connection checks for changes. If the new files cannot be read the last
// good ones stay in force.
package tlsfile

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/crius-run/crius/internal/fault"
)

// Files are paths of PEM files.
type Files struct {
	Cert, Key string
	ClientCA  string // authorities for required client certificates; empty: no certificate is required
}

// Rules constrain connections. The zero value is TLS 1.2 with what Go considers
// safe.
type Rules struct {
	MinVersion   string   // Version12, Version13 or empty
	CipherSuites []string // of TLS 1.2, by their IANA names; empty: those that Go considers safe
}

// Versions that can be required.
const (
	Version12 = "1.2"
	Version13 = "1.3"
)

// Check refuses cipher suites that are unknown to Go or that it considers
// unsafe.
func (r Rules) Check() error {
	_, err := r.config()
	return err
}

func (r Rules) config() (*tls.Config, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	switch r.MinVersion {
	case "", Version12:
	case Version13:
		config.MinVersion = tls.VersionTLS13
	default:
		return nil, fmt.Errorf("TLS version %q: must be %s or %s: %w", r.MinVersion, Version12, Version13, fault.Invalid)
	}
	var known []string
	for _, suite := range tls.CipherSuites() {
		known = append(known, suite.Name)
		if slices.Contains(r.CipherSuites, suite.Name) {
			config.CipherSuites = append(config.CipherSuites, suite.ID)
		}
	}
	for _, name := range r.CipherSuites {
		if !slices.Contains(known, name) {
			return nil, fmt.Errorf("cipher suite %q: must be one of %s: %w", name, strings.Join(known, ", "), fault.Invalid)
		}
	}
	return config, nil
}

type certificates struct {
	Files
	rules   Rules
	subject string

	mu     sync.Mutex
	stamps [3]stamp
	config *tls.Config
}

// stamp distinguishes two states of a file.
type stamp struct {
	modified time.Time
	size     int64
}

// Config returns nil if there are no files. subject, such as "streaming", is
// for the log and for errors.
func Config(subject string, f Files, r Rules) (*tls.Config, error) {
	c := &certificates{Files: f, rules: r, subject: subject}
	switch {
	case f == (Files{}):
		return nil, nil
	case f.Cert == "" || f.Key == "":
		return nil, fmt.Errorf("%s over TLS needs a certificate and a key: give both files: %w", subject, fault.Invalid)
	}
	c.stamps = c.look() // first, so that a later change counts as new
	var err error
	if c.config, err = c.load(); err != nil {
		return nil, fmt.Errorf("%s over TLS: %w", subject, err)
	}
	return &tls.Config{
		MinVersion:         tls.VersionTLS12,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return c.current(), nil },
	}, nil
}

func (c *certificates) look() (stamps [3]stamp) {
	for i, path := range []string{c.Cert, c.Key, c.ClientCA} {
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
	c.stamps = now // a broken file is reported once
	if err != nil {
		slog.Error("cannot load new certificates, still using the old ones", "name", c.subject, "err", err)
		return c.config
	}
	slog.Info("new certificates loaded", "name", c.subject, "file", c.Cert)
	c.config = config
	return config
}

func (c *certificates) load() (*tls.Config, error) {
	pair, err := tls.LoadX509KeyPair(c.Cert, c.Key)
	if err != nil {
		return nil, fmt.Errorf("%s, %s: %w", c.Cert, c.Key, err)
	}
	config, err := c.rules.config()
	if err != nil {
		return nil, err
	}
	config.Certificates = []tls.Certificate{pair}
	if c.ClientCA == "" {
		return config, nil
	}
	text, err := os.ReadFile(c.ClientCA)
	if err != nil {
		return nil, err
	}
	config.ClientCAs, config.ClientAuth = x509.NewCertPool(), tls.RequireAndVerifyClientCert
	if !config.ClientCAs.AppendCertsFromPEM(text) {
		return nil, errors.New(c.ClientCA + " has no PEM certificate")
	}
	return config, nil
}
