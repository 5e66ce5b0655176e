package main

import (
	"context"
	"os"
	"path/filepath"

	"github.com/crius-run/crius/server"
)

// checkIdentity says what installers and agents make of the name that the server reports, and
// whether what belongs to another name is there.
func (n *node) checkIdentity(context.Context) []finding {
	cfg := n.config.Config
	name, version := cfg.API.Identity(currentVersion().Crius)
	says := name + "://" + version
	switch name {
	case server.NameCRIO:
		return n.checkAsCRIO(says)
	case server.NameContainerd:
		return []finding{warn("see that installers are not run on this node, or have them write for CRI-O with api.runtime_name = \"cri-o\"",
			"the node's status says %s: installers write handlers into /etc/containerd, which crius does not read, and agents look for containerd's own API, which crius does not have", says)}
	}
	return []finding{ok("the node's status says %s: installers that know no crius, such as kata-deploy, want api.runtime_name; see docs/installers.md", says)}
}

// checkAsCRIO looks for what installers for CRI-O use: the directory of drop-ins, the socket and
// the unit that they restart.
func (n *node) checkAsCRIO(says string) []finding {
	cfg := n.config.Config
	findings := []finding{}
	if cfg.Runtime.CRIOHandlersDir == "" {
		findings = append(findings, warn(`set runtime.crio_handlers_dir = "/etc/crio/crio.conf.d"`, "handlers that installers write for CRI-O are not read"))
	}
	if cfg.API.CrioSocket == "" {
		findings = append(findings, warn(`set api.crio_socket = "/var/run/crio/crio.sock"`, "agents do not find the socket of CRI-O"))
	}
	const unit = "etc/systemd/system/crio.service"
	if target, err := os.Readlink(filepath.Join(n.host.root, unit)); err != nil || filepath.Base(target) != "crius.service" {
		findings = append(findings, warn("ln -s /usr/lib/systemd/system/crius.service /"+unit+" && systemctl daemon-reload", "there is no unit crio, which installers restart, that stands for crius"))
	}
	if len(findings) == 0 {
		return []finding{ok("the node's status says %s, and installers for CRI-O find its drop-ins, socket and unit", says)}
	}
	return append([]finding{ok("the node's status says %s", says)}, findings...)
}
