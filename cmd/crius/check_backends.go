package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/network"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/oci/annotation"
	"github.com/crius-run/crius/oci/criu"
	"github.com/crius-run/crius/storage"
	"github.com/crius-run/crius/storage/registry/hosts"
	"github.com/crius-run/crius/storage/unpack"
)

// checkRuntimes looks for the monitor and runs each handler's binary. Only the default
// handler must work: the others are used only by pods that name them.
func (n *node) checkRuntimes(ctx context.Context) []finding {
	c := n.config.Config
	table, err := oci.NewTable(c.Runtime, c.RunRoot)
	if err != nil {
		return []finding{fail("", "%v", err)}
	}
	findings := []finding{checkMonitor(table.Monitor())}
	reports, errs := table.Report(ctx)
	for i, r := range reports {
		switch {
		case r.Ready:
			findings = append(findings, ok("%s: %s, %s; %s", r.Name, r.Path, r.Version, abilities(r)))
			findings = append(findings, vulnerabilities(r, reports[:i])...)
		case r.Default:
			findings = append(findings, fail(insteadOf(r, reports), "default handler %s: %s", r.Name, r.Error))
		case errors.Is(errs[i], oci.ErrNotInstalled) && !n.config.HandlerSet(r.Name):
			findings = append(findings, ok("%s: not installed, and no configuration asks for it", r.Name))
		default:
			findings = append(findings, warn("", "%s: %s", r.Name, r.Error))
		}
	}
	return findings
}

// vulnerabilities lists those of a handler's program, unless one of the handlers before has the same.
func vulnerabilities(r oci.Report, before []oci.Report) (findings []finding) {
	if slices.ContainsFunc(before, func(b oci.Report) bool { return b.Ready && b.Path == r.Path && b.Version == r.Version }) {
		return nil
	}
	for _, v := range r.Vulnerabilities {
		findings = append(findings, warn("update the runtime to "+strings.Join(v.Fixed, " or ")+", or add "+v.CVE+" to runtime.backported_cves if your distribution's package already contains the fix",
			"%s: %s, %s is vulnerable to %s: %s (%s)", r.Name, r.Path, r.Version, v.CVE, v.What, v.Source))
	}
	return findings
}

// insteadOf returns advice for a default handler that is not ready, "" if its error is
// enough.
func insteadOf(r oci.Report, all []oci.Report) string {
	var ready []string
	for _, other := range all {
		if other.Ready {
			ready = append(ready, other.Name)
		}
	}
	if len(ready) == 0 {
		return ""
	}
	return fmt.Sprintf("install what %s needs, or set runtime.default_handler to a handler that is ready: %s", r.Name, strings.Join(ready, ", "))
}

// abilities describes the features that pods of a handler may request.
func abilities(r oci.Report) string {
	var has []string
	for _, ability := range []struct {
		name string
		yes  bool
	}{
		{"a separate guest kernel", r.Sandboxed},
		{"user namespaces", r.UserNamespaces},
		{"recursive read-only mounts", r.RecursiveReadOnly},
	} {
		if ability.yes {
			has = append(has, ability.name)
		}
	}
	text := "supports " + strings.Join(has, ", ")
	if len(has) == 0 {
		text = "does not support user namespaces or recursive read-only mounts"
	}
	if r.FeaturesFile != "" {
		text += " (according to " + r.FeaturesFile + ")"
	}
	return text
}

func checkMonitor(path string) finding {
	if _, err := exec.LookPath(path); err != nil {
		return fail("install crius-conmon or correct runtime.monitor", "cannot run the monitor: %v", err)
	}
	return ok("monitor: %s", path)
}

// checkCheckpoints runs criu check. No pod needs it, so a node without it is in order.
func (n *node) checkCheckpoints(ctx context.Context) []finding {
	found, err := criu.New(n.config.Config.Runtime.Criu).Ready(ctx)
	if err != nil {
		return []finding{ok("containers cannot be checkpointed: %s", fault.Text(err))}
	}
	return []finding{ok("containers can be checkpointed by runtimes that use criu: %s, %s", found.Path, found.Version)}
}

