package tlsfile

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/crius-run/crius/internal/fault"
)

// selfSigned makes a certificate and its key.
func selfSigned(t *testing.T) Files {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	f := Files{Cert: filepath.Join(t.TempDir(), "cert"), Key: filepath.Join(t.TempDir(), "key")}
	err = errors.Join(
		os.WriteFile(f.Cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert}), 0o600),
		os.WriteFile(f.Key, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: private}), 0o600))
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// Connections follow the rules, and those that cannot are refused.
func TestRules(t *testing.T) {
	t.Parallel()
	f := selfSigned(t)
	const aes256 = "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384"
	for what, c := range map[string]struct {
		rules   Rules
		client  *tls.Config
		connect bool
	}{
		"plain, 1.3":          {Rules{}, &tls.Config{}, true},
		"plain, 1.2":          {Rules{}, &tls.Config{MaxVersion: tls.VersionTLS12}, true},
		"plain, 1.1":          {Rules{}, &tls.Config{MinVersion: tls.VersionTLS11, MaxVersion: tls.VersionTLS11}, false},
		"1.3 wanted":          {Rules{MinVersion: Version13}, &tls.Config{}, true},
		"1.3 wanted, 1.2":     {Rules{MinVersion: Version13}, &tls.Config{MaxVersion: tls.VersionTLS12}, false},
		"the suite":           {Rules{CipherSuites: []string{aes256}}, &tls.Config{MaxVersion: tls.VersionTLS12}, true},
		"another suite":       {Rules{CipherSuites: []string{aes256}}, &tls.Config{MaxVersion: tls.VersionTLS12, CipherSuites: []uint16{tls.TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256}}, false},
		"a suite and TLS 1.3": {Rules{CipherSuites: []string{aes256}}, &tls.Config{MinVersion: tls.VersionTLS13}, true},
	} {
		config, err := Config("the test", f, c.rules)
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		here, there := net.Pipe()
		served := make(chan error, 1)
		go func() {
			served <- tls.Server(here, config).HandshakeContext(t.Context())
			here.Close()
		}()
		c.client.InsecureSkipVerify = true
		err = errors.Join(tls.Client(there, c.client).HandshakeContext(t.Context()), <-served)
		there.Close()
		if (err == nil) != c.connect {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestInvalidTLSRulesAreRefused(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		rules Rules
		word  string
	}{
		{Rules{MinVersion: "1.1"}, "1.1"},
		{Rules{CipherSuites: []string{"TLS_RSA_WITH_RC4_128_SHA"}}, "TLS_RSA_WITH_RC4_128_SHA"}, // known to Go, and known to be unsafe
		{Rules{CipherSuites: []string{"fast"}}, `"fast"`},
	} {
		if err := c.rules.Check(); !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), c.word) {
			t.Errorf("%+v: %v", c.rules, err)
		}
	}
}
