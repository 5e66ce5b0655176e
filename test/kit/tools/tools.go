// Package tools builds the programs with which crius is tested and that Debian
// lacks, or has too old, into the repository's .cache/bin: those of CRI from
// the module in test/tools, runc, containerd, gVisor, a registry and checkpointctl from those
// below it.
package tools

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
)

// Crictl returns the path of crictl, and builds a missing one.
func Crictl(ctx context.Context) (string, error) {
	return criTool(ctx, runtime.GOARCH, "crictl", "build", "-o")
}

// Critest is the same for critest, the conformance suite.
func Critest(ctx context.Context) (string, error) { return critest(ctx, runtime.GOARCH) }

func critest(ctx context.Context, arch string) (string, error) {
	return criTool(ctx, arch, "critest", "test", "-c", "-o")
}

// criTool builds a program in the version of the module in test/tools.
func criTool(ctx context.Context, arch, name string, verb ...string) (string, error) {
	const module = "sigs.k8s.io/cri-tools"
	source, version, err := pinned("", module)
	if err != nil {
		return "", err
	}
	return cached(filepath.Join(dirOf(arch), "cri-tools-"+version, name), func(_, dir string) *exec.Cmd {
		cmd := exec.CommandContext(ctx, "go", append(verb, filepath.Join(dir, name), module+"/cmd/"+name)...)
		cmd.Dir = source
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOARCH="+arch)
		return cmd
	})
}

// Runc is the same for a current runc: Debian's (1.1) has no id-mapped mounts. The version is that of the module in
// test/tools/runc. Building it needs a C compiler and libseccomp-dev.
func Runc(ctx context.Context) (string, error) {
	const module = "github.com/opencontainers/runc"
	dir, version, err := pinned("runc", module)
	if err != nil {
		return "", err
	}
	return cached(filepath.Join("runc-"+version, "runc"), func(_, out string) *exec.Cmd {
		cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-tags", "seccomp", "-o", filepath.Join(out, "runc"), module)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "CGO_ENABLED=1", "GOFLAGS=")
		return cmd
	})
}

// Containerd is the same for a current containerd, with its shim for runc in the same directory: Debian's (1.6) is much
// slower at pulling. The version is that of the module in test/tools/containerd.
func Containerd(ctx context.Context) (path string, err error) {
	const module = "github.com/containerd/containerd/v2"
	dir, version, err := pinned("containerd", module)
	if err != nil {
		return "", err
	}
	for _, name := range []string{"containerd-shim-runc-v2", "containerd"} {
		path, err = cached(filepath.Join("containerd-"+version, name), func(_, out string) *exec.Cmd {
			cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags", "-X "+module+"/version.Version="+version,
				"-o", filepath.Join(out, name), module+"/cmd/"+name)
			cmd.Dir = dir
			cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=")
			return cmd
		})
		if err != nil {
			return "", err
		}
	}
	return path, nil
}

// Runsc is the same for a current gVisor: Debian's is of 2022 and has other
// options. The version is that of the module in test/tools/runsc.
func Runsc(ctx context.Context) (string, error) {
	const module = "gvisor.dev/gvisor"
	dir, version, err := pinned("runsc", module)
	if err != nil {
		return "", err
	}
	return cached(filepath.Join("runsc-"+version, "runsc"), func(_, out string) *exec.Cmd {
		cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags", "-s -w -X gvisor.dev/gvisor/runsc/version.version="+version,
			"-o", filepath.Join(out, "runsc"), module+"/runsc")
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=")
		return cmd
	})
}

// RunscShim is the same for gVisor's shim, of the same version, which runs the
// runsc in PATH unless its configuration names another.
func RunscShim(ctx context.Context) (string, error) {
	const module = "gvisor.dev/gvisor"
	source, version, err := pinned("runsc", module)
	if err != nil {
		return "", err
	}
	return cached(filepath.Join("runsc-"+version, "containerd-shim-runsc-v1"), func(_, out string) *exec.Cmd {
		// The shim protects itself from the OOM killer, and does not start where
		// root may not do that, as in many containers. It is built from a copy that
		// starts nevertheless.
		cmd := exec.CommandContext(ctx, "/bin/sh", "-ec", `
cp go.mod go.sum tools.go "$0"; cd "$0"
go mod vendor
file=vendor/gvisor.dev/gvisor/pkg/shim/v1/manager.go
grep -q 'sys.SetOOMScore(cmd.Process.Pid, oomScoreMax); err != nil' $file
sed -i 's/sys.SetOOMScore(cmd.Process.Pid, oomScoreMax); err != nil/sys.SetOOMScore(cmd.Process.Pid, oomScoreMax); false/' $file
go build -mod=vendor -trimpath -ldflags '-s -w' -o containerd-shim-runsc-v1 gvisor.dev/gvisor/shim
`, out)
		cmd.Dir = source
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=")
		return cmd
	})
}

