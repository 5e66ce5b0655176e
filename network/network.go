// Package network attaches pods to their network through CNI plugins, and
// forwards host ports to them if no plugin does (package hostport).
//
// Plan decides what an ADD will do, and the caller can record it before
// anything happens: the present configuration, with all its plugins, and every
// argument. A DEL uses only that record, so it undoes what was done, also after
// a restart, with the configuration directory changed or empty, or after the
// pod's network namespace has gone. For a pod whose record is lost, Reclaim
// finds out what can be undone.
//
// The configuration directory is read again at each use. It has a handful of
// small files, whereas plugins run for tens of milliseconds; and without a
// watch none can run out and no change can be missed.
//
// Plugins are not trusted: their time, their output and their children are bounded.
package network

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/utils"
	"github.com/containernetworking/cni/pkg/version"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/network/hostport"
)

// ifName is the name of the pod's interface, by the convention of Kubernetes.
const ifName = "eth0"

// Network is the node's pod network.
type Network struct {
	now   atomic.Pointer[Options]
	ports *hostport.Table

	mu         sync.Mutex
	reported   map[string]string // unusable files that have been logged, with the reason
	podCIDRs   []string          // as announced by the kubelet; nil: not yet
	health     health
	collecting chan struct{} // closed at the end of the running collection; nil: none runs
}

// New returns the network that cfg describes. It reads and runs nothing before
// it is used.
func New(cfg Options) *Network {
	n := &Network{ports: hostport.New(), reported: map[string]string{}}
	n.use(cfg)
	return n
}

// Configure replaces the configuration for what begins from now on. The kubelet announces its ranges once, so
// another template, or another directory for what it gives, is rendered at once.
func (n *Network) Configure(cfg Config) {
	before := n.config()
	n.use(Options{Config: cfg, PodCIDRFile: before.PodCIDRFile})
	if cfg.ConfTemplate == before.ConfTemplate && cfg.ConfDir == before.ConfDir {
		return
	}
	if err := n.SetPodCIDR(strings.Join(n.announced(), ",")); err != nil {
		slog.Error("network.conf_template not rendered: correct it, and then restart the kubelet", "err", err)
	}
}

func (n *Network) use(cfg Options) {
	if cfg.Timeout <= 0 {
		cfg.Timeout = DefaultConfig().Timeout
	}
	n.now.Store(&cfg)
}

func (n *Network) config() *Options { return n.now.Load() }

// Pod is what the network needs to know about a pod.
type Pod struct {
	ID, Name, Namespace, UID string

	NetNS    string // pinned network namespace; empty once it is gone
	CacheDir string // the pod's own directory for libcni's records

	PortMappings []*cri.PortMapping
	Annotations  map[string]string
	DNS          *cri.DNSConfig
	CgroupParent string

	// ConfDir is the directory with its network's configuration; empty:
	// Config.ConfDir.
	ConfDir string
	// OwnKernel: the pod's own kernel removes the addresses from the interface.
	OwnKernel bool
}

// Attachment records how a pod is, or is about to be, attached. Plan makes it
// and Attach completes it; nothing reachable from it may be modified.
type Attachment struct {
	Network      string                     `json:"network"`                // name of the network
	Interface    string                     `json:"interface"`              // in the pod
	Conf         json.RawMessage            `json:"conf"`                   // CNI configuration list, plugins included
	Args         [][2]string                `json:"args"`                   // CNI_ARGS
	Capabilities map[string]json.RawMessage `json:"capabilities,omitempty"` // runtimeConfig
	NetNSInode   uint64                     `json:"netnsInode,omitempty"`   // of the namespace; 0: unknown
	IPs          []string                   `json:"ips,omitempty"`          // of Interface, the primary first
	Result       json.RawMessage            `json:"result,omitempty"`       // of ADD; empty: it did not succeed, as far as known

	// HostPorts are those that crius itself forwards to the pod; others are among
	// Capabilities. HostTargets, their destinations, are known after ADD.
	HostPorts   []hostport.Mapping `json:"hostPorts,omitempty"`
	HostTargets []hostport.Target  `json:"hostTargets,omitempty"`
}

// Plan decides how p, whose namespace need not exist yet, will be attached, by
// the present configuration. It fails with fault.Unavailable if there is no
// network or one of its plugins is missing, and with fault.Invalid for a pod
// that no network can serve. It changes nothing: record the Attachment before
// you pass it to Attach.
func (n *Network) Plan(p Pod) (*Attachment, error) {
	args, err := p.arguments()
	if err != nil {
		return nil, fmt.Errorf("plan pod network: %w", err)
	}
	chosen, err := n.chooseIn(cmp.Or(p.ConfDir, n.config().ConfDir))
	if err != nil {
		return nil, fmt.Errorf("plan pod network: %w", err)
	}
	if err := n.installed(chosen.list); err != nil {
		return nil, fmt.Errorf("plan pod network %q: %w", chosen.list.Name, err)
	}
	a := &Attachment{
		Network:   chosen.list.Name,
		Interface: ifName,
		Conf:      chosen.list.Bytes,
		Args:      args,
	}
	if err := n.offer(p, chosen.list, a); err != nil {
		return nil, fmt.Errorf("plan pod network %q: %w", a.Network, err)
	}
	return a, nil
}

