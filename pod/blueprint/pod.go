package blueprint

import (
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/oci/spec"
	"github.com/crius-run/crius/pod/records"
)

// PinPrefix is what the names of pinned namespaces begin with.
const PinPrefix = "crius-"

// PodRequest is a request for a pod.
type PodRequest struct {
	Handler   string
	ByDefault bool // the request named no handler
	Config    *cri.PodSandboxConfig
	Sandboxed bool        // the handler runs all containers of a pod in one runtime sandbox
	Origin    *oci.Origin // of the handler
	At        time.Time
}

// Pod plans a pod, except for its SELinux level.
func (p *Planner) Pod(id string, r PodRequest) records.PodPlan {
	return records.PodPlan{
		Handler:      r.Handler,
		ByDefault:    r.ByDefault,
		Config:       records.Message[*cri.PodSandboxConfig]{M: r.Config},
		CreatedAt:    r.At,
		BootID:       p.Boot,
		Namespaces:   p.Namespaces(id, r.Config),
		Infra:        sharesPIDs(r.Config) || r.Sandboxed,
		Sandboxed:    r.Sandboxed,
		OwnFiles:     true,
		CgroupPrefix: p.CgroupPrefix,
		Origin:       r.Origin,
	}
}

// sharesPIDs reports whether the containers of the pod share a PID namespace, whose first
// process is that of the infra container.
func sharesPIDs(cfg *cri.PodSandboxConfig) bool {
	return cfg.GetLinux().GetSecurityContext().GetNamespaceOptions().GetPid() == cri.NamespaceMode_POD
}

// Namespaces returns what the pod's namespaces are made from; nothing else is needed to
// remove them.
func (p *Planner) Namespaces(id string, cfg *cri.PodSandboxConfig) ns.Spec {
	sysctls, _ := spec.Sysctls(p.Defaults.Sysctls, cfg) // spec.ValidatePod has refused invalid ones
	options := cfg.GetLinux().GetSecurityContext().GetNamespaceOptions()
	ownNet := options.GetNetwork() != cri.NamespaceMode_NODE
	s := ns.Spec{
		Dir:  p.NamespacesDir,
		Name: PinPrefix + id,
		Net:  ownNet,
		// A pod on the node's network has the node's name (CRI:
		// PodSandboxConfig.hostname).
		UTS:     ownNet,
		IPC:     options.GetIpc() != cri.NamespaceMode_NODE,
		Sysctls: sysctls,
	}
	if ownNet {
		s.Hostname = cfg.GetHostname()
	}
	if users := options.GetUsernsOptions(); users != nil && users.GetMode() == cri.NamespaceMode_POD {
		s.UIDs, s.GIDs = idMaps(users.GetUids()), idMaps(users.GetGids())
	}
	return s
}

func idMaps(mappings []*cri.IDMapping) []ns.IDMap {
	maps := make([]ns.IDMap, len(mappings))
	for i, m := range mappings {
		maps[i] = ns.IDMap{Container: m.GetContainerId(), Host: m.GetHostId(), Size: m.GetLength()}
	}
	return maps
}
