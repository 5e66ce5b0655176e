package conmon_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	_ "github.com/crius-run/crius/conmon/monitor" // so that a cached result is not that of another monitor
	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/test/kit/claim"
	"github.com/crius-run/crius/test/kit/wait"
)

// Built once for all tests.
var (
	monitorPath string // crius-conmon
	rootfs      string // of every container: /probe and some empty directories
	cgroupRoot  string // of every test
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(serverRole); dir != "" {
		actAsServer(dir)
		return
	}
	if os.Getenv(poserRole) != "" {
		actAsPoser()
		return
	}
	if os.Getenv(scarceRole) != "" {
		must(withoutDescriptors())
		return
	}
	flag.Parse()
	for _, name := range []string{"test.fuzz", "test.list"} {
		if flag.Lookup(name).Value.String() != "" {
			os.Exit(m.Run()) // fuzz targets parse text, and need no monitor
		}
	}
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "conmon")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	rootfs = filepath.Join(dir, "rootfs")
	for _, name := range []string{"proc", "dev", "sys", "tmp"} {
		must(os.MkdirAll(filepath.Join(rootfs, name), 0o755))
	}
	must(os.Chmod(dir, 0o755)) // containers may run as another user
	monitorPath = filepath.Join(dir, "crius-conmon")
	build(monitorPath, "github.com/crius-run/crius/cmd/crius-conmon")
	build(filepath.Join(rootfs, "probe"), "./testdata/probe")
	must(mountHugetlb())
	owned, err := claim.New()
	must(err)
	cgroupRoot = "/" + owned.ID
	defer func() {
		if err := errors.Join(cgroup.Remove(context.Background(), cgroupRoot), owned.Release()); err != nil {
			fmt.Fprintln(os.Stderr, "test cgroups left:", err)
		}
	}()
	// Orphans become children of this process, and not of an init that may be
	// slow.
	must(unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
	code := m.Run()
	if !reapAll() {
		fmt.Fprintln(os.Stderr, "processes are left behind")
		code = 1
	}
	return code
}

// reapAll reaps the orphans and reports whether all have ended. A killed
// process has left its cgroup, and has no command line, before it can be
// reaped.
func reapAll() bool {
	return wait.Until(context.Background(), func() bool {
		_, err := unix.Wait4(-1, nil, unix.WNOHANG, nil)
		return errors.Is(err, unix.ECHILD)
	})
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

func build(output, pkg string) {
	c := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", output, pkg)
	c.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := c.CombinedOutput(); err != nil {
		panic(fmt.Sprintf("build %s: %v\n%s", pkg, err, text))
	}
}

// mountHugetlb mounts, on v1, the last controller of the unified hierarchy of a
// hybrid host: crun before 1.9 refuses to work beside one. It stays mounted.
func mountHugetlb() error {
	controllers, err := os.ReadFile("/sys/fs/cgroup/unified/cgroup.controllers")
	if err != nil || !strings.Contains(string(controllers), "hugetlb") {
		return nil //nolint:nilerr // there is none to mount
	}
	if err := os.MkdirAll("/sys/fs/cgroup/hugetlb", 0o755); err != nil {
		return err
	}
	return unix.Mount("cgroup", "/sys/fs/cgroup/hugetlb", "cgroup", 0, "hugetlb")
}
