// Package switchover reports what would change on a node if crius replaced its current
// runtime.
package switchover

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/crius-run/crius/cmd/crius/config"
	"github.com/crius-run/crius/cmd/crius/config/foreign"
	"github.com/crius-run/crius/cmd/crius/diagnosis"
	"github.com/crius-run/crius/cmd/crius/kubelet"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/network"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/oci/hooks"
	"github.com/crius-run/crius/storage/registry/hosts"
)

// Check looks at one part of the change.
type Check struct {
	Name string
	Run  func(context.Context) []diagnosis.Finding
}

// comparison is a node on which crius is to replace another runtime.
type comparison struct {
	*config.Comparison
	now  *config.Loaded // of crius
	root string         // directory of the node's files
}

// Checks returns the checks for a node on which crius, with the configuration now, would
// replace the runtime whose configuration imp is. The kubelet's files are below root.
func Checks(imp *foreign.Import, now *config.Loaded, root string) ([]Check, error) {
	compared, err := config.Compare(imp, now)
	if err != nil {
		return nil, err
	}
	c := &comparison{compared, now, root}
	return []Check{
		{"configuration", c.files},
		{"service", c.service},
		{"unsupported", c.unsupported},
		{"settings", c.settings},
		{"handlers", c.handlers},
		{"cgroups", c.cgroups},
		{"hooks", c.hooks},
		{"network", c.network},
		{"kubelet", c.kubelet},
		{"paths", c.paths},
	}, nil
}

// program returns crio or containerd.
func (c *comparison) program() string {
	return strings.ToLower(strings.ReplaceAll(c.Import.Of, "-", ""))
}

func (c *comparison) files(context.Context) []diagnosis.Finding {
	list := func(files []string) string {
		if len(files) == 0 {
			return "no configuration files, using the defaults"
		}
		return strings.Join(files, ", ")
	}
	return []diagnosis.Finding{diagnosis.OK("%s: %s", c.Import.Of, list(c.Import.Files)), diagnosis.OK("crius: %s", list(c.now.Files))}
}

// unsupported lists settings that have no counterpart.
func (c *comparison) unsupported(context.Context) []diagnosis.Finding {
	var findings []diagnosis.Finding
	for _, err := range hosts.Check(c.Theirs.Image.HostsDirs) {
		findings = append(findings, diagnosis.Fail("correct the file", "pulls from its registry would fail: %s", fault.Text(err)))
	}
	for _, r := range c.Import.Remarks {
		text, _, more := strings.Cut(r.Text, "\n")
		if more {
			text += " crius config --from-" + c.program() + " prints the lines"
		}
		if r.Restricts {
			findings = append(findings, diagnosis.Warn("make sure that this is acceptable: the node would allow what "+c.Import.Of+" forbids",
				"%s = %s (%s): %s", r.Key, config.Short(r.Value), r.Place, text))
			continue
		}
		findings = append(findings, diagnosis.Warn("", "%s = %s (%s): %s", r.Key, config.Short(r.Value), r.Place, text))
	}
	return findings
}

func (c *comparison) settings(context.Context) []diagnosis.Finding {
	findings := c.differences(func(key string) bool {
		return !isHandlerKey(key) && !isNetworkKey(key) && !slices.Contains([]string{"runtime.cgroup_driver", "api.listen", "api.crio_socket"}, key)
	})
	if len(findings) == 0 {
		findings = []diagnosis.Finding{diagnosis.OK("all settings of %s have the same values in crius", c.Import.Of)}
	}
	for _, text := range c.Import.Differ {
		findings = append(findings, diagnosis.Warn("", "%s", text))
	}
	return findings
}

func isNetworkKey(key string) bool { return strings.HasPrefix(key, "network.") }

func isHandlerKey(key string) bool {
	return key == "runtime.default_handler" || strings.HasPrefix(key, "runtime.handlers.")
}

// differences returns a finding for each wanted option that differs.
func (c *comparison) differences(wanted func(key string) bool) []diagnosis.Finding {
	var findings []diagnosis.Finding
	for _, d := range c.Differences {
		if !wanted(d.Key) {
			continue
		}
		ours := fmt.Sprintf("%s for crius (%s)", config.Short(d.Ours), d.OursOrigin)
		if d.Theirs == "" {
			findings = append(findings, diagnosis.Warn("remove it from the configuration of crius, unless it is intended",
				"%s: %s, %s has its default", d.Key, ours, c.Import.Of))
			continue
		}
		findings = append(findings, diagnosis.Warn(fmt.Sprintf("set %s = %s to have the same", d.Key, d.Theirs),
			"%s: %s for %s (%s), %s", d.Key, config.Short(d.Theirs), c.Import.Of, d.TheirsOrigin, ours))
	}
	return findings
}

