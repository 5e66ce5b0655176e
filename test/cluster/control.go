package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os/exec"
	"syscall"

	"google.golang.org/grpc"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/daemon"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/realkubelet"
	"github.com/crius-run/crius/test/kit/tools"
	"github.com/crius-run/crius/test/kit/wait"
)

// The addresses of the cluster, in the node's network. There is no kube-proxy: the API
// server listens at the service's own address and port.
const (
	serviceRange   = "10.0.0.0/24"
	serviceAddress = "10.0.0.1" // of the service "kubernetes", the first of the range
	server         = "https://" + serviceAddress + ":443"
	etcdAddress    = "127.0.0.1:2379"
)

// The clients of the API server, by the names of their certificates.
const (
	admin      = "admin"
	controller = "controller"
	scheduler  = "scheduler"
	kubelet    = "kubelet"
)

// A cluster is Kubernetes on one node.
type cluster struct {
	*node.Node
	programs tools.Cluster
	socket   string // where the node's runtime serves CRI
	runtime  cri.RuntimeServiceClient
	auth     *authority
	api      *api

	kubeletArgs []string // besides those of every kubelet

	daemons []*daemon.Daemon // in the order of their starts
}

// newCluster prepares Kubernetes on a node whose runtime serves at a socket.
// changes override the kubelet's configuration.
func newCluster(ctx context.Context, n *node.Node, programs tools.Cluster, socket string, conn *grpc.ClientConn, changes map[string]any) (*cluster, error) {
	auth, err := newAuthority(n.Path("pki"))
	if err != nil {
		return nil, err
	}
	c := &cluster{Node: n, programs: programs, socket: socket, runtime: cri.NewRuntimeServiceClient(conn), auth: auth}
	if err := c.certify(); err != nil {
		return nil, err
	}
	if c.api, err = newAPI(n, auth); err != nil {
		return nil, err
	}
	if _, err := n.Run(ctx, "ip", "address", "add", serviceAddress+"/32", "dev", "lo"); err != nil {
		return nil, err
	}
	config := map[string]any{
		"authentication": map[string]any{
			"anonymous": map[string]any{"enabled": false},
			"webhook":   map[string]any{"enabled": true},
			"x509":      map[string]any{"clientCAFile": auth.file("ca.crt")},
		},
		"authorization": map[string]any{"mode": "Webhook"},
		"clusterDomain": "cluster.local",
		"clusterDNS":    []string{"10.0.0.10"},
	}
	maps.Copy(config, changes)
	return c, realkubelet.Prepare(ctx, n, socket, config)
}

// up starts Kubernetes and returns when the node is ready for pods. Call stop,
// also after an error.
func (c *cluster) up(ctx context.Context) error {
	for _, start := range []func(context.Context) error{c.startEtcd, c.startAPIServer, c.startControllers, c.startKubelet} {
		if err := start(ctx); err != nil {
			return err
		}
	}
	return nil
}

// certify makes all certificates.
func (c *cluster) certify() error {
	addresses := []string{"127.0.0.1", realkubelet.Address, serviceAddress}
	names := []string{"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"}
	const masters = "system:masters"
	errs := []error{
		c.auth.server("apiserver", addresses, names),
		c.auth.client("apiserver-kubelet", "apiserver-kubelet", masters),
		c.auth.client("accounts", "accounts", ""), // only its key is used
		c.auth.client(admin, admin, masters),
		c.auth.client(controller, controller, masters),
		c.auth.client(scheduler, "system:kube-scheduler", ""),
		c.auth.client(kubelet, "system:node:"+realkubelet.NodeName, "system:nodes"),
	}
	for _, name := range []string{admin, controller, scheduler, kubelet} {
		errs = append(errs, c.auth.kubeconfig(name, server))
	}
	return errors.Join(errs...)
}

// start runs a program of the cluster until stop.
func (c *cluster) start(ctx context.Context, name string, healthy func() bool, cmd *exec.Cmd) error {
	d, err := daemon.Start(ctx, c.Node, name, cmd, healthy)
	if err != nil {
		return err
	}
	c.daemons = append(c.daemons, d)
	return nil
}

