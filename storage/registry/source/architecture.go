package source

import "runtime"

// ForeignArchitecture returns the architecture that an image's config names, shortened, if this
// node's processor does not run its programs; empty: it does, or the config does not say.
func ForeignArchitecture(named string) string {
	const most = 16 // bytes: the config is the author's
	runs32 := map[string]string{"amd64": "386", "arm64": "arm"}
	if named == "" || named == runtime.GOARCH || named == runs32[runtime.GOARCH] {
		return ""
	}
	return named[:min(len(named), most)]
}