// handlers looks at the other runtime's handlers, which RuntimeClasses of running pods may
// name.
func (c *comparison) handlers(ctx context.Context) []diagnosis.Finding {
	var findings []diagnosis.Finding
	for _, name := range c.Missing {
		findings = append(findings, c.lost(name, "add [runtime.handlers."+name+"]: crius config --from-"+c.program()+" prints it",
			"crius has no such handler"))
	}
	table, err := oci.NewTable(c.now.Config.Runtime, c.now.Config.RunRoot)
	if err != nil {
		return append(findings, diagnosis.Fail("", "%s", fault.Text(err)))
	}
	reports, _ := table.Report(ctx)
	for _, r := range reports {
		switch {
		case !slices.Contains(c.Handlers, r.Name):
		case r.Ready && isCrios(r.Path):
			findings = append(findings, diagnosis.Warn("install the runtime before CRI-O's package is removed, and correct runtime.handlers."+r.Name+".path",
				"%s: %s is CRI-O's", r.Name, r.Path))
		case r.Ready:
			findings = append(findings, diagnosis.OK("%s: %s, %s", r.Name, r.Path, r.Version))
		default:
			findings = append(findings, c.lost(r.Name, "install the runtime, or correct runtime.handlers."+r.Name+".path", r.Error))
		}
	}
	return append(findings, c.differences(isHandlerKey)...)
}

// lost returns the finding for a handler that crius does not offer.
func (c *comparison) lost(name, do, why string) diagnosis.Finding {
	if _, err := exec.LookPath(c.Theirs.Runtime.Handlers[name].Path); err != nil {
		return diagnosis.Warn(do, "%s: %s; %s cannot run its pods either: %v", name, why, c.Import.Of, err)
	}
	return diagnosis.Fail(do, "%s: %s: its pods, which %s can run, do not start", name, why, c.Import.Of)
}

// cgroups compares the cgroup drivers of both runtimes and of the kubelet, which creates
// the cgroups of pods in the form of its own driver.
func (c *comparison) cgroups(context.Context) []diagnosis.Finding {
	ours, theirs, kubelets := c.now.Config.Runtime.CgroupDriver, c.Theirs.Runtime.CgroupDriver, kubelet.CgroupDriver(c.root)
	switch {
	case kubelets.Value != "" && kubelets.Value != ours:
		return []diagnosis.Finding{diagnosis.Fail(fmt.Sprintf("set runtime.cgroup_driver = %q", kubelets.Value),
			"the kubelet's cgroup driver is %s (%s), that of crius is %s: pods do not start", kubelets.Value, kubelets.File, ours)}
	case ours != theirs:
		return c.differences(func(key string) bool { return key == "runtime.cgroup_driver" })
	}
	return []diagnosis.Finding{diagnosis.OK("%s driver, as for %s", ours, c.Import.Of)}
}

// hooks reads the hooks of the other runtime, which for containerd are those that crius reads by default:
// one that crius cannot read keeps every container from being created.
func (c *comparison) hooks(context.Context) []diagnosis.Finding {
	dirs := c.Theirs.Runtime.HooksDir
	usable, errs := hooks.Check(dirs)
	var findings []diagnosis.Finding
	for _, err := range errs {
		findings = append(findings, diagnosis.Fail("correct or remove it: crius creates no container until then", "%v", err))
	}
	switch {
	case len(errs) > 0:
	case usable > 0 && c.program() == "containerd":
		findings = append(findings, diagnosis.Warn("set runtime.hooks_dir = [] to go on without them", "containerd runs no hooks, crius the %d in %s", usable, strings.Join(dirs, ", ")))
	default:
		findings = append(findings, diagnosis.OK("%d usable in %s", usable, strings.Join(dirs, ", ")))
	}
	return findings
}

// network compares the pod networks that both configurations select.
func (c *comparison) network(ctx context.Context) []diagnosis.Finding {
	findings := c.differences(isNetworkKey)
	ours, theirs := network.New(network.Options{Config: c.now.Config.Network}), network.New(network.Options{Config: c.Theirs.Network})
	err, theirErr := ours.Ready(ctx), theirs.Ready(ctx)
	switch {
	case err != nil && theirErr != nil:
		findings = append(findings, diagnosis.Warn("", "neither %s nor crius can put pods into a network: %s", c.Import.Of, fault.Text(err)))
	case err != nil:
		findings = append(findings, diagnosis.Fail("", "pods would not get into %s, where %s puts them: %s", networkOf(theirs), c.Import.Of, fault.Text(err)))
	case theirErr == nil && networkOf(ours) != networkOf(theirs):
		findings = append(findings, diagnosis.Fail("correct network.conf_dir or network.default_network",
			"%s puts pods into %s, crius would put them into %s", c.Import.Of, networkOf(theirs), networkOf(ours)))
	default:
		findings = append(findings, diagnosis.OK("pods would get into %s", networkOf(ours)))
	}
	return findings
}