func (c *cluster) startEtcd(ctx context.Context) error {
	return c.start(ctx, "etcd", func() bool { return c.listens(ctx, etcdAddress) }, exec.Command(c.programs.Etcd,
		"--data-dir", c.Path("etcd"), "--unsafe-no-fsync", "--log-level", "warn",
		"--listen-client-urls", "http://"+etcdAddress, "--advertise-client-urls", "http://"+etcdAddress,
		"--listen-peer-urls", "http://127.0.0.1:2380"))
}

func (c *cluster) startAPIServer(ctx context.Context) error {
	return c.start(ctx, "kube-apiserver", func() bool { return c.api.ready(ctx) }, exec.Command(c.programs.APIServer,
		"--etcd-servers", "http://"+etcdAddress,
		"--advertise-address", realkubelet.Address, "--secure-port", "443",
		"--service-cluster-ip-range", serviceRange,
		"--cert-dir", c.Path("apiserver"),
		"--tls-cert-file", c.auth.file("apiserver.crt"), "--tls-private-key-file", c.auth.file("apiserver.key"),
		"--client-ca-file", c.auth.file("ca.crt"),
		"--kubelet-client-certificate", c.auth.file("apiserver-kubelet.crt"), "--kubelet-client-key", c.auth.file("apiserver-kubelet.key"),
		"--kubelet-preferred-address-types", "InternalIP",
		"--service-account-issuer", "https://kubernetes.default.svc.cluster.local",
		"--service-account-key-file", c.auth.file("accounts.key"), "--service-account-signing-key-file", c.auth.file("accounts.key"),
		"--authorization-mode", "Node,RBAC", "--enable-admission-plugins", "NodeRestriction",
		"--allow-privileged"))
}

// startControllers starts the programs that need only the API server.
func (c *cluster) startControllers(ctx context.Context) error {
	now := func() bool { return true }
	return errors.Join(
		c.start(ctx, "kube-controller-manager", now, exec.Command(c.programs.ControllerManager,
			"--kubeconfig", c.auth.file(controller+".kubeconfig"), "--leader-elect=false", "--secure-port", "0",
			"--root-ca-file", c.auth.file("ca.crt"), "--service-account-private-key-file", c.auth.file("accounts.key"))),
		c.start(ctx, "kube-scheduler", now, exec.Command(c.programs.Scheduler,
			"--kubeconfig", c.auth.file(scheduler+".kubeconfig"), "--leader-elect=false", "--secure-port", "0")))
}

// startKubelet returns when the node is ready.
func (c *cluster) startKubelet(ctx context.Context) error {
	args := append([]string{"--kubeconfig", c.auth.file(kubelet + ".kubeconfig")}, c.kubeletArgs...)
	return c.start(ctx, "kubelet", func() bool { return c.api.nodeIs(ctx, "Ready", "True") },
		realkubelet.Command(c.Node, c.programs.Kubelet, args...))
}

func (c *cluster) listens(ctx context.Context, address string) bool {
	conn, err := c.Dial(ctx, "tcp", address)
	if err != nil {
		return false
	}
	return conn.Close() == nil
}

// emptied waits until the kubelet has removed the sandboxes of all pods, which
// it does once a minute for pods that are gone.
func (c *cluster) emptied(ctx context.Context) error {
	var left *cri.ListPodSandboxResponse
	var err error
	if !wait.Until(ctx, func() bool {
		left, err = c.runtime.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
		return err != nil || len(left.Items) == 0
	}) {
		return fmt.Errorf("the kubelet has not removed %d pods; the first: %v", len(left.Items), left.Items[0])
	}
	return err
}

// stop ends Kubernetes, the kubelet first.
func (c *cluster) stop() error {
	var errs []error
	for i := len(c.daemons) - 1; i >= 0; i-- {
		errs = append(errs, c.daemons[i].Stop(syscall.SIGTERM))
	}
	c.daemons = nil
	return errors.Join(errs...)
}
