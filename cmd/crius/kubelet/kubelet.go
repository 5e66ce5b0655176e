// Package kubelet reads from a node's files what its kubelet and its runtime have to
// agree on. It reads what the kubelet's next start will use, and not how one runs.
package kubelet

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"

	"github.com/crius-run/crius/cmd/crius/diagnosis"
)

// Setting is a value and the file that it is from. Both are empty if no file has it.
type Setting struct{ Value, File string }

// Files that kubeadm and distributions have. Flags override the configuration: a file, and
// over it those of a directory (--config-dir), if a flag names one.
var (
	flagFiles = []string{"/var/lib/kubelet/kubeadm-flags.env", "/etc/default/kubelet", "/etc/sysconfig/kubelet"}

	configFile = "/var/lib/kubelet/config.yaml"
)

// The keys of KubeletConfiguration are at the top of the file, those of feature gates below
// one, and their values here are plain words.
var (
	endpointFlag = regexp.MustCompile(`--container-runtime-endpoint[= ]["']?([^\s"']+)`)
	endpointKey  = regexp.MustCompile(`(?m)^containerRuntimeEndpoint:\s*["']?([^\s"'#]+)`)
	driverFlag   = regexp.MustCompile(`--cgroup-driver[= ]["']?([^\s"']+)`)
	driverKey    = regexp.MustCompile(`(?m)^cgroupDriver:\s*["']?([^\s"'#]+)`)
	configDir    = regexp.MustCompile(`--config-dir[= ]["']?([^\s"']+)`)
	statsKey     = regexp.MustCompile(`(?m)^[^#\n]*[\s{,]PodAndContainerStatsFromCRI:\s*(true|false)\b`)
)

// CrioSocket is where a kubelet's cAdvisor looks for CRI-O.
const CrioSocket = "/run/crio/crio.sock"

// NoPodNames is the finding on a node where the kubelet's cAdvisor is left to itself.
func NoPodNames() diagnosis.Finding {
	return diagnosis.Warn(fmt.Sprintf("set api.crio_socket = %q and restart crius, then the kubelet; or enable its feature gate PodAndContainerStatsFromCRI", CrioSocket),
		"the kubelet's container metrics lack pod names and pod network metrics: its cAdvisor does not support crius")
}

// Endpoint is where the kubelet finds its runtime, such as
// unix:///run/crius/crius.sock. The root of the node's files is root.
func Endpoint(root string) Setting { return find(root, endpointFlag, endpointKey) }

// CgroupDriver is systemd or cgroupfs. Newer kubelets ask their runtime first.
func CgroupDriver(root string) Setting { return find(root, driverFlag, driverKey) }

// StatsFromCRI tells whether the kubelet asks its runtime for the metrics of
// containers, and not its own cAdvisor.
func StatsFromCRI(root string) bool { return findKey(root, statsKey).Value == "true" }

func find(root string, flag, key *regexp.Regexp) Setting {
	if s := findFlag(root, flag); s != (Setting{}) {
		return s
	}
	return findKey(root, key)
}

func findFlag(root string, flag *regexp.Regexp) Setting {
	for _, file := range flagFiles {
		if m := flag.FindStringSubmatch(read(root, file)); m != nil {
			return Setting{m[1], file}
		}
	}
	return Setting{}
}

// findKey finds the last file that has the key.
func findKey(root string, key *regexp.Regexp) (found Setting) {
	for _, file := range configFiles(root) {
		if m := key.FindStringSubmatch(read(root, file)); m != nil {
			found = Setting{m[1], file}
		}
	}
	return found
}

// configFiles are the kubelet's in the order in which it reads them: of the directory those
// that end in .conf, below it as well, by the order of their paths.
func configFiles(root string) []string {
	files := []string{configFile}
	dir := findFlag(root, configDir).Value
	if dir == "" {
		return files
	}
	_ = filepath.WalkDir(filepath.Join(root, dir), func(path string, entry fs.DirEntry, err error) error {
		if err == nil && !entry.IsDir() && filepath.Ext(path) == ".conf" {
			if inside, err := filepath.Rel(root, path); err == nil {
				files = append(files, filepath.Join("/", inside))
			}
		}
		return nil // what cannot be read has nothing
	})
	return files
}

// read is the content of a file, empty if it cannot be read.
func read(root, path string) string {
	text, _ := os.ReadFile(filepath.Join(root, path))
	return string(text)
}
