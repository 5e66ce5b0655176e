package layout

import (
	"maps"
	"slices"
	"strings"
	"testing"
)

// layers is the tree from the top down. A path stands for a package and all
// below it; the longest matching path wins. Imports go down or stay within a
// path: two paths of one layer do not import each other, and internal holds
// only leaves.
var layers = [][]string{
	{"test"},
	{"cmd/crius", "test/kit"},
	{"server"},
	{"pod", "cmd/crius-unpack"},
	{"oci", "storage", "network", "nri"},
	{"cmd/crius-conmon", "cmd/crius-conmon-shim"},
	{"conmon/monitor", "conmon/shim"},
	{"conmon"},
	{"internal"},
}

// lastFree is the lowest layer that may import any third-party package.
const lastFree = 1

// owners are the paths to which a third-party package is confined in the layers below that.
var owners = map[string][]string{
	"google.golang.org/grpc":                  {"server"},
	"google.golang.org/grpc/codes":            {"server", "conmon/shim"}, // ttrpc answers with them
	"google.golang.org/grpc/status":           {"server", "conmon/shim"},
	"google.golang.org/protobuf":              {"server", "pod", "oci", "storage", "network", "conmon/shim", "cmd/crius-conmon-shim"},
	"github.com/containerd":                   {"conmon/shim", "cmd/crius-conmon-shim"},
	"github.com/containerd/nri":               {"nri"},
	"k8s.io/cri-api":                          {"server", "pod", "oci", "storage", "network", "nri"},
	"net/http":                                {"server", "storage"},
	"github.com/BurntSushi/toml":              {"storage"},
	"github.com/spf13":                        {},
	"go.podman.io":                            {"storage"},
	"github.com/containernetworking":          {"network"},
	"github.com/opencontainers/runtime-spec":  {"oci", "nri"},
	"tags.cncf.io/container-device-interface": {"oci"},
	"github.com/intel/goresctrl":              {"oci"},
}

// leafImports are the third-party packages that internal may use.
var leafImports = []string{"golang.org/x/sys", "golang.org/x/sync", "github.com/vishvananda", "github.com/fsnotify"}

// longest returns the longest of the paths at or above the package, "" if none is.
func longest(pkg string, paths []string) (found string) {
	for _, path := range paths {
		if below(pkg, path) && len(path) > len(found) {
			found = path
		}
	}
	return found
}

// misplaced returns what is wrong with an import, "" if nothing.
func misplaced(from, imported string) string {
	layerOf := map[string]int{}
	for i, layer := range layers {
		for _, path := range layer {
			layerOf[path] = i
		}
	}
	paths := slices.Collect(maps.Keys(layerOf))
	here := longest(from, paths)
	if here == "" {
		return "is in no layer: give it one in test/layout"
	}
	if ours, ok := strings.CutPrefix(imported, module); ok {
		if there := longest(ours, paths); there != here && layerOf[there] <= layerOf[here] {
			return "imports " + ours + ", which is not below it"
		}
		return ""
	}
	owned := longest(imported, slices.Collect(maps.Keys(owners)))
	if layerOf[here] > lastFree && owned != "" && !slices.Contains(owners[owned], here) {
		return "imports " + imported + ", which only the layers above and these may: " + strings.Join(owners[owned], ", ")
	}
	host, _, _ := strings.Cut(imported, "/")
	if here == "internal" && strings.Contains(host, ".") && longest(imported, leafImports) == "" {
		return "imports " + imported + ", which is too much for a leaf"
	}
	return ""
}

func TestImportsGoDown(t *testing.T) {
	for _, p := range goList(t, "./...") {
		from := strings.TrimPrefix(p.ImportPath, module)
		for _, imported := range p.Imports {
			if wrong := misplaced(from, imported); wrong != "" {
				t.Errorf("%s %s", from, wrong)
			}
		}
	}
}
