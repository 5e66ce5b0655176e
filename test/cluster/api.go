package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"time"

	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/realkubelet"
	"github.com/crius-run/crius/test/kit/wait"
)

// api is an administrator's client of the API server.
type api struct{ http.Client }

func newAPI(n *node.Node, auth *authority) (*api, error) {
	cert, err := tls.LoadX509KeyPair(auth.file(admin+".crt"), auth.file(admin+".key"))
	if err != nil {
		return nil, err
	}
	ca, err := os.ReadFile(auth.file("ca.crt"))
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	return &api{http.Client{
		Timeout: 30 * time.Second,
		Transport: &http.Transport{
			DialContext:     n.Dial,
			TLSClientConfig: &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{cert}},
		},
	}}, nil
}

// errNotFound is the answer about an object that is not there.
var errNotFound = errors.New("not found")

// call sends an object, nil for none, and reads the answer, unless into is nil.
func (a *api) call(ctx context.Context, method, path string, object, into any) error {
	var body io.Reader
	if object != nil {
		text, err := json.Marshal(object)
		if err != nil {
			return err
		}
		body = bytes.NewReader(text)
	}
	req, err := http.NewRequestWithContext(ctx, method, server+path, body)
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := a.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	switch {
	case err != nil:
		return err
	case resp.StatusCode == http.StatusNotFound:
		return fmt.Errorf("%s %s: %w", method, path, errNotFound)
	case resp.StatusCode/100 != 2:
		return fmt.Errorf("%s %s: %s: %s", method, path, resp.Status, text)
	case into == nil:
		return nil
	}
	return json.Unmarshal(text, into)
}

func (a *api) ready(ctx context.Context) bool {
	return a.call(ctx, http.MethodGet, "/readyz", nil, nil) == nil
}

func (a *api) nodeReady(ctx context.Context) bool {
	var n struct {
		Status struct {
			Conditions []struct{ Type, Status string }
		}
	}
	if err := a.call(ctx, http.MethodGet, "/api/v1/nodes/"+realkubelet.NodeName, nil, &n); err != nil {
		return false
	}
	for _, c := range n.Status.Conditions {
		if c.Type == "Ready" {
			return c.Status == "True"
		}
	}
	return false
}

// runPod lets a pod with an image run and removes it.
func (a *api) runPod(ctx context.Context, image string) error {
	const pods, name = "/api/v1/namespaces/default/pods", "first"
	pod := map[string]any{
		"metadata": map[string]any{"name": name},
		"spec": map[string]any{
			"containers":                    []any{map[string]any{"name": name, "image": image}},
			"terminationGracePeriodSeconds": 0,
		},
	}
	err := a.until(ctx, func() error { // its service account is made meanwhile
		return a.call(ctx, http.MethodPost, pods, pod, nil)
	})
	if err != nil {
		return err
	}
	if err := a.until(ctx, func() error {
		var status json.RawMessage
		var now struct{ Status struct{ Phase string } }
		if err := a.call(ctx, http.MethodGet, pods+"/"+name, nil, &status); err != nil {
			return err
		}
		if err := json.Unmarshal(status, &now); err != nil || now.Status.Phase == "Running" {
			return err
		}
		return fmt.Errorf("the first pod does not run: %s", status)
	}); err != nil {
		return err
	}
	if err := a.call(ctx, http.MethodDelete, pods+"/"+name, nil, nil); err != nil {
		return err
	}
	return a.until(ctx, func() error {
		if err := a.call(ctx, http.MethodGet, pods+"/"+name, nil, nil); !errors.Is(err, errNotFound) {
			return errors.Join(err, errors.New("the first pod is still there"))
		}
		return nil
	})
}

// until tries again until it goes well.
func (a *api) until(ctx context.Context, try func() error) (err error) {
	wait.Until(ctx, func() bool { err = try(); return err == nil })
	return err
}
