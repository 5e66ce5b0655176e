package storage

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/image/v5/docker/reference"
	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/storage/pull/pullerror"
	"github.com/crius-run/crius/test/kit/distribution"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/registry"
)

// Each row of the table in docs/registries.md is what crius says of a pull that fails for that cause.
func TestErrorsOfPullsAreInTheManual(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../docs/registries.md")
	ok(t, err)
	_, table, _ := strings.Cut(string(text), "| the error says |")
	table, _, _ = strings.Cut(table, "\n\n")
	var rows []string
	for _, row := range regexp.MustCompile("(?m)^\\| `([^`]+)`").FindAllStringSubmatch(table, -1) {
		rows = append(rows, row[1])
	}
	n := newNode(t, withHostsDirs)
	a := motd(t, "causes")
	pull := func(ref string, auth *cri.AuthConfig) error {
		_, err := n.Pull(testContext(t), PullRequest{Image: ref, Auth: auth})
		return err
	}
	faulty := func(path string, do registry.Action) error {
		r := serve(t, "app", "1", a)
		r.Inject(registry.Fault{Path: path, Do: do})
		return pull(r.Addr()+"/app:1", nil)
	}
	sentTo := func(do registry.Action) error {
		elsewhere := serve(t, "app", "1", a)
		elsewhere.Inject(registry.Fault{Do: do})
		return faulty("/blobs/", registry.Redirect("http://"+elsewhere.Addr()))
	}
	private := serve(t, "app", "1", a)
	private.Require(registry.Auth{Username: "user", Password: "hunter22"})
	failed := func(err error) error {
		name, parseErr := reference.ParseNormalizedNamed("r.test/app:1")
		ok(t, parseErr)
		return pullerror.New(pullerror.Failed{Name: name}, err)
	}
	certified := func(change func(*x509.Certificate)) error {
		n.write("registries.conf", "")
		defer n.write("registries.conf", insecure("127.0.0.1"))
		server := overTLS(t, http.NotFoundHandler(), &tls.Config{Certificates: []tls.Certificate{selfSigned(t, change)}})
		return pull(server.Listener.Addr().String()+"/app:1", nil)
	}
	cases := map[string]func() error{
		"check the name and the tag": func() error { return pull(serve(t, "app", "1", a).Addr()+"/app:2", nil) },
		"build the image for the node's processor": func() error {
			foreign := build(t, image.Image{Platform: imagespec.Platform{OS: "linux", Architecture: "riscv64"}})
			return pull(serve(t, "app", "1", index(t, foreign)).Addr()+"/app:1", nil)
		},
		"no credentials were sent": func() error { return pull(private.Addr()+"/app:1", nil) },
		"correct the pull secret": func() error {
			return pull(private.Addr()+"/app:1", &cri.AuthConfig{Username: "user", Password: "another"})
		},
		"refused it without a code that says why": func() error {
			return faulty("/manifests/", registry.Status(http.StatusPreconditionFailed))
		},
		"sends crius for the manifest, refused": func() error {
			return faulty("/manifests/", registry.Redirect("http://"+private.Addr()))
		},
		"it is compressed twice": func() error {
			inner := layer(t, image.Text("file", "x"))
			l := image.RawLayer(inner.Blob)
			return pull(serve(t, "app", "1", build(t, image.Image{Layers: []image.Layer{l}})).Addr()+"/app:1", nil)
		},
		"the registry limits pulls":       func() error { return faulty("/manifests/", registry.TooManyRequests(0)) },
		"the registry itself failed":      func() error { return faulty("/blobs/", registry.Status(http.StatusInternalServerError)) },
		"push the image again":            func() error { return faulty(layerDigest(a, 1), registry.Page(http.StatusNotFound)) },
		"sends crius for layers, refused": func() error { return sentTo(registry.Page(http.StatusForbidden)) },
		"sends crius, failed":             func() error { return sentTo(registry.Page(http.StatusBadGateway)) },
		"gave no token for": func() error {
			tokens := serve(t, "app", "1", a)
			tokens.Inject(registry.Fault{Do: registry.Page(http.StatusOK)})
			r := serve(t, "app", "1", a)
			r.Require(registry.Auth{Username: "user", Password: "hunter22", Bearer: true, Realm: "http://" + tokens.Addr() + "/token", Tokens: tokens})
			return pull(r.Addr()+"/app:1", nil)
		},
		"wants tokens and does not say where": func() error { return faulty("/v2/", wantsLogin("Bearer service=\"x\"")) },
		"log in by Basic and Bearer":          func() error { return faulty("/v2/", wantsLogin("Negotiate")) },
		"names no way to log in":              func() error { return faulty("/manifests/", registry.Status(http.StatusUnauthorized)) },
		"does not answer as a registry":       func() error { return faulty("/v2/", registry.Page(http.StatusNotFound)) },
		"refused the TLS connection": func() error {
			return failed(&net.OpError{Op: "remote error", Err: errors.New("tls: certificate required")})
		},
		"speaks TLS, by which it refused crius": func() error {
			server := overTLS(t, http.NotFoundHandler(), &tls.Config{ClientAuth: tls.RequireAnyClientCert})
			return pull(server.Listener.Addr().String()+"/app:1", nil)
		},
		"speaks plain HTTP": func() error {
			n.write("registries.conf", "")
			defer n.write("registries.conf", insecure("127.0.0.1"))
			return pull(private.Addr()+"/app:1", nil)
		},
		"to trust the authority": func() error {
			n.write("registries.conf", "")
			defer n.write("registries.conf", insecure("127.0.0.1"))
			server := overTLS(t, http.NotFoundHandler(), nil)
			return pull(server.Listener.Addr().String()+"/app:1", nil)
		},
		"name servers": func() error { return failed(&net.DNSError{Err: "no such host", Name: "r.test", IsNotFound: true}) },
		"check that the node reaches the registry": func() error { return pull("127.0.0.1:1/app:1", nil) },
		"broke off its answer":                     func() error { return faulty(layerDigest(a, 1), registry.Reset(0)) },
		"no data received from the registry": func() error {
			usual := n.puller.Settings.Load().ProgressTimeout
			n.puller.Settings.Load().ProgressTimeout = time.Second
			defer func() { n.puller.Settings.Load().ProgressTimeout = usual }()
			return faulty("/manifests/", registry.Stall(1))
		},
		"rebuild the image": func() error {
			cut := bytes.Repeat([]byte{1}, 100) // of a header of 512
			l := image.Layer{Blob: cut, Digest: digest.FromBytes(cut), DiffID: digest.FromBytes(cut)}
			return pull(serve(t, "app", "1", build(t, image.Image{Layers: []image.Layer{l}})).Addr()+"/app:1", nil)
		},
		"free space in the image store": func() error { return failed(&os.PathError{Op: "write", Path: "/x", Err: unix.ENOSPC}) },
		"registries.conf blocks it": func() error {
			n.write("registries.conf", "[[registry]]\nlocation = \"r.test\"\nblocked = true\n")
			defer n.write("registries.conf", insecure("127.0.0.1"))
			return pull("r.test/app:1", nil)
		},
		"is a web page and begins with":  func() error { return faulty("/manifests/", registry.Page(http.StatusOK)) },
		"since the answer is a web page": func() error { return faulty("/manifests/", registry.Page(http.StatusNotFound)) },
		"the answer is no JSON and begins with": func() error {
			return faulty("/manifests/", registry.Replace(func([]byte) []byte { return []byte("x") }))
		},
		"the answer is cut off": func() error { return faulty("/manifests/", registry.Replace(registry.Truncate)) },
		"the answer is empty":   func() error { return faulty("/manifests/", registry.Replace(func([]byte) []byte { return nil })) },
		"is an error with status 200": func() error {
			return faulty("/manifests/", registry.Replace(func([]byte) []byte { return []byte(`{"errors":[{"code":"DENIED"}]}`) }))
		},
		"says that the answer is compressed": func() error {
			return faulty("/manifests/", func(answer http.Handler, _ <-chan struct{}) http.Handler {
				return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
					w.Header().Set("Content-Encoding", "gzip")
					answer.ServeHTTP(w, req)
				})
			})
		},
		"the registry serves it as": func() error {
			return pull(serve(t, "app", "1", made{mediaType: image.DockerManifest}.artifact(layer(t, image.Text("file", "x")))).Addr()+"/app:1", nil)
		},
		"it is no container image": func() error {
			artifact := made{manifest: altered(plainManifest, imagespec.MediaTypeImageConfig, "application/vnd.example.config")}
			return pull(serve(t, "app", "1", artifact.artifact(layer(t, image.Text("file", "x")))).Addr()+"/app:1", nil)
		},
		"has changed it": func() error { return faulty(layerDigest(a, 1), registry.Replace(registry.Corrupt)) },
		"cannot be decompressed": func() error {
			l := layer(t, image.Text("file", "x"))
			l.Blob[len(l.Blob)-8] ^= 1 // of the checksum
			l.Digest = digest.FromBytes(l.Blob)
			return pull(serve(t, "app", "1", build(t, image.Image{Layers: []image.Layer{l}})).Addr()+"/app:1", nil)
		},
		"node and registry wants a login": func() error { return faulty("/v2/", registry.Page(http.StatusProxyAuthRequired)) },
		"correct HTTPS_PROXY":             func() error { return failed(byProxy(t, &url.URL{Scheme: "http", Host: "127.0.0.1:1"})) },
		"refused to connect crius":        func() error { return failed(byProxy(t, closedProxy(t, http.StatusForbidden))) },
		"sends crius to plain HTTP": func() error {
			behind := serve(t, "app", "1", a)
			front := registry.Before(behind)
			front.Inject(registry.Fault{Path: "/blobs/", Do: registry.Redirect("http://" + behind.Addr())})
			n.write("registries.conf", "")
			defer n.write("registries.conf", insecure("127.0.0.1"))
			return pull(n.trusted(front)+"/app:1", nil)
		},
		"speaks neither TLS nor HTTP": func() error {
			n.write("registries.conf", "")
			defer n.write("registries.conf", insecure("127.0.0.1"))
			return pull(greeting(t, "SSH-2.0-OpenSSH_9.2\r\n")+"/app:1", nil)
		},
		"speaks only older versions of TLS": func() error {
			n.write("registries.conf", "")
			defer n.write("registries.conf", insecure("127.0.0.1"))
			server := overTLS(t, http.NotFoundHandler(), &tls.Config{MinVersion: tls.VersionTLS10, MaxVersion: tls.VersionTLS11})
			return pull(server.Listener.Addr().String()+"/app:1", nil)
		},
		"answers with broken HTTP": func() error {
			return faulty("/manifests/", verbatim("HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n"))
		},
		"and cannot be sent": func() error {
			r := serve(t, "app", "1", a)
			r.Require(registry.Auth{Username: "user", Password: "hunter22", Bearer: true})
			return pull(r.Addr()+"/app:1", &cri.AuthConfig{RegistryToken: "line\nbreak"})
		},
		"redirects crius without saying where": func() error {
			return faulty("/blobs/", registry.Status(http.StatusTemporaryRedirect))
		},
		"that registries do not use for it": func() error { return faulty("/manifests/", registry.Status(http.StatusAccepted)) },
		"refuses requests like this one": func() error {
			return faulty("/manifests/", refusal(http.StatusBadRequest, `{"code":"NAME_INVALID"}`))
		},
		"with fewer or shorter": func() error {
			large := altered(plainManifest, `{"schemaVersion"`, `{"annotations":{"a":"`+strings.Repeat("x", 4<<20)+`"},"schemaVersion"`)
			return pull(serve(t, "app", "1", made{manifest: large}.artifact(layer(t, image.Text("file", "x")))).Addr()+"/app:1", nil)
		},
		"that it cannot ask":          func() error { return faulty("/blobs/", registry.Redirect("ftp://r.test")) },
		"check the name and the port": func() error { return pull("127.0.0.1:99999/app:1", nil) },
		"use a name of the registry": func() error {
			return certified(func(c *x509.Certificate) { c.DNSNames, c.IPAddresses = []string{"other.test"}, nil })
		},
		"check the node's clock":               func() error { return certified(func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Hour) }) },
		"cannot have an underscore":            func() error { return pull("my_registry.example/app:1", nil) },
		"an IPv6 address cannot be a registry": func() error { return pull("[::1]:5000/app:1", nil) },
	}
	for _, row := range rows {
		fail := cases[row]
		if fail == nil {
			t.Errorf("no case for the row %q", row)
			continue
		}
		if err := fail(); err == nil || !strings.Contains(err.Error(), row) {
			t.Errorf("%q is not in: %v", row, err)
		}
	}
	for row := range cases {
		if !slices.Contains(rows, row) {
			t.Errorf("the table lacks %q", row)
		}
	}
}