// offer determines the plugins' arguments for p, and what crius does itself.
func (n *Network) offer(p Pod, list *libcni.NetworkConfigList, a *Attachment) error {
	ports, err := portMappings(p.PortMappings)
	if err != nil {
		return err
	}
	if n.ownPorts(list) {
		if err := hostport.Validate(ports); err != nil {
			return err
		}
		a.HostPorts, ports = ports, nil
	}
	offers, err := n.offers(p, ports)
	if err != nil {
		return err
	}
	a.Capabilities, err = capabilities(offers, list)
	return err
}

// arguments returns CNI_ARGS, with the names that Kubernetes' network plugins
// know.
func (p Pod) arguments() ([][2]string, error) {
	args := [][2]string{
		{"IgnoreUnknown", "1"},
		{"K8S_POD_NAMESPACE", p.Namespace},
		{"K8S_POD_NAME", p.Name},
		{"K8S_POD_INFRA_CONTAINER_ID", p.ID},
		{"K8S_POD_UID", p.UID},
	}
	for _, arg := range args {
		if strings.ContainsAny(arg[1], ";=") || strings.ContainsFunc(arg[1], func(r rune) bool { return r < ' ' }) {
			return nil, fmt.Errorf("%s %.128q has a character that is not allowed in CNI arguments: %w", arg[0], arg[1], fault.Invalid)
		}
	}
	return args, p.check()
}

func (p Pod) check() error {
	if err := utils.ValidateContainerID(p.ID); err != nil {
		return fmt.Errorf("pod id %.128q: %w: %w", p.ID, err, fault.Invalid)
	}
	if !filepath.IsAbs(p.CacheDir) { // libcni would use a directory shared by all runtimes
		return fmt.Errorf("cache directory %.128q of pod %s is not an absolute path: %w", p.CacheDir, p.ID, fault.Invalid)
	}
	return nil
}

// Attach runs the CNI verb ADD as planned in a, within Config.Timeout for the
// whole chain of plugins. It returns a complete Attachment, to be recorded in
// place of a. After an error the plugins may have done a part: call Detach with
// a.
//
// The error is fault.Unavailable if a plugin is missing or asks for a later
// retry, or crius lacks what it needs for the host ports of p; fault.Timeout if
// the time was up; and fault.Precondition if another pod has one of the host
// ports.
func (n *Network) Attach(ctx context.Context, p Pod, a *Attachment) (*Attachment, error) {
	done, err := n.attach(ctx, p, a)
	if err != nil {
		return nil, fmt.Errorf("attach pod to network %q: %w", a.Network, classify(err))
	}
	return done, nil
}

func (n *Network) attach(ctx context.Context, p Pod, a *Attachment) (*Attachment, error) {
	if err := p.check(); err != nil {
		return nil, err
	}
	list, err := a.list()
	if err != nil {
		return nil, err
	}
	if err := n.installed(list); err != nil { // before the first plugin has run
		return nil, err
	}
	inode, err := ns.Inode(p.NetNS)
	if err != nil {
		return nil, err
	}
	if err := n.collected(ctx); err != nil {
		return nil, err
	}
	if err := n.ports.Claim(p.ID, a.HostPorts); err != nil {
		return nil, err
	}
	ctx, cancel := limit(ctx, n.config().Timeout)
	defer cancel()
	result, err := trace.Get(ctx, "CNI ADD", func(ctx context.Context) (types.Result, error) {
		return n.cni(p).AddNetworkList(ctx, list, a.runtimeConf(p, p.NetNS))
	})
	if err != nil {
		return nil, err
	}
	done := *a
	done.NetNSInode = inode
	if done.IPs, err = addressesOf(result, p.NetNS, a.Interface, n.config().PrimaryIP); err != nil {
		return nil, err
	}
	if len(done.IPs) == 0 {
		slog.WarnContext(ctx, "pod has no IP address: the plugins of its network gave its interface none", "pod", p.ID, "network", a.Network, "interface", a.Interface)
	}
	if done.Result, err = encode(result, list.CNIVersion); err != nil {
		return nil, err
	}
	if len(a.HostPorts) > 0 {
		done.HostTargets, err = targets(done.IPs)
	}
	return &done, err
}

// Detach runs the CNI verb DEL for what a records, with the result of the ADD
// (or libcni's own record if a crash came before the result was recorded). The
// plugins get the network namespace only while it is the same one that was
// attached. A nil Attachment, and one that is already detached, are not an
// error.
//
// Before that it stops forwarding the pod's host ports: the address must not
// become another pod's while they are still forwarded to it.
//
// After any error the same call must be repeated until it succeeds. It is
// fault.Unavailable if a plugin is missing, and then no plugin has run.
func (n *Network) Detach(ctx context.Context, p Pod, a *Attachment) error {
	if a == nil {
		return nil
	}
	if err := n.detach(ctx, p, a); err != nil {
		return fmt.Errorf("detach pod from network %q: %w", a.Network, classify(err))
	}
	return nil
}

