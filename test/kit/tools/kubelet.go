package tools

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// KubeletVariable names Kubernetes releases, separated by commas, that replace
// the default list.
const KubeletVariable = "CRIUS_TEST_KUBELET"

// newest is the newest Kubernetes release with which crius is tested.
const newest = "v1.37.2"

// KubeletVersions returns the Kubernetes releases with whose kubelets crius is
// tested, newest first.
func KubeletVersions() []string {
	if named := os.Getenv(KubeletVariable); named != "" {
		return strings.Split(named, ",")
	}
	return []string{newest, "v1.36.3"}
}

const kubernetes = "k8s.io/kubernetes"

// Kubelet returns the path of a kubelet of a version, and builds a missing one:
// from the module proxy, within a quarter of an hour on two cores.
func Kubelet(ctx context.Context, version string) (string, error) {
	return kubernetesProgram(ctx, "kubelet-"+version, version, "kubelet", "build", "./cmd/kubelet")
}

// Kubelets builds the kubelets of all versions and returns the directory of the
// last.
func Kubelets(ctx context.Context) (dir string, err error) {
	for _, version := range KubeletVersions() {
		if dir, err = Kubelet(ctx, version); err != nil {
			return "", err
		}
	}
	return filepath.Dir(dir), nil
}

// kubernetesProgram returns the path of a Kubernetes program in a directory of
// .cache/bin. It builds a missing one from a package with a verb of go:
// "build", or "test" for a test program.
//
// Kubernetes takes its staging modules from its own tree, which the module
// proxy does not serve with it, so its go.mod is replaced with one that takes
// them from the proxy.
func kubernetesProgram(ctx context.Context, in, version, program, verb, pkg string) (string, error) {
	return cached(filepath.Join(in, program), func(_, dir string) *exec.Cmd {
		source, err := kubernetesSource(ctx, dir, version)
		flags := "-s -w -X k8s.io/component-base/version.gitVersion=" + version +
			" -X k8s.io/component-base/version.gitTreeState=clean"
		args := []string{verb, "-mod=mod", "-modfile", filepath.Join(dir, "go.mod"), "-trimpath",
			"-ldflags", flags, "-o", filepath.Join(dir, program)}
		if verb == "test" {
			args = append(args, "-c")
		}
		cmd := exec.CommandContext(ctx, "go", append(args, pkg)...)
		cmd.Dir = source
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=", "GOWORK=off")
		cmd.Err = errors.Join(cmd.Err, err)
		return cmd
	})
}

// kubernetesSource downloads Kubernetes, returns its path, and writes a go.mod
// and a go.sum to build it with.
func kubernetesSource(ctx context.Context, dir, version string) (string, error) {
	cmd := exec.CommandContext(ctx, "go", "mod", "download", "-json", kubernetes+"@"+version)
	cmd.Dir = dir // where no go.mod applies
	cmd.Env = append(os.Environ(), "GOFLAGS=", "GOWORK=off")
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("download %s@%s: %w: %s", kubernetes, version, err, out)
	}
	var module struct{ Dir string }
	if err := json.Unmarshal(out, &module); err != nil {
		return "", fmt.Errorf("download %s@%s: %w", kubernetes, version, err)
	}
	mod, err := os.ReadFile(filepath.Join(module.Dir, "go.mod"))
	if err != nil {
		return "", err
	}
	sum, err := os.ReadFile(filepath.Join(module.Dir, "go.sum"))
	if err != nil {
		return "", err
	}
	return module.Dir, errors.Join(
		os.WriteFile(filepath.Join(dir, "go.mod"), []byte(unstaged(string(mod), version)), 0o644),
		os.WriteFile(filepath.Join(dir, "go.sum"), sum, 0o644))
}

// unstaged makes a go.mod of Kubernetes take the staging modules by version:
// those of Kubernetes v1.X.Y are published as v0.X.Y.
func unstaged(mod, version string) string {
	published := "v0." + strings.TrimPrefix(version, "v1.")
	var out strings.Builder
	for line := range strings.Lines(mod) {
		if module, _, staged := strings.Cut(line, " => ./staging/src/"); staged {
			line = module + " => " + strings.TrimSpace(module) + " " + published + "\n"
		}
		out.WriteString(line)
	}
	return out.String()
}