// withHostsDirs makes a node read containerd's files, which name certificates, in its directory certs.d.
func withHostsDirs(c *Options) {
	c.HostsDirs = []string{filepath.Join(filepath.Dir(c.Root), "certs.d")}
}

// trusted serves a registry by TLS, with a certificate that the node trusts, and returns its address.
func (n *node) trusted(r http.Handler) (address string) {
	n.t.Helper()
	authority := distribution.NewAuthority(n.t)
	pair, err := tls.LoadX509KeyPair(authority.Issue())
	ok(n.t, err)
	address = overTLS(n.t, r, &tls.Config{Certificates: []tls.Certificate{pair}}).Listener.Addr().String()
	ca, err := os.ReadFile(authority.File)
	ok(n.t, err)
	ok(n.t, os.MkdirAll(filepath.Join(n.dir, "certs.d", address), 0o755))
	n.write("certs.d/"+address+"/ca.crt", string(ca))
	return address
}

// overTLS starts a server that offers HTTP/2 as well.
func overTLS(t testing.TB, h http.Handler, config *tls.Config) *httptest.Server {
	t.Helper()
	server := httptest.NewUnstartedServer(h)
	server.TLS, server.EnableHTTP2 = config, true
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.StartTLS()
	t.Cleanup(server.Close)
	return server
}

