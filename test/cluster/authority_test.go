package main

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"testing"
)

func TestCertificatesAreAcceptedForTheirNames(t *testing.T) {
	auth, err := newAuthority(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if err := auth.server("apiserver", []string{"127.0.0.1"}, nil); err != nil {
		t.Fatal(err)
	}
	if err := auth.client(kubelet, "system:node:node", "system:nodes"); err != nil {
		t.Fatal(err)
	}
	pem, err := os.ReadFile(auth.file("ca.crt"))
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(pem)
	pair := func(name string) []tls.Certificate {
		cert, err := tls.LoadX509KeyPair(auth.file(name+".crt"), auth.file(name+".key"))
		if err != nil {
			t.Fatal(err)
		}
		return []tls.Certificate{cert}
	}
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		subject := r.TLS.PeerCertificates[0].Subject
		fmt.Fprint(w, subject.CommonName, subject.Organization)
	}))
	s.TLS = &tls.Config{Certificates: pair("apiserver"), ClientCAs: roots, ClientAuth: tls.RequireAndVerifyClientCert}
	s.StartTLS()
	defer s.Close()
	client := http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, Certificates: pair(kubelet)}}}
	resp, err := client.Get(s.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if who, err := io.ReadAll(resp.Body); err != nil || string(who) != "system:node:node[system:nodes]" {
		t.Errorf("the server sees %q, %v", who, err)
	}
}

func TestKubeconfigNamesServerAndCertificates(t *testing.T) {
	auth := &authority{dir: t.TempDir()}
	if err := auth.kubeconfig(admin, server); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(auth.file("admin.kubeconfig"))
	if err != nil {
		t.Fatal(err)
	}
	var config struct {
		Clusters []struct{ Cluster map[string]string }
		Users    []struct{ User map[string]string }
	}
	if err := json.Unmarshal(text, &config); err != nil {
		t.Fatal(err)
	}
	cluster, user := config.Clusters[0].Cluster, config.Users[0].User
	if cluster["server"] != server || cluster["certificate-authority"] != auth.file("ca.crt") ||
		user["client-certificate"] != auth.file("admin.crt") || user["client-key"] != auth.file("admin.key") {
		t.Errorf("kubeconfig is %s", text)
	}
}
