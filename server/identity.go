package server

import "strings"

// Names by which the server may introduce itself. Kubelets put the name and the version into
// node.status.nodeInfo.containerRuntimeVersion, by which installers and agents choose what to do.
const (
	NameCrius      = "crius"
	NameCRIO       = "cri-o"
	NameContainerd = "containerd"
)

// standIn are those of the programs whose place crius takes, as of its release: a version
// of crius itself would count as one that is long out of support.
var standIn = map[string]string{NameCRIO: "1.37.0", NameContainerd: "2.4.0"}

// Identity returns the name and the version that the server reports for a version of crius. The
// build metadata of a version that is not crius's own says that it is crius.
func (c Config) Identity(crius string) (name, version string) {
	own := Semver(crius)
	switch {
	case c.RuntimeVersion != "":
		return c.RuntimeName, c.RuntimeVersion
	case standIn[c.RuntimeName] == "":
		return c.RuntimeName, own
	}
	return c.RuntimeName, standIn[c.RuntimeName] + "+crius." + strings.NewReplacer("+", ".").Replace(own)
}
