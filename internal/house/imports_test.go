package house

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/crius-run/crius/"

// tags are the build tags of the product.
const tags = "containers_image_openpgp,exclude_graphdriver_btrfs"

// floors is the house from its roof down: a room imports rooms of lower floors
// and no other, so the rooms of one floor do not know each other. A room is a
// package with everything below its path; the longest path wins.
var floors = [][]string{
	{"test"},
	{"cmd/crius", "internal/testkit"},
	{"internal/config"},
	{"server"},
	{"internal/pod"},
	{"oci", "storage", "network"},
	{"cmd/crius-conmon", "cmd/crius-conmon-shim"},
	{"conmon/monitor", "conmon/shim"},
	{"conmon"},
	{"internal"},
}

// lastFree is the lowest floor that may import whatever it likes.
const lastFree = 1

// owners are the rooms below that to which a foreign package is confined.
var owners = map[string][]string{
	"google.golang.org/grpc":                  {"server"},
	"google.golang.org/grpc/codes":            {"server", "conmon/shim"}, // ttrpc answers with them
	"google.golang.org/grpc/status":           {"server", "conmon/shim"},
	"google.golang.org/protobuf":              {"server", "internal/pod", "oci", "storage", "network", "conmon/shim", "cmd/crius-conmon-shim"},
	"github.com/containerd":                   {"conmon/shim", "cmd/crius-conmon-shim"},
	"k8s.io/cri-api":                          {"server", "internal/pod", "oci", "storage", "network"},
	"net/http":                                {"server", "storage"},
	"github.com/BurntSushi/toml":              {"internal/config"},
	"github.com/spf13":                        {"internal/config"},
	"go.podman.io":                            {"storage"},
	"github.com/containernetworking":          {"network"},
	"github.com/opencontainers/runtime-spec":  {"oci"},
	"tags.cncf.io/container-device-interface": {"oci"},
}

// leafImports are the foreign packages that the leaves may use.
var leafImports = []string{"golang.org/x/sys", "golang.org/x/sync", "github.com/vishvananda", "github.com/fsnotify"}

// monitorLinks are the packages that crius-conmon may link, with everything
// below their paths, beside the standard library: it runs once per container.
// (golang.org/x/sys is itself; the rest is ours.)
var monitorLinks = []string{"golang.org/x/sys", module + "cmd/crius-conmon", module + "conmon", module + "internal"}

// monitorLacks are the standard packages that are too large for it.
var monitorLacks = []string{"net/http", "crypto/tls", "text/template", "html", "database", "go", "testing"}

// goPackage is what the tests want of go list.
type goPackage struct {
	ImportPath string
	Standard   bool
	Imports    []string
	Error      *struct{ Err string }
}

func goList(t *testing.T, args ...string) []goPackage {
	t.Helper()
	cmd := exec.Command("go", append([]string{"list", "-e", "-tags", tags, "-json=ImportPath,Standard,Imports,Error"}, args...)...)
	cmd.Dir = root
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	var all []goPackage
	for d := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p goPackage
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		if p.Error != nil {
			t.Errorf("%s: %s", p.ImportPath, p.Error.Err)
		}
		all = append(all, p)
	}
	if len(all) == 0 {
		t.Fatal("go list lists nothing")
	}
	return all
}

// below says whether the path is that of a package or below it.
func below(path, parent string) bool {
	return path == parent || strings.HasPrefix(path, parent+"/")
}

// room finds the room of a package of ours and its floor, 0 being the roof.
func room(pkg string) (name string, floor int) {
	floor = -1
	for i, rooms := range floors {
		for _, candidate := range rooms {
			if below(pkg, candidate) && len(candidate) > len(name) {
				name, floor = candidate, i
			}
		}
	}
	return name, floor
}

// shimLinks are what crius-conmon-shim may link beside that: the protocol of the
// shims and no more of containerd. It runs once per container of a shim.
var shimLinks = []string{
	module + "cmd/crius-conmon-shim", "github.com/containerd/ttrpc", "github.com/containerd/log", "github.com/sirupsen/logrus",
	"github.com/containerd/containerd/api", "github.com/opencontainers/go-digest", "github.com/opencontainers/image-spec",
	"google.golang.org/protobuf", "google.golang.org/genproto/googleapis/rpc/status",
	"google.golang.org/grpc/codes", "google.golang.org/grpc/status", "google.golang.org/grpc/internal", "google.golang.org/grpc/grpclog",
	"google.golang.org/grpc/connectivity", "google.golang.org/grpc/serviceconfig",
}

