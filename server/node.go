package server

import (
	"context"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/pod/view"
)

// kubeletAPIVersion is the only value of VersionResponse.version that kubelets accept.
const kubeletAPIVersion = "0.1.0"

// features returns what crius itself does, whatever the handler. The kubelet
// turns it into node features, so a flag here is a promise to every pod.
func features(runtime *view.RuntimeStatus) *cri.RuntimeFeatures {
	return &cri.RuntimeFeatures{
		SupplementalGroupsPolicy:  true,
		UserNamespacesHostNetwork: true,
		MountOptions:              true,
		CgroupMountMode:           runtime.CgroupDelegation,
		SeccompProfileOci:         runtime.Seccomp,
	}
}

// nodeAPI is the part of RuntimeService for the node as a whole.
type nodeAPI struct {
	engine  Engine
	status  Status
	info    func(context.Context) map[string]string
	name    string // of the runtime
	version string

	runtimeText, networkText steadyText
	made                     atomic.Pointer[madeStatus] // the last response
}

func (s *nodeAPI) Version(ctx context.Context, _ *cri.VersionRequest) (*cri.VersionResponse, error) {
	return &cri.VersionResponse{
		Version:           kubeletAPIVersion,
		RuntimeName:       s.name,
		RuntimeVersion:    s.version,
		RuntimeApiVersion: apiVersion(ctx),
	}, nil
}

func (s *nodeAPI) Status(ctx context.Context, req *cri.StatusRequest) (*cri.StatusResponse, error) {
	runtime, err := s.status.RuntimeStatus(ctx)
	if err != nil {
		return nil, err
	}
	network, err := s.status.NetworkStatus(ctx)
	if err != nil {
		return nil, err
	}
	status := s.statusOf(runtime, network)
	if !req.GetVerbose() || s.info == nil {
		return status, nil
	}
	return &cri.StatusResponse{
		Status: status.Status, RuntimeHandlers: status.RuntimeHandlers, Features: status.Features,
		Info: validMap(s.info(ctx)),
	}, nil
}

// madeStatus is an immutable response with what it was made from.
type madeStatus struct {
	runtime  *view.RuntimeStatus
	network  *view.NetworkStatus
	response *cri.StatusResponse
}

func (s *nodeAPI) statusOf(runtime *view.RuntimeStatus, network *view.NetworkStatus) *cri.StatusResponse {
	if made := s.made.Load(); made != nil && made.runtime == runtime && made.network == network {
		return made.response
	}
	response := &cri.StatusResponse{
		Status: &cri.RuntimeStatus{Conditions: []*cri.RuntimeCondition{
			condition(cri.RuntimeReady, "RuntimeNotReady", s.runtimeText.of(runtime.NotReady)),
			s.networkCondition(network),
		}},
		RuntimeHandlers: runtime.Handlers,
		Features:        features(runtime),
	}
	s.made.Store(&madeStatus{runtime, network, response})
	return response
}

// networkCondition also says why pods cannot be given a network while the condition is met: for
// people, since kubelets read the reason and message of unmet conditions only.
func (s *nodeAPI) networkCondition(network *view.NetworkStatus) *cri.RuntimeCondition {
	if network.NotReady == nil && network.Grace != nil {
		return &cri.RuntimeCondition{Type: cri.NetworkReady, Status: true, Reason: "NetworkPluginInGracePeriod", Message: clip(s.networkText.of(network.Grace))}
	}
	return condition(cri.NetworkReady, "NetworkPluginNotReady", s.networkText.of(network.NotReady))
}

// condition returns a condition that is met unless text says why not; reason is
// then its CamelCase name.
func condition(kind, reason, text string) *cri.RuntimeCondition {
	if text == "" {
		return &cri.RuntimeCondition{Type: kind, Status: true}
	}
	return &cri.RuntimeCondition{Type: kind, Reason: reason, Message: clip(text)}
}

// steadyText keeps the text of a condition as long as its cause stays the same:
// the kubelet writes the node's status again, for the whole cluster, whenever
// the text changes. Errors of runtimes and plugins may contain times,
// durations, process ids and ports, so a text that differs from the last one
// only in its numbers is replaced with the last one.
type steadyText struct {
	mu    sync.Mutex
	text  string
	shape string // text without its numbers
}

// number matches a decimal or hexadecimal number, time, duration, address or
// version.
var number = regexp.MustCompile(`[0-9a-fA-F]*[0-9][0-9a-fA-FxTZµnumsh.:+-]*`)

// of returns the text of err; empty if there is none.
func (s *steadyText) of(err error) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil {
		s.text, s.shape = "", ""
		return ""
	}
	text := fault.Text(err)
	if shape := number.ReplaceAllString(text, "#"); shape != s.shape {
		s.text, s.shape = text, shape
	}
	return s.text
}

func (s *nodeAPI) RuntimeConfig(context.Context, *cri.RuntimeConfigRequest) (*cri.RuntimeConfigResponse, error) {
	return &cri.RuntimeConfigResponse{Linux: &cri.LinuxRuntimeConfiguration{CgroupDriver: s.engine.CgroupDriver()}}, nil
}

// UpdateRuntimeConfig sets the pod CIDR. CRI says that runtimes ignore an empty
// one.
func (s *nodeAPI) UpdateRuntimeConfig(_ context.Context, req *cri.UpdateRuntimeConfigRequest) (*cri.UpdateRuntimeConfigResponse, error) {
	cidr := req.GetRuntimeConfig().GetNetworkConfig().GetPodCidr()
	if cidr != "" {
		if err := in("runtime_config.network_config.pod_cidr", checkPodCIDR(cidr)); err != nil {
			return nil, err
		}
		if err := s.engine.SetPodCIDR(cidr); err != nil {
			return nil, err
		}
	}
	return &cri.UpdateRuntimeConfigResponse{}, nil
}

const identifiers = `[0-9A-Za-z-]+(\.[0-9A-Za-z-]+)*`

var completeVersion = regexp.MustCompile(`^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-` + identifiers + `)?(\+` + identifiers + `)?$`)

// IsVersion reports whether a text is a semantic version.
func IsVersion(text string) bool { return completeVersion.MatchString(text) }

// Semver turns a build's version, which may be a bare commit or empty, into a
// valid runtime_version: the kubelet does not report a node whose runtime has
// none.
func Semver(version string) string {
	if v := strings.TrimPrefix(version, "v"); IsVersion(v) {
		return v
	}
	build := regexp.MustCompile(`[^0-9A-Za-z-]+`).ReplaceAllString(version, "-")
	if build == "" {
		return "0.0.0"
	}
	return "0.0.0+" + build
}
