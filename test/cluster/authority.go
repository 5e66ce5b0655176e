package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// authority signs the certificates by which the programs of a cluster
// authenticate each other. It keeps them in a directory.
type authority struct {
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// newAuthority makes an authority; its own certificate is ca.crt.
func newAuthority(dir string) (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	a := &authority{dir: dir, key: key, cert: template(pkix.Name{CommonName: "cluster"})}
	a.cert.IsCA = true
	a.cert.KeyUsage |= x509.KeyUsageCertSign
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	return a, a.sign("ca", a.cert, key)
}

func template(subject pkix.Name) *x509.Certificate {
	return &x509.Certificate{
		Subject:               subject,
		SerialNumber:          big.NewInt(time.Now().UnixNano()),
		NotBefore:             time.Now().Add(-time.Hour),
		NotAfter:              time.Now().Add(30 * 24 * time.Hour),
		KeyUsage:              x509.KeyUsageDigitalSignature,
		BasicConstraintsValid: true,
	}
}

// file returns the path of a certificate (NAME.crt) or a key (NAME.key).
func (a *authority) file(name string) string { return filepath.Join(a.dir, name) }

// client makes NAME.crt and NAME.key for a user in a group, "" for none.
func (a *authority) client(name, user, group string) error {
	cert := template(pkix.Name{CommonName: user})
	if group != "" {
		cert.Subject.Organization = []string{group}
	}
	cert.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	return a.issue(name, cert)
}

// server makes NAME.crt and NAME.key for a server at some addresses.
func (a *authority) server(name string, addresses, names []string) error {
	cert := template(pkix.Name{CommonName: name})
	cert.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	cert.DNSNames = names
	for _, address := range addresses {
		cert.IPAddresses = append(cert.IPAddresses, net.ParseIP(address))
	}
	return a.issue(name, cert)
}

func (a *authority) issue(name string, cert *x509.Certificate) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	return a.sign(name, cert, key)
}

// sign signs a certificate for a key and writes both.
func (a *authority) sign(name string, cert *x509.Certificate, key *ecdsa.PrivateKey) error {
	der, err := x509.CreateCertificate(rand.Reader, cert, a.cert, key.Public(), a.key)
	if err != nil {
		return err
	}
	private, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return err
	}
	certPEM := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	if err := os.WriteFile(a.file(name+".crt"), certPEM, 0o644); err != nil {
		return err
	}
	keyPEM := pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: private})
	return os.WriteFile(a.file(name+".key"), keyPEM, 0o600)
}

// kubeconfig writes NAME.kubeconfig, with which the client NAME finds an API
// server. It is JSON, which is also YAML.
func (a *authority) kubeconfig(name, server string) error {
	text, err := json.MarshalIndent(map[string]any{
		"apiVersion": "v1",
		"kind":       "Config",
		"clusters": []any{map[string]any{"name": "cluster", "cluster": map[string]any{
			"server": server, "certificate-authority": a.file("ca.crt")}}},
		"users": []any{map[string]any{"name": name, "user": map[string]any{
			"client-certificate": a.file(name + ".crt"), "client-key": a.file(name + ".key")}}},
		"contexts":        []any{map[string]any{"name": "cluster", "context": map[string]any{"cluster": "cluster", "user": name}}},
		"current-context": "cluster",
	}, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(a.file(name+".kubeconfig"), text, 0o600)
}
