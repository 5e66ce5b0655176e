package integration

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
)

// An authority issues certificates for one test.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
}

func newAuthority(t *testing.T, name string) *authority {
	t.Helper()
	a := new(authority)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	a.key = newKey(t)
	der, err := x509.CreateCertificate(rand.Reader, template, template, a.key.Public(), a.key)
	if err != nil {
		t.Fatal(err)
	}
	if a.cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	a.pem = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	return a
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// issue makes a certificate for a server on 127.0.0.1, or for a client.
func (a *authority) issue(t *testing.T, serial int64) (cert, key []byte) {
	t.Helper()
	k := newKey(t)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: fmt.Sprint("certificate ", serial)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, k.Public(), a.key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalECPrivateKey(k)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: private})
}

// secure is a node whose streams are served with TLS; dir holds its files.
func secure(t *testing.T, dir string, a, clients *authority) *world {
	t.Helper()
	cert, key := a.issue(t, 100)
	put(t, filepath.Join(dir, "cert.pem"), string(cert))
	put(t, filepath.Join(dir, "key.pem"), string(key))
	config := fmt.Sprintf("[api]\nstream_tls_cert_file = %q\nstream_tls_key_file = %q\n", filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem"))
	if clients != nil {
		put(t, filepath.Join(dir, "clients.pem"), string(clients.pem))
		config += fmt.Sprintf("stream_tls_client_ca_file = %q\n", filepath.Join(dir, "clients.pem"))
	}
	return private(t, node.Options{Config: config})
}

func TestStreamsOverTLS(t *testing.T) {
	t.Parallel()
	a, clients, others := newAuthority(t, "servers"), newAuthority(t, "clients"), newAuthority(t, "others")
	dir := t.TempDir()
	w := secure(t, dir, a, clients)
	p := w.run(t, "crun")
	c := p.start(t, "tcp 127.0.0.1:7001 echo ; echo ready ; cat", stdin)
	c.says(t, "ready")
	as := func(s kubelet.Streams, issuer *authority) kubelet.Streams {
		s.TLS = rest.TLSClientConfig{CAData: a.pem}
		if issuer != nil {
			s.TLS.CertData, s.TLS.KeyData = issuer.issue(t, 7)
		}
		return s
	}
	if address := w.execURL(t, c.execRequest("echo")); !strings.HasPrefix(address, "https://127.0.0.1:") {
		t.Errorf("the URL is %s", address)
	}
	w.eachTransport(t, func(t *testing.T, s kubelet.Streams, _ string) {
		e := c.session(t, as(s, clients), "line ; noise 1000000 ; exit 5", withInput)
		typed(t, e, "secret\n")
		endsWith(t, e, 5)
		if _, out, _ := strings.Cut(e.Stdout.String(), "\n"); sum(out) != noiseSum(1_000_000) {
			t.Errorf("%d bytes of output, not the right ones", len(out))
		}
		attached := c.attach(t, as(s, clients), attachInput)
		typed(t, attached, "attached\n")
		shows(t, attached, "attached\n")

		for name, issuer := range map[string]*authority{"without a certificate": nil, "with another authority's certificate": others} {
			e := c.session(t, as(s, issuer), "write /tmp/intruder was-here")
			if err := e.Wait(wait.Limit); err == nil {
				t.Errorf("a client %s was served", name)
			}
			if r := c.execResult(t, "stat /tmp/intruder"); r.ExitCode == 0 {
				t.Fatalf("a client %s has run a command", name)
			}
		}
	})
	if _, _, err := as(w.spdy(), clients).Forward(t.Context(), p.forwardURL(t), 7001); err != nil {
		t.Errorf("port-forward: %v", err)
	}
	plain := strings.Replace(w.execURL(t, c.execRequest("write /tmp/intruder was-here")), "https:", "http:", 1)
	if err := w.spdy().Open(t.Context(), plain, kubelet.Wants{Stdout: true, Stderr: true}).Wait(wait.Limit); err == nil {
		t.Error("a client without TLS was served")
	}
}

// A replaced certificate is used from the next connection on; half of a pair or
// garbage leaves the old one in use.
func TestAReplacedCertificateIsServed(t *testing.T) {
	t.Parallel()
	a, dir := newAuthority(t, "servers"), t.TempDir()
	w := secure(t, dir, a, nil)
	p := w.run(t, "crun")
	c := p.start(t, "cat", stdin)
	s := w.spdy()
	s.TLS = rest.TLSClientConfig{CAData: a.pem}
	open := c.attach(t, s, attachInput)
	typed(t, open, "over the old\n")
	shows(t, open, "over the old\n")

	equal(t, "serial number", w.serial(t, p.forwardURL(t), a), 100)
	replace := func(name string, data []byte) {
		t.Helper()
		put(t, filepath.Join(dir, "new"), string(data))
		if err := os.Rename(filepath.Join(dir, "new"), filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	cert, key := a.issue(t, 200)
	replace("cert.pem", cert)
	equal(t, "serial number with a key that does not fit", w.serial(t, p.forwardURL(t), a), 100)
	replace("key.pem", key)
	wait.For(t, "the new certificate", func() bool { return w.serial(t, p.forwardURL(t), a) == 200 })
	replace("cert.pem", []byte("rubbish"))
	equal(t, "serial number with rubbish in the file", w.serial(t, p.forwardURL(t), a), 200)
	typed(t, open, "still here\n")
	shows(t, open, "still here\n")
	endsWith(t, c.session(t, s, "exit 4"), 4)
}

// serial returns the serial number of the certificate shown to a new
// connection.
func (w *world) serial(t *testing.T, address string, a *authority) (serial int64) {
	t.Helper()
	u, err := url.Parse(address)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(a.cert)
	err = w.Do(func() error {
		conn, err := tls.Dial("tcp", u.Host, &tls.Config{RootCAs: pool})
		if err != nil {
			return err
		}
		defer conn.Close()
		serial = conn.ConnectionState().PeerCertificates[0].SerialNumber.Int64()
		return nil
	})
	if err != nil {
		t.Errorf("TLS with the server: %v", err)
	}
	return serial
}
