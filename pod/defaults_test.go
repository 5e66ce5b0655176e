package pod

import (
	"errors"
	"strings"
	"testing"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/fault"
)

// With a default that the kernel refuses no container would start (containerd#8304): neither a start nor a reload
// takes it.
func TestDefaultOpenFilesAboveTheKernels_containerd_8304(t *testing.T) {
	t.Parallel()
	for ulimit, refused := range map[string]bool{"nofile=1024": false, "core=unlimited": false, "nofile=unlimited": true, "nofile=1024:-1": true} {
		c := Config{DefaultUlimits: []string{ulimit}}
		_, err := c.defaults(t.Context(), new(conmon.HostPaths))
		if errors.Is(err, fault.Invalid) != refused || !refused && err != nil {
			t.Errorf("%s: %v", ulimit, err)
		}
		if refused && !strings.HasPrefix(err.Error(), "pod.default_ulimits: ulimit nofile unlimited is above fs.nr_open of the node, which is ") {
			t.Errorf("%s: %v", ulimit, err)
		}
	}
}
