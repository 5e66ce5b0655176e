// Command prebuild builds the programs that tests and the demo run, so that no
// test spends its time on that, and prints what it does and how long it has
// taken so far:
//
//	prebuild [NAME...]     see below for the names; by default everything
//
// Foreign programs, such as critest or runsc, are built once and kept in
// .cache; those of the repository are rebuilt if they have changed. Programs
// for some runs only (kubelets, a cluster and the race detector) are built only
// if named.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/crius-run/crius/test/kit/tools"
)

// builds are all programs in the order in which they are built.
var builds = []struct {
	name, what string
	build      func(context.Context) (string, error)
}{
	{"crius", "crius and its monitors", func(ctx context.Context) (string, error) { return tools.Programs(ctx, false) }},
	{"probe", "the program that test containers run", tools.Probe},
	{"demo", "the demo", tools.Demo},
	{"failing", "a program that fails when told to", tools.Failing},
	{raced, "crius with the race detector", func(ctx context.Context) (string, error) { return tools.Programs(ctx, true) }},
	{"points", "crius with failpoints", func(ctx context.Context) (string, error) { return tools.PointsServer(ctx, false) }},
	{"standin", "the stand-in for nginx and httpd", tools.Standin},
	{"katashim", "shims that behave like Kata's", tools.OldKataShim},
	{"kataruntime", "a runtime that behaves like Kata's", tools.KataRuntime},
	{"crictl", "crictl", tools.Crictl},
	{"critest", "critest", tools.Critest},
	{"busybox", "busybox, from Debian's sources", tools.Busybox},
	{"runc", "a current runc", tools.Runc},
	{"containerd", "a current containerd", tools.Containerd},
	{"runsc", "a current runsc (gVisor)", tools.Runsc},
	{runscShim, "gVisor's shim", tools.RunscShim},
	{"distribution", "CNCF Distribution's registry", tools.Distribution},
	{"checkpointctl", "checkpointctl", tools.Checkpointctl},
	{"criu", "criu, from Debian's unstable distribution", tools.Criu},
	{kubelet, "kubelets " + strings.Join(tools.KubeletVersions(), " and "), tools.Kubelets},
	{cluster, "Kubernetes " + tools.ClusterVersion() + " and its end-to-end tests", func(ctx context.Context) (string, error) {
		c, err := tools.ClusterPrograms(ctx, tools.ClusterVersion())
		return c.Tests, err
	}},
}

// These are built only if named: one target needs them, and they take long.
const (
	kubelet   = "kubelet"
	cluster   = "cluster"
	raced     = "crius-race"
	runscShim = "runsc-shim"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	wanted := os.Args[1:]
	for _, b := range builds {
		if len(wanted) == 0 && slices.Contains([]string{kubelet, cluster, raced, runscShim}, b.name) || len(wanted) > 0 && !slices.Contains(wanted, b.name) {
			continue
		}
		err := announced("build "+b.what, func() error { _, err := b.build(ctx); return err })
		if errors.Is(err, tools.ErrNoCriu) {
			fmt.Fprintln(os.Stderr, "prebuild: of checkpoints only the refusals will be tested:", err)
			continue
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "prebuild:", err)
			os.Exit(1)
		}
	}
}

// announced runs f, prints that unless it is done at once, and prints every ten
// seconds how long it has taken so far.
func announced(what string, f func() error) error {
	began := time.Now()
	so := func() time.Duration { return time.Since(began).Round(time.Second) }
	done := make(chan error, 1)
	go func() { done <- f() }()
	first := time.After(2 * time.Second)
	again := time.NewTicker(10 * time.Second)
	defer again.Stop()
	said := false
	for {
		select {
		case err := <-done:
			if said && err == nil {
				fmt.Printf("%s: done in %v\n", what, so())
			}
			return err
		case <-first:
			fmt.Printf("%s\n", what)
			said = true
		case <-again.C:
			fmt.Printf("%s: %v so far\n", what, so())
		}
	}
}