func networkOf(n *network.Network) string {
	info := n.Info()
	return fmt.Sprintf("network %q of %v", info["network"], info["file"])
}

// kubelet compares the kubelet's endpoint with the sockets of crius, and reports the effect
// on its metrics.
func (c *comparison) kubelet(context.Context) []diagnosis.Finding {
	api := c.now.Config.API
	endpoint := kubelet.Endpoint(c.root)
	socket := strings.TrimPrefix(endpoint.Value, "unix://")
	var findings []diagnosis.Finding
	switch {
	case endpoint.Value == "":
		findings = append(findings, diagnosis.Warn(fmt.Sprintf("set containerRuntimeEndpoint: unix://%s in the kubelet's configuration", api.Listen),
			"the kubelet's files do not say where it looks for its runtime"))
	case sameSocket(socket, api.Listen):
		findings = append(findings, diagnosis.OK("its runtime endpoint is %s (%s), where crius listens", endpoint.Value, endpoint.File))
	case api.CrioSocket != "" && sameSocket(socket, api.CrioSocket):
		findings = append(findings, diagnosis.Warn(fmt.Sprintf("set it to unix://%s, so that the kubelet has the usage of disks from crius", api.Listen),
			"its runtime endpoint is %s (%s), where crius answers for api.crio_socket", endpoint.Value, endpoint.File))
	default:
		findings = append(findings, diagnosis.Fail(fmt.Sprintf("set it to unix://%s with the switch", api.Listen),
			"its runtime endpoint is %s (%s), where crius does not listen: no pod starts", endpoint.Value, endpoint.File))
	}
	for _, other := range []struct {
		kubelet.Setting
		uses string
	}{
		{kubelet.InstanceEndpoint(c.root), "kubeadm's next upgrade has the kubelet use"},
		{kubelet.CrictlEndpoint(c.root), "crictl uses"},
	} {
		socket := strings.TrimPrefix(other.Value, "unix://")
		if other.Value != "" && !sameSocket(socket, api.Listen) && (api.CrioSocket == "" || !sameSocket(socket, api.CrioSocket)) {
			findings = append(findings, diagnosis.Warn(fmt.Sprintf("set it to unix://%s with the switch", api.Listen),
				"%s %s (%s), where crius does not listen", other.uses, other.Value, other.File))
		}
	}
	if api.CrioSocket == "" && !kubelet.StatsFromCRI(c.root) {
		findings = append(findings, kubelet.NoPodNames())
	}
	return findings
}

// sameSocket compares paths of sockets. It treats /var/run, a link to /run, as /run.
func sameSocket(a, b string) bool {
	plain := func(path string) string {
		if rest, found := strings.CutPrefix(filepath.Clean(path), "/var/run/"); found {
			return "/run/" + rest
		}
		return filepath.Clean(path)
	}
	return plain(a) == plain(b)
}

// isCrios reports whether a file is in a directory of CRI-O's packages, which their removal
// deletes.
func isCrios(path string) bool {
	return slices.ContainsFunc([]string{"/etc/crio/", "/usr/libexec/crio/", "/usr/lib/crio/"},
		func(place string) bool { return strings.HasPrefix(path, place) })
}

// paths lists the files that crius is configured to read but that are missing or will be
// removed with CRI-O. A missing directory counts as empty, except those of CNI and of image verifiers.
func (c *comparison) paths(context.Context) []diagnosis.Finding {
	var findings []diagnosis.Finding
	for _, s := range c.now.Inputs() {
		_, err := os.Stat(s.Value)
		switch {
		case err != nil && isDirectory(s.Key) && s.Key != "image.verifiers_dir":
		case errors.Is(err, os.ErrNotExist):
			findings = append(findings, diagnosis.Warn("make it or correct "+s.Key, "%s: %s does not exist (%s)", s.Key, s.Value, s.Origin))
		case isCrios(s.Value):
			findings = append(findings, diagnosis.Warn("copy it before CRI-O's package is removed, and correct "+s.Key, "%s: %s is CRI-O's (%s)", s.Key, s.Value, s.Origin))
		}
	}
	if len(findings) == 0 {
		return []diagnosis.Finding{diagnosis.OK("nothing that the configuration of crius names is missing or CRI-O's")}
	}
	return findings
}

func isDirectory(key string) bool {
	return strings.HasSuffix(key, "_dir") || strings.HasSuffix(key, "_dirs") || key == "image.decryption_keys_path"
}