// misplaced says what is wrong with an import, "" if nothing.
func misplaced(from, imported string) string {
	here, floor := room(from)
	if floor < 0 {
		return "is in no room: give it a floor in internal/house"
	}
	if ours, ok := strings.CutPrefix(imported, module); ok {
		there, lower := room(ours)
		switch {
		case there == here || lower > floor:
			return ""
		case lower == floor:
			return "imports " + ours + ", which is on the same floor"
		}
		return "imports " + ours + ", which is on a higher floor"
	}
	if floor <= lastFree {
		return ""
	}
	owned := ""
	for confined := range owners { // the longest path wins
		if below(imported, confined) && len(confined) > len(owned) {
			owned = confined
		}
	}
	if rooms := owners[owned]; owned != "" && !slices.Contains(rooms, here) {
		return "imports " + imported + ", which is the business of " + strings.Join(rooms, ", ")
	}
	if here == "internal" && foreign(imported) && !slices.ContainsFunc(leafImports, func(l string) bool { return below(imported, l) }) {
		return "imports " + imported + ", which is too much for a leaf"
	}
	return ""
}

// foreign says whether a package is neither ours nor of the standard library.
func foreign(pkg string) bool {
	host, _, _ := strings.Cut(pkg, "/")
	return strings.Contains(host, ".")
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

func TestMonitorStaysSmall(t *testing.T) {
	linksOnly(t, "crius-conmon", monitorLinks, monitorLacks)
}

// TestShimMonitorStaysSmall: what the shims' protocol needs is linked by a program
// of its own, and by that alone among those that run once per container.
func TestShimMonitorStaysSmall(t *testing.T) {
	lacks := slices.DeleteFunc(slices.Clone(monitorLacks), func(l string) bool { return l == "go" }) // of which protobuf has a little
	linksOnly(t, "crius-conmon-shim", append(slices.Clone(monitorLinks), shimLinks...), lacks)
	for _, links := range shimLinks {
		if slices.Contains(monitorLinks, links) {
			t.Errorf("crius-conmon may link %s", links)
		}
	}
}

// linksOnly checks what a program that runs once per container is made of.
func linksOnly(t *testing.T, program string, links, allLacks []string) {
	t.Helper()
	for _, p := range goList(t, "-deps", "./cmd/"+program) {
		for _, lacks := range allLacks {
			if p.Standard && below(p.ImportPath, lacks) {
				t.Errorf("%s links %s: see with go list -deps who imports it", program, p.ImportPath)
			}
		}
		if !p.Standard && !slices.ContainsFunc(links, func(allowed string) bool { return below(p.ImportPath, allowed) }) {
			t.Errorf("%s links %s, and may link beside the standard library only %q", program, p.ImportPath, links)
		}
	}
}

// TestImportRules tries the rules themselves.
func TestImportRules(t *testing.T) {
	for _, c := range []struct {
		from, imported string
		fits           bool
	}{
		{"cmd/crius", module + "server", true},
		{"cmd/crius", "github.com/spf13/cobra", true},
		{"internal/config", module + "storage", true},
		{"server", module + "internal/pod", true},
		{"server", module + "storage", true},
		{"server", "google.golang.org/grpc/codes", true},
		{"server", module + "internal/config", false},
		{"internal/pod", module + "server", false},
		{"internal/pod", module + "internal/fault", true},
		{"internal/pod", "google.golang.org/grpc/codes", false},
		{"internal/pod", "github.com/opencontainers/runtime-spec/specs-go", false},
		{"oci", module + "oci/spec", true},
		{"oci/spec", "github.com/opencontainers/runtime-spec/specs-go", true},
		{"oci", module + "storage", false},
		{"network", module + "internal/pod", false},
		{"storage", "go.podman.io/image/v5/copy", true},
		{"network", "go.podman.io/image/v5/copy", false},
		{"conmon", module + "conmon/monitor", false},
		{"oci", module + "conmon/shim", true},
		{"conmon/shim", module + "conmon/wire", true},
		{"conmon/shim", module + "conmon/monitor", false},
		{"conmon/monitor", module + "conmon/shim", false},
		{"conmon/shim", "github.com/containerd/ttrpc", true},
		{"conmon/shim", "google.golang.org/grpc/status", true},
		{"conmon/shim", "google.golang.org/grpc", false},
		{"conmon", "github.com/containerd/ttrpc", false},
		{"oci", "github.com/containerd/ttrpc", false},
		{"conmon/monitor", module + "conmon", true},
		{"conmon/monitor", "k8s.io/cri-api/pkg/apis/runtime/v1", false},
		{"internal/fault", module + "conmon", false},
		{"internal/record", module + "internal/fault", true},
		{"internal/record", "golang.org/x/sync/errgroup", true},
		{"internal/record", "encoding/json", true},
		{"internal/record", "github.com/google/uuid", false},
		{"test/integration", "google.golang.org/grpc", true},
		{"test/integration", module + "internal/testkit/node", true},
		{"internal/testkit/node", module + "storage", true},
		{"cmd/crius", module + "internal/testkit/node", false},
		{"elsewhere", "fmt", false},
		{"servers", "fmt", false},
	} {
		if wrong := misplaced(c.from, c.imported); (wrong == "") != c.fits {
			t.Errorf("%s importing %s: %q", c.from, c.imported, wrong)
		}
	}
}

// root is the top of the repository, seen from this package.
var root = filepath.Join("..", "..")
