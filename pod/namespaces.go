package pod

import (
	"context"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/oci/spec"
)

// namespacesOf is what the pod's namespaces are made from; nothing else is
// needed to remove them. Sysctls are those of pods that do not set them.
func (c *Config) namespacesOf(id string, cfg *cri.PodSandboxConfig, sysctls map[string]string) ns.Spec {
	sysctls, _ = spec.Sysctls(sysctls, cfg) // validatePod has refused what it could
	options := cfg.GetLinux().GetSecurityContext().GetNamespaceOptions()
	ownNet := options.GetNetwork() != cri.NamespaceMode_NODE
	s := ns.Spec{
		Dir:  c.NamespacesDir,
		Name: pinPrefix + id,
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

// makeNamespaces makes and pins the namespaces that the containers share. No
// process is needed to hold them.
func (s *Sandbox) makeNamespaces(context.Context) error {
	n := s.plan.Namespaces
	if !n.Net && !n.IPC && !n.UTS && len(n.UIDs) == 0 {
		return nil
	}
	_, err := ns.Create(n)
	return err
}
