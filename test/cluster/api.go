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

// errNotFound is the answer about a missing object.
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

// nodeIs reports whether a condition of the node has this status.
func (a *api) nodeIs(ctx context.Context, condition, status string) bool {
	var n struct {
		Status struct {
			Conditions []struct{ Type, Status string }
		}
	}
	if err := a.call(ctx, http.MethodGet, "/api/v1/nodes/"+realkubelet.NodeName, nil, &n); err != nil {
		return false
	}
	for _, c := range n.Status.Conditions {
		if c.Type == condition {
			return c.Status == status
		}
	}
	return false
}

const pods = "/api/v1/namespaces/default/pods"

// podStatus is the used part of a pod's status.
type podStatus struct {
	Phase, Reason, Message string
	ContainerStatuses      []json.RawMessage
}

// createPod creates a pod with one container.
func (a *api) createPod(ctx context.Context, name string, container map[string]any, volumes ...any) error {
	container["name"] = name
	pod := map[string]any{
		"metadata": map[string]any{"name": name},
		"spec": map[string]any{
			"containers":                    []any{container},
			"volumes":                       volumes,
			"terminationGracePeriodSeconds": 0,
			"restartPolicy":                 "Never",
		},
	}
	return a.until(ctx, func() error { // its service account is being made
		return a.call(ctx, http.MethodPost, pods, pod, nil)
	})
}

// awaitPod waits until a pod is as wanted.
func (a *api) awaitPod(ctx context.Context, name string, is func(podStatus) bool) error {
	return a.until(ctx, func() error {
		var now struct{ Status podStatus }
		if err := a.call(ctx, http.MethodGet, pods+"/"+name, nil, &now); err != nil || is(now.Status) {
			return err
		}
		return fmt.Errorf("pod %s is %s: %s %s %s", name, now.Status.Phase, now.Status.Reason, now.Status.Message, now.Status.ContainerStatuses)
	})
}

// removePod deletes a pod and waits until it is gone.
func (a *api) removePod(ctx context.Context, name string) error {
	if err := a.call(ctx, http.MethodDelete, pods+"/"+name, nil, nil); err != nil {
		return err
	}
	return a.until(ctx, func() error {
		if err := a.call(ctx, http.MethodGet, pods+"/"+name, nil, nil); !errors.Is(err, errNotFound) {
			return errors.Join(err, fmt.Errorf("pod %s is still there", name))
		}
		return nil
	})
}

// runPod runs a pod with an image and removes it.
func (a *api) runPod(ctx context.Context, image string) error {
	const name = "first"
	if err := a.createPod(ctx, name, map[string]any{"image": image}); err != nil {
		return err
	}
	if err := a.awaitPod(ctx, name, func(s podStatus) bool { return s.Phase == "Running" }); err != nil {
		return err
	}
	return a.removePod(ctx, name)
}

// until retries until it succeeds.
func (a *api) until(ctx context.Context, try func() error) (err error) {
	wait.Until(ctx, func() bool { err = try(); return err == nil })
	return err
}
