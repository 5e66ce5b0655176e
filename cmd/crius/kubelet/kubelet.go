// Package kubelet reads the settings that a node's kubelet and its runtime must agree on
// from the kubelet's files. A running kubelet may still use older settings.
package kubelet

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"

	"github.com/crius-run/crius/cmd/crius/diagnosis"
)

// Setting is a value and the file that sets it. Both are empty if no file does.
type Setting struct{ Value, File string }

// Files of kubeadm and of distributions. Flags override the configuration, which is a file
// and, if a flag names a directory (--config-dir), the files in that.
var (
	flagFiles = []string{"/var/lib/kubelet/kubeadm-flags.env", "/etc/default/kubelet", "/etc/sysconfig/kubelet"}

	configFile = "/var/lib/kubelet/config.yaml"
)

// Keys of KubeletConfiguration. Feature gates are below a key, all others at the top of the
// file; the values needed here are plain words.
var (
	endpointFlag = regexp.MustCompile(`--container-runtime-endpoint[= ]["']?([^\s"']+)`)
	endpointKey  = regexp.MustCompile(`(?m)^containerRuntimeEndpoint:\s*["']?([^\s"'#]+)`)
	driverFlag   = regexp.MustCompile(`--cgroup-driver[= ]["']?([^\s"']+)`)
	driverKey    = regexp.MustCompile(`(?m)^cgroupDriver:\s*["']?([^\s"'#]+)`)
	configDir    = regexp.MustCompile(`--config-dir[= ]["']?([^\s"']+)`)
	crictlKey    = regexp.MustCompile(`(?m)^runtime-endpoint:\s*["']?([^\s"'#]+)`)
	statsKey     = regexp.MustCompile(`(?m)^[^#\n]*[\s{,]PodAndContainerStatsFromCRI:\s*(true|false)\b`)
)

// CrioSocket is where a kubelet's cAdvisor looks for CRI-O.
const CrioSocket = "/run/crio/crio.sock"

// NoPodNames is the finding for a node whose kubelet's cAdvisor finds no runtime to ask.
func NoPodNames() diagnosis.Finding {
	return diagnosis.Warn(fmt.Sprintf("set api.crio_socket = %q and restart crius, then the kubelet; or enable its feature gate PodAndContainerStatsFromCRI", CrioSocket),
		"the kubelet's container metrics lack pod names and pod network metrics: its cAdvisor does not support crius")
}

// Endpoint returns the kubelet's runtime endpoint, such as unix:///run/crius/crius.sock.
// The node's files are below root.
func Endpoint(root string) Setting { return find(root, endpointFlag, endpointKey) }

// InstanceEndpoint returns the endpoint that kubeadm 1.34 and later write into the kubelet's
// configuration at each upgrade.
func InstanceEndpoint(root string) Setting {
	return findIn(root, "/var/lib/kubelet/instance-config.yaml", endpointKey)
}

// CrictlEndpoint returns the endpoint of crictl, which asks the same runtime as the kubelet.
func CrictlEndpoint(root string) Setting { return findIn(root, "/etc/crictl.yaml", crictlKey) }

func findIn(root, file string, key *regexp.Regexp) Setting {
	if m := key.FindStringSubmatch(read(root, file)); m != nil {
		return Setting{m[1], file}
	}
	return Setting{}
}

// CgroupDriver returns systemd or cgroupfs. Newer kubelets ask their runtime first.
func CgroupDriver(root string) Setting { return find(root, driverFlag, driverKey) }

// StatsFromCRI reports whether the kubelet gets metrics of containers from its runtime
// instead of its own cAdvisor.
func StatsFromCRI(root string) bool { return findKey(root, statsKey).Value == "true" }

func find(root string, flag, key *regexp.Regexp) Setting {
	if s := findFlag(root, flag); s != (Setting{}) {
		return s
	}
	return findKey(root, key)
}

func findFlag(root string, flag *regexp.Regexp) Setting {
	for _, file := range flagFiles {
		if s := findIn(root, file, flag); s != (Setting{}) {
			return s
		}
	}
	return Setting{}
}

// findKey finds the last file that has the key.
func findKey(root string, key *regexp.Regexp) (found Setting) {
	for _, file := range configFiles(root) {
		if s := findIn(root, file, key); s != (Setting{}) {
			found = s
		}
	}
	return found
}

// configFiles returns the kubelet's configuration files in the order in which it reads
// them. In the directory and below it, those are files that end in .conf, sorted by path.
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
		return nil // unreadable: counts as empty
	})
	return files
}

// read returns the content of a file, "" if it cannot be read.
func read(root, path string) string {
	text, _ := os.ReadFile(filepath.Join(root, path))
	return string(text)
}
