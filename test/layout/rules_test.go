package layout

import "testing"

// TestImportRules tests the rules themselves.
func TestImportRules(t *testing.T) {
	for _, c := range []struct {
		from, imported string
		fits           bool
	}{
		{"cmd/crius", module + "server", true},
		{"cmd/crius", "github.com/spf13/cobra", true},
		{"cmd/crius/config", module + "storage", true},
		{"cmd/crius/config", "github.com/BurntSushi/toml", true},
		{"pod", "github.com/BurntSushi/toml", false},
		{"server", module + "pod", true},
		{"server", module + "storage", true},
		{"server", "google.golang.org/grpc/codes", true},
		{"server", module + "cmd/crius/config", false},
		{"pod", module + "server", false},
		{"pod", module + "internal/fault", true},
		{"pod", "google.golang.org/grpc/codes", false},
		{"pod", "github.com/opencontainers/runtime-spec/specs-go", false},
		{"oci", module + "oci/spec", true},
		{"oci/spec", "github.com/opencontainers/runtime-spec/specs-go", true},
		{"oci", module + "storage", false},
		{"network", module + "pod", false},
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
		{"test/integration", module + "test/kit/node", true},
		{"test/kit/node", module + "storage", true},
		{"cmd/crius", module + "test/kit/node", false},
		{"elsewhere", "fmt", false},
		{"servers", "fmt", false},
	} {
		if wrong := misplaced(c.from, c.imported); (wrong == "") != c.fits {
			t.Errorf("%s importing %s: %q", c.from, c.imported, wrong)
		}
	}
}