// RunscShimConfig returns the path of a configuration with which gVisor's shim
// runs the runsc of Runsc. That it has a shim for each container is not for
// this file to change: the shim reads it too late.
func RunscShimConfig(ctx context.Context) (string, error) {
	runsc, err := Runsc(ctx)
	if err != nil {
		return "", err
	}
	path := filepath.Join(filepath.Dir(runsc), "shim.toml")
	f, err := os.CreateTemp(filepath.Dir(path), "shim") // others may read it at the same time
	if err != nil {
		return "", err
	}
	defer func() { _ = os.Remove(f.Name()) }()
	_, err = fmt.Fprintf(f, "binary_name = %q\n[runsc_config]\noci-seccomp = \"true\"\nallow-suid = \"true\"\n", runsc)
	return path, errors.Join(err, f.Close(), os.Rename(f.Name(), path))
}

// KataShim returns the path of a shim that behaves like Kata's; each call
// builds it from test/kit/katashim. It needs containerd-shim-runc-v2.
func KataShim(ctx context.Context) (string, error) {
	if _, err := exec.LookPath("containerd-shim-runc-v2"); err != nil {
		return "", err
	}
	repo, err := Repository()
	if err != nil {
		return "", err
	}
	path := filepath.Join(repo, ".cache", "testkit", "containerd-shim-fakekata-v2")
	return path, compile(ctx, repo, false, []string{"go", "build", "-o", path, "./test/kit/katashim"})
}

// OldKataShim is KataShim for one that behaves like that of Kata 1.
func OldKataShim(ctx context.Context) (string, error) {
	path, err := KataShim(ctx)
	if err != nil {
		return "", err
	}
	if _, err := linked(path, "qemu-system-fakekata"); err != nil {
		return "", err
	}
	return linked(path, "containerd-shim-fakekata1-v2")
}

// WasmShim is KataShim for one that behaves like those for WebAssembly.
func WasmShim(ctx context.Context) (string, error) {
	path, err := KataShim(ctx)
	if err != nil {
		return "", err
	}
	return linked(path, "containerd-shim-fakewasm-v1")
}

// KataRuntime returns the path of a runtime that behaves like kata-runtime, the
// command line of Kata 1; each call builds it from test/kit/kataruntime.
func KataRuntime(ctx context.Context) (string, error) {
	repo, err := Repository()
	if err != nil {
		return "", err
	}
	path := filepath.Join(repo, ".cache", "testkit", "kata", "kata-runtime")
	if err := compile(ctx, repo, false, []string{"go", "build", "-o", path, "./test/kit/kataruntime"}); err != nil {
		return "", err
	}
	for _, name := range []string{"qemu-system-fakekata", "kata-proxy", "kata-shim"} {
		if _, err := linked(path, name); err != nil {
			return "", err
		}
	}
	return path, nil
}

// linked gives a program another name in its directory.
func linked(path, name string) (string, error) {
	target := filepath.Join(filepath.Dir(path), name)
	made, err := os.MkdirTemp(filepath.Dir(path), "link")
	if err != nil {
		return "", err
	}
	defer func() { _ = os.RemoveAll(made) }()
	temporary := filepath.Join(made, name)
	if err := os.Link(path, temporary); err != nil {
		return "", err
	}
	return target, os.Rename(temporary, target) // which does nothing if it is linked already
}

// dirOf returns the directory of programs for another processor than this machine's, and
// empty for this one.
func dirOf(arch string) string {
	if arch == runtime.GOARCH {
		return ""
	}
	return arch
}

// pinned returns a directory in test/tools, and the version of a module that the module there requires.
func pinned(name, module string) (dir, version string, err error) {
	repo, err := Repository()
	if err != nil {
		return "", "", err
	}
	dir = filepath.Join(repo, "test", "tools", name)
	version, err = required(filepath.Join(dir, "go.mod"), module)
	return dir, version, err
}

// required returns the version of a module that a go.mod requires.
func required(file, module string) (string, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(text)) {
		words := strings.Fields(strings.TrimPrefix(line, "require "))
		if len(words) >= 2 && words[0] == module {
			return words[1], nil
		}
	}
	return "", fmt.Errorf("%s does not require %s", file, module)
}

// cached returns the path of .cache/bin/NAME. If it is missing, the command
// returned by make builds the program in a temporary directory, from which it
// is moved to its place when complete: others may need it at the same time.
func cached(name string, make func(repo, dir string) *exec.Cmd) (string, error) {
	repo, err := Repository()
	if err != nil {
		return "", err
	}
	path := filepath.Join(repo, ".cache", "bin", name)
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return "", err
	}
	dir, err := os.MkdirTemp(filepath.Dir(path), "build")
	if err != nil {
		return "", err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if out, err := make(repo, dir).CombinedOutput(); err != nil {
		return "", fmt.Errorf("build %s: %w: %s", name, err, out)
	}
	err = os.Rename(filepath.Join(dir, filepath.Base(path)), path)
	if _, there := os.Stat(path); there == nil { // a directory does not replace what another one has made meanwhile
		return path, nil
	}
	return path, err
}