// wantsLogin answers 401 with a challenge.
func wantsLogin(challenges ...string) registry.Action {
	return answer(func(w http.ResponseWriter, _ *http.Request) {
		w.Header()["Www-Authenticate"] = challenges
		w.WriteHeader(http.StatusUnauthorized)
	})
}

func answer(with http.HandlerFunc) registry.Action {
	return func(http.Handler, <-chan struct{}) http.Handler { return with }
}

// refusal answers with an HTTP status and an error in the form of the distribution specification.
func refusal(status int, body string) registry.Action {
	return answer(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		_, _ = fmt.Fprintf(w, `{"errors":[%s]}`, body)
	})
}

// verbatim answers with a text, whether it is HTTP or not.
func verbatim(text string) registry.Action {
	return answer(func(w http.ResponseWriter, _ *http.Request) {
		if c, _, err := http.NewResponseController(w).Hijack(); err == nil {
			_, _ = io.WriteString(c, text)
			_ = c.Close()
		}
	})
}

// greeting listens on an address as servers of other protocols do: it speaks first.
func greeting(t *testing.T, text string) (address string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	ok(t, err)
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(c, text)
			_, _ = c.Read(make([]byte, 4096)) // or the rest of the greeting may be lost
			_ = c.Close()
		}
	}()
	return l.Addr().String()
}

// closedProxy returns the address of a proxy that refuses to connect.
func closedProxy(t *testing.T, status int) *url.URL {
	t.Helper()
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) }))
	t.Cleanup(proxy.Close)
	address, err := url.Parse(proxy.URL)
	ok(t, err)
	return address
}

// byProxy returns the error of a request to a registry through a proxy that does not connect to it. The proxies of
// this process are those of its environment, which net/http reads once.
func byProxy(t *testing.T, proxy *url.URL) error {
	t.Helper()
	client := http.Client{Transport: &http.Transport{Proxy: http.ProxyURL(proxy), DisableKeepAlives: true}}
	req, err := http.NewRequestWithContext(testContext(t), http.MethodGet, "https://r.test/v2/", nil)
	ok(t, err)
	got, err := client.Do(req)
	if err == nil {
		_ = got.Body.Close()
		t.Fatal("the proxy has connected")
	}
	return err
}

// selfSigned returns a certificate for 127.0.0.1 that change may spoil.
func selfSigned(t *testing.T, change func(*x509.Certificate)) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	ok(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, BasicConstraintsValid: true, IsCA: true,
		NotBefore: time.Now().Add(-24 * time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
	}
	change(template)
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	ok(t, err)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}