// checkStorage opens the image store unless a server uses it, since opening it also cleans
// up after a dead server.
func (n *node) checkStorage(ctx context.Context) []finding {
	c := n.config.Config
	policy := cmp.Or(c.Image.SignaturePolicy, storage.DefaultPolicy)
	if _, err := os.Stat(policy); err != nil {
		return []finding{fail("install a signature policy; the example /usr/share/doc/crius/examples/policy.json accepts every image", "no signature policy, images cannot be pulled: %v", err)}
	}
	if answers(ctx, c.API.Listen) {
		return []finding{ok("in use by the server at %s; crius status shows whether it is writable", c.API.Listen)}
	}
	store, err := storage.Open(ctx, imageOptions(c))
	if err != nil {
		return []finding{fail("", "%v", err)}
	}
	err = errors.Join(store.Ready(ctx), store.Close(ctx))
	if err != nil {
		return []finding{fail("", "%v", err)}
	}
	return []finding{ok("the image store is writable")}
}

// checkLayerSizes asks whether the disk can limit writable layers, if annotations of pods may.
func (n *node) checkLayerSizes(context.Context) []finding {
	runtime := n.config.Config.Runtime
	var who []string
	for _, name := range slices.Sorted(maps.Keys(runtime.Handlers)) {
		h := runtime.Handlers[name]
		if annotation.AllowsLayerSize(h.AllowedAnnotations) || slices.Contains(h.AllowedContainerAnnotations, annotation.LayerSizeKey) {
			who = append(who, "handler "+name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(runtime.Workloads)) {
		if annotation.AllowsLayerSize(runtime.Workloads[name].Allowed) {
			who = append(who, "workload "+name)
		}
	}
	if len(who) == 0 {
		return nil
	}
	options := imageOptions(n.config.Config)
	if err := options.CheckLayerSizes(); err != nil {
		return []finding{warn("", "containers of %s that ask for a size of their writable layer by annotation are refused: %s", strings.Join(who, ", "), fault.Text(err))}
	}
	return []finding{ok("containers of %s may ask for a size of their writable layer by annotation", strings.Join(who, ", "))}
}

// checkUnpacker starts the program that unpacks images.
func checkUnpacker(ctx context.Context) []finding {
	path, err := unpack.FindProgram()
	if err != nil {
		return []finding{warn("", "images are unpacked by crius itself, which takes more CPU: %v", err)}
	}
	if err := unpack.CheckProgram(ctx, path); err != nil {
		return []finding{fail("install crius and crius-unpack from one package, and restart crius", "images cannot be pulled: %v", err)}
	}
	return []finding{ok("images are unpacked by %s", path)}
}

// checkRegistries reads the hosts.toml files, which pulls would read.
func (n *node) checkRegistries(context.Context) (findings []finding) {
	for _, err := range hosts.Check(n.config.Config.Image.HostsDirs) {
		findings = append(findings, warn("correct the file; the next pull reads it", "images cannot be pulled from its registry: %s", fault.Text(err)))
	}
	return findings
}

// checkNetwork asks CNI. A node without a network still runs pods in the host's network,
// including those that install the network.
func (n *node) checkNetwork(ctx context.Context) []finding {
	cni := network.New(network.Options{Config: n.config.Config.Network})
	err := cni.Ready(ctx)
	switch {
	case err == nil:
		findings := []finding{ok("CNI is ready"), ok("%s", cni.HostPortsBy())}
		if err := cni.HostPortsReady(); err != nil {
			findings = append(findings, warn("until this is fixed, pods with host ports cannot run", "%v", err))
		}
		return findings
	case errors.Is(err, fault.Unavailable):
		return []finding{warn("until this is fixed, only pods with hostNetwork: true can run", "%v", err)}
	}
	return []finding{fail("", "%v", err)}
}