func (n *Network) detach(ctx context.Context, p Pod, a *Attachment) error {
	if err := p.check(); err != nil {
		return err
	}
	closePorts := func(ctx context.Context) error { return n.ports.Close(ctx, a.exposed(p.ID)) }
	if err := trace.Do(ctx, "close host ports", closePorts); err != nil {
		return fmt.Errorf("remove host ports: %w", err)
	}
	list, err := a.list()
	if err != nil {
		return err
	}
	if err := n.installed(list); err != nil {
		return err
	}
	if err := a.remember(list); err != nil {
		return err
	}
	netNS := a.netNS(p)
	if p.OwnKernel {
		if err := a.readdress(netNS); err != nil {
			return err
		}
	}
	ctx, cancel := limit(ctx, n.config().Timeout)
	defer cancel()
	return trace.Do(ctx, "CNI DEL", func(ctx context.Context) error {
		return n.cni(p).DelNetworkList(ctx, list, a.runtimeConf(p, netNS))
	})
}

// netNS returns the path of the pod's network namespace if it is still the one
// that was attached: the path may be empty, gone, or another namespace's by
// now.
func (a *Attachment) netNS(p Pod) string {
	if p.NetNS == "" {
		return ""
	}
	inode, err := ns.Inode(p.NetNS)
	if err != nil || (a.NetNSInode != 0 && a.NetNSInode != inode) {
		return ""
	}
	return p.NetNS
}

// remember puts the recorded result of ADD where DEL expects it, as CNI
// requires from version 0.4.0 on. Libcni would take it from its cache
// directory, and still does if that has one.
func (a *Attachment) remember(list *libcni.NetworkConfigList) error {
	if known, err := version.GreaterThanOrEqualTo(list.CNIVersion, "0.4.0"); err != nil || !known || len(a.Result) == 0 {
		return err
	}
	for i, plugin := range list.Plugins {
		with, err := libcni.InjectConf(plugin, map[string]any{"prevResult": a.Result})
		if err != nil {
			return err
		}
		list.Plugins[i] = with
	}
	return nil
}

func (a *Attachment) list() (*libcni.NetworkConfigList, error) {
	list, err := parse(a.Conf)
	if err != nil {
		return nil, fmt.Errorf("recorded CNI configuration: %w", err)
	}
	return list, nil
}

func (a *Attachment) runtimeConf(p Pod, netNS string) *libcni.RuntimeConf {
	capabilities := make(map[string]any, len(a.Capabilities))
	for name, value := range a.Capabilities {
		capabilities[name] = value
	}
	return &libcni.RuntimeConf{
		ContainerID:    p.ID,
		NetNS:          netNS,
		IfName:         a.Interface,
		Args:           a.Args,
		CapabilityArgs: capabilities,
	}
}

// Info returns information for people: the configuration in force, the
// directories of plugins, and any problem.
func (n *Network) Info() map[string]any {
	info := map[string]any{"confDir": n.config().ConfDir, "pluginDirs": n.config().PluginDirs}
	if cidrs := n.announced(); len(cidrs) > 0 {
		info["podCIDRs"] = cidrs
	}
	chosen, err := n.choose()
	if err == nil {
		var plugins []string
		for _, plugin := range chosen.list.Plugins {
			plugins = append(plugins, plugin.Network.Type)
		}
		info["network"] = chosen.list.Name
		info["file"] = chosen.file
		info["cniVersion"] = chosen.list.CNIVersion
		info["hostPorts"] = portsByCNI
		if n.ownPorts(chosen.list) {
			info["hostPorts"] = portsByCrius
		}
		info["plugins"] = plugins
		err = n.installed(chosen.list)
	}
	if err != nil {
		info["error"] = fault.Text(err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.health.err != nil {
		info["notReadySince"], info["notReady"] = n.health.since, fault.Text(n.health.err)
	}
	return info
}

func (n *Network) cni(p Pod) *libcni.CNIConfig {
	return libcni.NewCNIConfigWithCacheDir(n.config().PluginDirs, p.CacheDir, &runner{})
}

func limit(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, d, fmt.Errorf("the plugins took longer than %s: %w", d, fault.Timeout))
}

// installed checks that all plugins of list can be run, including those for
// address management (IPAM).
func (n *Network) installed(list *libcni.NetworkConfigList) error {
	var wanted []string
	for _, plugin := range list.Plugins {
		wanted = append(wanted, plugin.Network.Type)
		if ipam := plugin.Network.IPAM.Type; ipam != "" {
			wanted = append(wanted, ipam)
		}
	}
	slices.Sort(wanted)
	var errs []error
	for _, plugin := range slices.Compact(wanted) {
		_, err := find(plugin, n.config().PluginDirs)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// classify adds the fault to the error of a plugin that asked for a retry.
func classify(err error) error {
	var told *types.Error
	if errors.As(err, &told) && (told.Code == types.ErrTryAgainLater || told.Code == types.ErrPluginNotAvailable) {
		return fmt.Errorf("%w: %w", err, fault.Unavailable)
	}
	return err
}
