package tools

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
)

// Cluster are the programs of a Kubernetes cluster and of its end-to-end tests,
// all of them static.
type Cluster struct {
	Version                                       string // of Kubernetes
	Etcd, APIServer, ControllerManager, Scheduler string
	Kubelet, Kubectl                              string
	Tests, Ginkgo                                 string // e2e.test, and the program that runs it several times at once
	Agnhost                                       string // the program of nearly every container of the tests
}

// ClusterVariable names the Kubernetes release of the cluster.
const ClusterVariable = "CRIUS_TEST_CLUSTER"

// ClusterVersion returns the Kubernetes release of the cluster.
func ClusterVersion() string {
	if named := os.Getenv(ClusterVariable); named != "" {
		return named
	}
	return newest
}

// ClusterPrograms builds the missing programs of a cluster, the quickest first:
// with empty caches that takes an hour on two cores.
func ClusterPrograms(ctx context.Context, version string) (c Cluster, err error) {
	c.Version = version
	if c.Etcd, err = etcd(ctx); err != nil {
		return Cluster{}, err
	}
	if c.Kubelet, err = Kubelet(ctx, version); err != nil {
		return Cluster{}, err
	}
	for _, p := range []struct {
		path      *string
		name      string
		verb, pkg string
	}{
		{&c.Agnhost, "agnhost", "build", "./test/images/agnhost"},
		{&c.APIServer, "kube-apiserver", "build", "./cmd/kube-apiserver"},
		{&c.ControllerManager, "kube-controller-manager", "build", "./cmd/kube-controller-manager"},
		{&c.Scheduler, "kube-scheduler", "build", "./cmd/kube-scheduler"},
		{&c.Kubectl, "kubectl", "build", "./cmd/kubectl"},
		{&c.Ginkgo, "ginkgo", "build", "github.com/onsi/ginkgo/v2/ginkgo"},
		{&c.Tests, "e2e.test", "test", "./test/e2e"},
	} {
		if *p.path, err = kubernetesProgram(ctx, "kubernetes-"+version, version, p.name, p.verb, p.pkg); err != nil {
			return Cluster{}, err
		}
	}
	return c, nil
}

// etcd returns the path of etcd. The version is that of the module in
// test/tools/etcd.
func etcd(ctx context.Context) (string, error) {
	const module = "go.etcd.io/etcd/server/v3"
	dir, version, err := pinned("etcd", module)
	if err != nil {
		return "", err
	}
	return cached(filepath.Join("etcd-"+version, "etcd"), func(_, out string) *exec.Cmd {
		cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", filepath.Join(out, "etcd"), module)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=")
		return cmd
	})
}
