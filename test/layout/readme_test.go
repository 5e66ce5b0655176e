package layout

import (
	"regexp"
	"strings"
	"testing"

	"github.com/crius-run/crius/test/kit/tools"
)

// TestReadmeSaysWhatIsTested: the versions under "Tested with" are those of the tests.
func TestReadmeSaysWhatIsTested(t *testing.T) {
	t.Parallel()
	_, section, _ := strings.Cut(read(t, "README.md"), "\n## Tested with\n")
	section, _, _ = strings.Cut(section, "\n## ")
	wanted := tools.KubeletVersions()
	for file, version := range map[string]string{
		"test/tools/go.mod":               `sigs\.k8s\.io/cri-tools (v\S+)`,
		"test/tools/distribution/go.mod":  `distribution/distribution/v3 (v\S+)`,
		"test/tools/checkpointctl/go.mod": `checkpoint-restore/checkpointctl (v\S+)`,
		"test/tools/runc/go.mod":          `opencontainers/runc (v\S+)`,
		"test/kit/tools/criu.go":          `criuVersion = "([^"]+)"`,
	} {
		found := regexp.MustCompile(version).FindStringSubmatch(read(t, file))
		if found == nil {
			t.Fatalf("%s: no version", file)
		}
		wanted = append(wanted, found[1])
	}
	for _, version := range wanted {
		if !strings.Contains(section, version) {
			t.Errorf("README.md does not say that %s is tested", version)
		}
	}
}
