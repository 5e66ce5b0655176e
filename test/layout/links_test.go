package layout

import (
	"slices"
	"testing"
)

// monitorLinks are the packages that crius-conmon may link, with everything
// below their paths, in addition to the standard library: it runs once per
// container.
var monitorLinks = []string{"golang.org/x/sys", module + "cmd/crius-conmon", module + "conmon", module + "internal"}

// monitorLacks are the standard packages that are too large for it.
var monitorLacks = []string{"net/http", "crypto/tls", "text/template", "html", "database", "go", "testing"}

// shimLinks are what crius-conmon-shim may link in addition: the protocol of
// the shims and no more of containerd. It runs once per container of a shim.
var shimLinks = []string{
	module + "cmd/crius-conmon-shim", "github.com/containerd/ttrpc", "github.com/containerd/log", "github.com/sirupsen/logrus",
	"github.com/containerd/containerd/api", "github.com/opencontainers/go-digest", "github.com/opencontainers/image-spec",
	"google.golang.org/protobuf", "google.golang.org/genproto/googleapis/rpc/status",
	"google.golang.org/grpc/codes", "google.golang.org/grpc/status", "google.golang.org/grpc/internal", "google.golang.org/grpc/grpclog",
	"google.golang.org/grpc/connectivity", "google.golang.org/grpc/serviceconfig",
}

func TestMonitorStaysSmall(t *testing.T) {
	linksOnly(t, "crius-conmon", monitorLinks, monitorLacks)
}

// TestShimMonitorStaysSmall: only a separate program links what the shims'
// protocol needs, and no other of those that run once per container.
func TestShimMonitorStaysSmall(t *testing.T) {
	lacks := slices.DeleteFunc(slices.Clone(monitorLacks), func(l string) bool { return l == "go" }) // protobuf links a little of it
	linksOnly(t, "crius-conmon-shim", append(slices.Clone(monitorLinks), shimLinks...), lacks)
	for _, links := range shimLinks {
		if slices.Contains(monitorLinks, links) {
			t.Errorf("crius-conmon may link %s", links)
		}
	}
}

// unpackerLinks are what crius-unpack may link: what unpacks, and what names layers. It is started once per
// image, and has nothing that could add a layer to the store.
var unpackerLinks = []string{
	module + "cmd/crius-unpack", module + "storage/unpack/worker", module + "storage/unpack/wire", module + "storage/unpack/extract", module + "storage/unpack/gunzip", module + "storage/unpack/layers", module + "storage/diskusage", module + "storage/frames",
	module + "internal",
	"golang.org/x/sys", "github.com/opencontainers/go-digest",
	"github.com/klauspost/compress", "github.com/ulikunitz/xz", "github.com/vbatts/tar-split", "github.com/cyphar/filepath-securejoin",
}

// TestUnpackerStaysSmall: packages that it links and does not use, such as
// containers/image, would still be initialized at each start.
func TestUnpackerStaysSmall(t *testing.T) {
	linksOnly(t, "crius-unpack", unpackerLinks, []string{"net/http", "crypto/tls", "text/template", "html", "go", "testing"})
}

// linksOnly checks what a frequently started program links.
func linksOnly(t *testing.T, program string, links, allLacks []string) {
	t.Helper()
	for _, p := range goList(t, "-deps", "./cmd/"+program) {
		for _, lacks := range allLacks {
			if p.Standard && below(p.ImportPath, lacks) {
				t.Errorf("%s links %s: find the importer with go list -deps", program, p.ImportPath)
			}
		}
		if !p.Standard && !slices.ContainsFunc(links, func(allowed string) bool { return below(p.ImportPath, allowed) }) {
			t.Errorf("%s links %s, and may link beside the standard library only %q", program, p.ImportPath, links)
		}
	}
}
