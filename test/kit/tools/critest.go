package tools

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
)

// Parts are the programs in critest and its images, all of them static.
type Parts struct {
	Suite   string // unmodified critest
	Busybox string
	Standin string // see test/conformance/standin
}

// CritestParts builds the missing parts; busybox takes some minutes.
func CritestParts(ctx context.Context) (Parts, error) { return CritestPartsFor(ctx, runtime.GOARCH) }

// CritestPartsFor does so for another processor, by its GOARCH.
func CritestPartsFor(ctx context.Context, arch string) (p Parts, err error) {
	if p.Suite, err = critest(ctx, arch); err != nil {
		return Parts{}, err
	}
	if p.Busybox, err = busybox(ctx, arch); err != nil {
		return Parts{}, err
	}
	if p.Standin, err = standin(ctx, arch); err != nil {
		return Parts{}, err
	}
	return p, nil
}

// Busybox returns the path of a busybox with every applet that critest calls
// and with a shell that does not run applets by itself. It builds a missing one
// from Debian's sources.
func Busybox(ctx context.Context) (string, error) { return busybox(ctx, runtime.GOARCH) }

// compilers are the prefixes of Debian's C compilers for other processors.
var compilers = map[string]string{"amd64": "x86_64-linux-gnu-", "arm64": "aarch64-linux-gnu-"}

func busybox(ctx context.Context, arch string) (string, error) {
	repo, err := Repository()
	if err != nil {
		return "", err
	}
	script := filepath.Join(repo, "test", "conformance", "busybox.sh")
	text, err := os.ReadFile(script)
	if err != nil {
		return "", err
	}
	return fromDebian(ctx, filepath.Join(dirOf(arch), "busybox"), text, func(_, dir string) *exec.Cmd {
		cmd := exec.CommandContext(ctx, script, filepath.Join(dir, "busybox"))
		if dirOf(arch) != "" {
			cmd.Env = append(os.Environ(), "CROSS_COMPILE="+compilers[arch])
		}
		return cmd
	})
}
