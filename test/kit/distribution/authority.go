package distribution

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"testing"
	"time"
)

// Authority signs certificates and tokens.
type Authority struct {
	File string // its certificate

	t           testing.TB
	key         *ecdsa.PrivateKey
	certificate *x509.Certificate
}

// NewAuthority returns an authority that only a test trusts.
func NewAuthority(t testing.TB) *Authority {
	t.Helper()
	a := &Authority{t: t, File: filepath.Join(t.TempDir(), "ca.crt")}
	template := &x509.Certificate{IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature}
	a.key, a.certificate = a.sign(template)
	write(t, a.File, encoded("CERTIFICATE", a.certificate.Raw))
	return a
}

// sign signs a certificate; the first one by itself.
func (a *Authority) sign(template *x509.Certificate) (*ecdsa.PrivateKey, *x509.Certificate) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	template.SerialNumber, template.Subject = big.NewInt(time.Now().UnixNano()), pkix.Name{CommonName: "test"}
	template.NotBefore, template.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(24*time.Hour)
	parent, signer := a.certificate, a.key
	if parent == nil {
		parent, signer = template, key
	}
	raw, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, signer)
	if err != nil {
		a.t.Fatal(err)
	}
	certificate, err := x509.ParseCertificate(raw)
	if err != nil {
		a.t.Fatal(err)
	}
	return key, certificate
}

// Issue writes a certificate for 127.0.0.1, which servers and clients may use, and its key.
func (a *Authority) Issue() (certificate, key string) {
	a.t.Helper()
	private, signed := a.sign(&x509.Certificate{
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	})
	der, err := x509.MarshalECPrivateKey(private)
	if err != nil {
		a.t.Fatal(err)
	}
	dir := a.t.TempDir()
	certificate, key = filepath.Join(dir, "tls.cert"), filepath.Join(dir, "tls.key")
	write(a.t, certificate, encoded("CERTIFICATE", signed.Raw))
	write(a.t, key, encoded("EC PRIVATE KEY", der))
	return certificate, key
}

func encoded(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}

// MutualTLS sets the sections of a registry that speaks TLS, and to clients with a certificate of the
// authority alone.
func (a *Authority) MutualTLS(config Section) {
	certificate, key := a.Issue()
	config["http"].(Section)["tls"] = Section{"certificate": certificate, "key": key, "clientcas": []string{a.File}}
}

// What the tokens of [Authority.Token] say.
const issuer, service = "the test", "the registry"

// Token returns a token that admits to the contents of a repository until a time.
func (a *Authority) Token(repo string, until time.Time) string {
	a.t.Helper()
	header := section(a.t, Section{"typ": "JWT", "alg": "ES256", "x5c": []string{base64.StdEncoding.EncodeToString(a.certificate.Raw)}})
	content := header + "." + section(a.t, Section{
		"iss": issuer, "aud": service, "sub": Username, "jti": rand.Text(),
		"exp": until.Unix(), "nbf": until.Add(-2 * time.Hour).Unix(), "iat": until.Add(-2 * time.Hour).Unix(),
		"access": []Section{{"type": "repository", "name": repo, "actions": []string{"pull"}}},
	})
	sum := sha256.Sum256([]byte(content))
	r, s, err := ecdsa.Sign(rand.Reader, a.key, sum[:])
	if err != nil {
		a.t.Fatal(err)
	}
	signature := make([]byte, 64)
	r.FillBytes(signature[:32])
	s.FillBytes(signature[32:])
	return content + "." + base64.RawURLEncoding.EncodeToString(signature)
}

// section encodes a section of a token.
func section(t testing.TB, content Section) string {
	t.Helper()
	text, err := json.Marshal(content)
	if err != nil {
		t.Fatal(err)
	}
	return base64.RawURLEncoding.EncodeToString(text)
}

// Tokens sets the section auth of a registry that wants tokens of this authority, and serves them for
// one repository until the test ends, to those who know the password.
func (a *Authority) Tokens(config Section, repo string) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		user, password, _ := req.BasicAuth()
		if user != Username || password != Password {
			http.Error(w, "wrong credentials", http.StatusUnauthorized)
			return
		}
		_ = json.NewEncoder(w).Encode(Section{"token": a.Token(repo, time.Now().Add(time.Hour)), "expires_in": 3600})
	}))
	a.t.Cleanup(server.Close)
	config["auth"] = Section{"token": Section{"realm": server.URL, "service": service, "issuer": issuer, "rootcertbundle": a.File}}
}
