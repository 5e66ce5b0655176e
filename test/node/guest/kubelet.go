package main

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/crius-run/crius/test/kit/wait"
)

const (
	nodeAddress = "192.0.2.1" // the machine's only address
	manifests   = "/etc/kubernetes/manifests"

	// kubeletUnit is like those in packages.
	kubeletUnit = `[Unit]
Description=kubelet
[Service]
ExecStart=/usr/local/bin/kubelet --config=/var/lib/kubelet/config.yaml --hostname-override=node --node-ip=` + nodeAddress + `
Restart=always
RestartSec=1
[Install]
WantedBy=multi-user.target
`
	// kubeletConfig has what docs/install.md names, and what lets this program
	// send requests without an API server. A kubelet evicts pods from a full
	// disk, so it must not see that of the faults.
	kubeletConfig = `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
containerRuntimeEndpoint: unix:///run/crius/crius.sock
cgroupDriver: systemd
staticPodPath: ` + manifests + `
address: 127.0.0.1
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
resolvConf: /var/lib/kubelet/resolv.conf
failSwapOn: false
makeIPTablesUtilChains: false
evictionHard: {memory.available: 1Mi}
imageGCHighThresholdPercent: 100
fileCheckFrequency: 1s
syncFrequency: 5s
`
	// forever is a container's program that pgrep finds, and that ends on
	// SIGTERM.
	forever = "trap 'exit 0' TERM; while :; do sleep 1; done # %s forever"
)

// runKubelet starts a kubelet as a service, and the pod of the page.
func (p *operator) runKubelet(ctx context.Context) error {
	if err := errors.Join(
		clockSpeed(),
		command("install", "-m", "755", "kubelet", "/usr/local/bin/kubelet"),
		write("/etc/systemd/system/kubelet.service", kubeletUnit),
		write("/var/lib/kubelet/config.yaml", kubeletConfig),
		write("/var/lib/kubelet/resolv.conf", "nameserver 192.0.2.53\n"),
		command("systemctl", "daemon-reload"),
		command("systemctl", "enable", "--now", "kubelet.service"),
	); err != nil {
		return err
	}
	var err error
	if !wait.Until(ctx, func() bool { _, err = askKubelet("/healthz"); return err == nil }) {
		return fmt.Errorf("the kubelet does not answer: %w", err)
	}
	commands := p.page["Try it"][0]
	begun := 1 + slices.IndexFunc(commands, func(c string) bool { return strings.HasPrefix(c, "cat ") })
	p.follow("Try it", commands[:begun])
	_, err = awaitPod(ctx, "hello")
	p.promise("the kubelet says that the pod of the page is ready", err)
	p.see(ctx, "crictl lists it", "crictl pods --name hello", "Ready")
	p.follow("Try it", commands[begun:])
	p.see(ctx, "it is gone with its manifest", "crictl pods --name hello --state Ready --quiet | wc -l", "0\n")
	return nil
}

// clockSpeed gives the processor a clock speed, without which the kubelet does
// not start: user-mode Linux reports none.
func clockSpeed() error {
	text, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return err
	}
	return errors.Join(os.WriteFile("cpuinfo", append([]byte("cpu MHz\t\t: 2000.000\n"), text...), 0o644),
		command("mount", "--bind", "cpuinfo", "/proc/cpuinfo"))
}

// podStatus is the used part of a pod's status.
type podStatus struct {
	Phase, PodIP      string
	Conditions        []struct{ Type, Status string }
	ContainerStatuses []containerStatus
}

type containerStatus struct {
	ContainerID  string
	RestartCount int
}

func (s podStatus) ready() bool {
	return slices.Contains(s.Conditions, struct{ Type, Status string }{"Ready", "True"})
}

// startPod has the kubelet run a pod in the pod network, and waits until it is
// ready.
func startPod(ctx context.Context, name string) (podStatus, error) {
	manifest := fmt.Sprintf(`apiVersion: v1
kind: Pod
metadata: {name: %s}
spec:
  containers:
  - name: main
    image: %s
    command: [sh, -c, %q]
    readinessProbe: {exec: {command: ["true"]}, timeoutSeconds: 60}
`, name, image, fmt.Sprintf(forever, name))
	if err := write(filepath.Join(manifests, name+".yaml"), manifest); err != nil {
		return podStatus{}, err
	}
	return awaitPod(ctx, name)
}

// endPod has the kubelet end a pod.
func endPod(name string) error { return os.Remove(filepath.Join(manifests, name+".yaml")) }

// awaitPod waits until a pod is ready.
func awaitPod(ctx context.Context, name string) (status podStatus, err error) {
	if wait.Until(ctx, func() bool { status, err = podOf(name); return err == nil && status.ready() }) {
		return status, nil
	}
	return status, errors.Join(err, fmt.Errorf("the pod is not ready: %+v", status))
}

// podOf returns the kubelet's view of a static pod.
func podOf(name string) (podStatus, error) {
	body, err := askKubelet("/pods")
	if err != nil {
		return podStatus{}, err
	}
	var list struct {
		Items []struct {
			Metadata struct{ Name string }
			Status   podStatus
		}
	}
	if err := json.Unmarshal(body, &list); err != nil {
		return podStatus{}, err
	}
	for _, item := range list.Items {
		if item.Metadata.Name == name+"-node" {
			return item.Status, nil
		}
	}
	return podStatus{}, fmt.Errorf("the kubelet knows no pod %s", name)
}

func askKubelet(path string) ([]byte, error) {
	client := http.Client{Timeout: patience, Transport: &http.Transport{
		DisableKeepAlives: true,
		TLSClientConfig:   &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // the kubelet signs its certificate itself
	}}
	resp, err := client.Get("https://127.0.0.1:10250" + path)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %s", path, resp.Status, body)
	}
	return body, err
}

// write writes a file, and makes its directory.
func write(path, text string) error {
	return errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644))
}
