// Package tlsfile serves TLS by files that may be replaced at any time: each new
// connection looks whether they were. What cannot be read keeps the last good
// ones in force.
package tlsfile

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

// Files are paths of PEM files.
type Files struct {
	Cert, Key string
	ClientCA  string // authorities whose certificate a client must have; empty: none is asked for
}

type certificates struct {
	Files
	subject string

	mu     sync.Mutex
	stamps [3]stamp
	config *tls.Config
}

// stamp tells two states of a file apart.
type stamp struct {
	modified time.Time
	size     int64
}

// Config is nil if there are no files. The subject, such as streaming, is for the
// log and for errors.
func Config(subject string, f Files) (*tls.Config, error) {
	c := &certificates{Files: f, subject: subject}
	switch {
	case f == (Files{}):
		return nil, nil
	case f.Cert == "" || f.Key == "":
		return nil, fmt.Errorf("%s over TLS needs a certificate and a key: give both files: %w", subject, fault.Invalid)
	}
	c.stamps = c.look() // before: what comes meanwhile is new
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
	c.stamps = now // a broken file is complained about once
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
	config := &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}}
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
