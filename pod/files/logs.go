package files

import (
	"fmt"
	"os"
	"path/filepath"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
)

// LogPath joins the pod's directory and the container's path in it, which must
// not lead out (CVE-2025-0750). No path means that output is discarded.
func LogPath(pod *cri.PodSandboxConfig, cfg *cri.ContainerConfig) (string, error) {
	if cfg.GetLogPath() == "" || pod.GetLogDirectory() == "" {
		return "", nil
	}
	if !filepath.IsLocal(cfg.GetLogPath()) {
		return "", fmt.Errorf("log_path %q is outside the pod's log_directory: %w", cfg.GetLogPath(), fault.Invalid)
	}
	return filepath.Join(pod.GetLogDirectory(), cfg.GetLogPath()), nil
}

// MakeLogDir makes the directory of a log below the pod's, and that one as well. A
// link on the way that leads out of the directory of all pods' logs is refused
// (CVE-2025-0750); any other, and one in place of the file itself, the monitor
// refuses.
func MakeLogDir(root, logPath string) error {
	all, own := filepath.Split(filepath.Clean(root))
	if err := os.MkdirAll(all, 0o755); err != nil {
		return err
	}
	confined, err := os.OpenRoot(all)
	if err != nil {
		return err
	}
	defer confined.Close()
	dir := filepath.Join(own, filepath.Dir(logPath))
	if err := confined.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("log_path %q: %w: %w", logPath, err, fault.Invalid)
	}
	if _, err := confined.Stat(dir); err != nil {
		return fmt.Errorf("log_path %q: %w: %w", logPath, err, fault.Invalid)
	}
	return nil
}
