// Guest runs inside the virtual machine that test/node boots, as root, on a
// systemd node without other prerequisites. It installs crius from its DEB,
// configures it like an operator, runs critest against the service and looks
// for what is left behind. Its results go into the directory out.
//
// For an upgrade it installs the previous package instead, runs pods, and
// upgrades the package under them (upgrade.go). For an install it does what an
// operator does with a node (install.go). For rows of test/bench it measures
// them (bench.go). For checkpoints it makes and restores some (checkpoint.go).
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/crius-run/crius/test/kit/critest"
	"github.com/crius-run/crius/test/kit/inventory"
	"github.com/crius-run/crius/test/kit/registry"
	"github.com/crius-run/crius/test/kit/tools"
	"github.com/crius-run/crius/test/kit/wait"
)

const (
	socket    = "/run/crius/crius.sock"
	nriSocket = "/run/nri/nri.sock"
	address   = "127.0.0.1:5000" // of the registry
	examples  = "/usr/share/doc/crius/examples"
	podLogs   = logs + "/critest" // below the kubelet's directory, which has the label of logs
)

// options are the host's settings; it writes them as JSON.
type options struct {
	Driver, Handler, Focus string
	Mode, Rows, Tests      string
}

func main() {
	err := os.MkdirAll("out", 0o755)
	if err == nil {
		err = run(context.Background())
	}
	// A copy: for the original, Debian's SELinux policy has a domain that may not
	// read the journal when a service runs it.
	const journalctl = "/usr/local/bin/journalctl"
	err = errors.Join(err, command("install", "-m", "755", "/usr/bin/journalctl", journalctl))
	save("crius.log", journalctl, "--no-pager", "-o", "short-precise", "-u", "crius.service")
	save("journal.log", journalctl, "--no-pager", "-o", "short-precise", "-b")
	err = errors.Join(err, saveAudit())
	if err != nil {
		err = errors.Join(err, os.WriteFile("out/error", []byte(err.Error()), 0o644))
		fmt.Fprintln(os.Stderr, "guest:", err)
	}
}

func run(ctx context.Context) error {
	var o options
	data, err := os.ReadFile("options.json")
	if err == nil {
		err = json.Unmarshal(data, &o)
	}
	if err != nil {
		return err
	}
	if o.Mode == "bench" {
		return bench(ctx, strings.Fields(o.Rows))
	}
	suite, err := critest.New(tools.Parts{Suite: "./critest", Busybox: "./busybox", Standin: "./standin"})
	if err != nil {
		return err
	}
	images := registry.New()
	suite.Push(images)
	if err := images.Listen(address); err != nil {
		return err
	}
	defer images.Close()
	switch o.Mode {
	case "upgrade":
		return upgrade(ctx, o)
	case "install":
		return install(ctx, o, images)
	case "checkpoint":
		return checkpoint(ctx, o)
	}
	if err := errors.Join(installPackage("crius.deb"), configure(o, slowPlugins)); err != nil {
		return err
	}
	log, err := os.Create("out/suite.log")
	if err != nil {
		return err
	}
	defer log.Close()
	suite.Focus, suite.Log = o.Focus, io.MultiWriter(log, os.Stdout) // the console shows the progress
	if err := makePodLogs(); err != nil {
		return err
	}
	wrong := demo(ctx, o)
	before, err := take(o)
	if err != nil {
		return err
	}
	dir, err := filepath.Abs("out")
	if err != nil {
		return err
	}
	here := func(f func() error) error { return f() }
	if _, err := suite.Run(ctx, critest.Target{Socket: socket, NRI: nriSocket, Handler: o.Handler, Dir: dir, Tmp: podLogs, Do: here}); err != nil {
		return err
	}
	more, err := promises(ctx, o)
	if err != nil {
		return fmt.Errorf("beside the suite: %w", err)
	}
	of, err := seLinuxPromises(ctx)
	if err != nil {
		return fmt.Errorf("SELinux: %w", err)
	}
	wrong = slices.Concat(wrong, more, of)
	if err := os.WriteFile("out/wrong", []byte(strings.Join(wrong, "\n")), 0o644); err != nil {
		return err
	}
	return saveLeftovers(o, before)
}

// makePodLogs makes the directory of logs like a kubelet, which SELinux
// recognizes by its program.
func makePodLogs() error {
	if err := os.MkdirAll(podLogs, 0o755); err != nil || !enforcing() {
		return err
	}
	return command("restorecon", "-R", logs)
}

// slowPlugins are settings for the suite, whose plugins take two seconds. The previous package of an
// upgrade may not know them.
const slowPlugins = "[nri]\nrequest_timeout = \"1m\"\n"

// saveLeftovers records what was added since before, and stops the service.
func saveLeftovers(o options, before []string) error {
	left, err := settle(o, before)
	if err != nil {
		return err
	}
	if err := command("systemctl", "stop", "crius.service"); err != nil {
		left = append(left, err.Error())
	}
	return os.WriteFile("out/left", []byte(strings.Join(left, "\n")), 0o644)
}

// parent returns the cgroup of all pods, as crius is configured and in the
// hierarchy.
func (o options) parent() string {
	if o.Driver == "systemd" {
		return "pods.slice"
	}
	return "/pods"
}

func installPackage(deb string) error { return command("dpkg", "--install", deb) }

// configure follows the package's documentation. The service starts with the
// shipped settings, and more in its drop-in file.
func configure(o options, more string) error {
	config := fmt.Sprintf(`log_level = "debug"
[pod]
cgroup_parent = %q
[runtime]
cgroup_driver = %q
`, o.parent(), o.Driver) + more
	if _, err := os.Stat("runc-current"); err == nil {
		const runc = "/usr/local/bin/runc-current" // where SELinux has a label for programs
		if err := command("install", "-m", "755", "runc-current", runc); err != nil {
			return err
		}
		config += fmt.Sprintf("[runtime.handlers.runc-current]\npath = %q\n", runc)
	}
	for path, text := range map[string]string{
		"/etc/crius/crius.toml.d/50-node.toml":              config,
		"/etc/containers/registries.conf.d/50-critest.conf": critest.Registries(address),
	} {
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
			return err
		}
	}
	for _, argv := range [][]string{
		{"install", "-D", "-t", "/etc/cni/net.d", "-m", "644", examples + "/cni/10-crius-bridge.conflist"},
		{"install", "-m", "644", examples + "/sysctl.conf", "/etc/sysctl.d/99-crius.conf"},
		{"install", "-m", "644", examples + "/modules-load.conf", "/etc/modules-load.d/crius.conf"},
		{"systemctl", "restart", "systemd-modules-load.service", "systemd-sysctl.service"},
		{"systemctl", "enable", "--now", "crius.service"},
	} {
		if err := command(argv...); err != nil {
			return err
		}
	}
	return nil
}

func command(argv ...string) error {
	if out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(argv, " "), err, out)
	}
	return nil
}

// save keeps a command's output.
func save(name string, argv ...string) {
	out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput()
	if err != nil {
		out = fmt.Appendf(out, "%s: %v\n", argv[0], err)
	}
	if err := os.WriteFile(filepath.Join("out", name), out, 0o644); err != nil {
		fmt.Fprintln(os.Stderr, "guest:", err)
	}
}

// lasting is what the first pod makes and all others use.
var lasting = []string{
	"file: /run/crius/runtime (d---------)", "file: /run/crius/runtime/runc (d---------)", "file: /run/crius/runtime/crun (d---------)", "file: /run/crius/runtime/runc-current (d---------)",
	"file: /run/crius/lock (----------)", // the previous version of an upgrade may not have it
	"file: /run/netns (d---------)", "file: /run/ipcns (d---------)", "file: /run/utsns (d---------)",
	"cgroup: /sys/fs/cgroup/system.slice/crius.service/monitors",
	"cgroup: /sys/fs/cgroup/pods", "cgroup: /sys/fs/cgroup/pods.slice",
	"file: /var/lib/crius/checkpoint.key (-rw-------)", "file: /var/lib/crius/checkpoint.pub (-rw-r--r--)",
	"cgroup: /sys/fs/cgroup/test", "cgroup: /sys/fs/cgroup/test.slice", // the suite's own parent
}

// crunCache holds seccomp filters, which crun compiles once for all containers.
const crunCache = "file: /run/crius/runtime/crun/.cache"

// take lists everything on the machine that pods may leave behind, including
// each entry of the server's directories, and systemd's units.
func take(o options) ([]string, error) {
	here := func(f func() error) error { return f() }
	scopes := []inventory.Scope{
		{Dir: "/run/crius", Roots: []string{"/run/crius"}, Cgroup: "/" + strings.TrimPrefix(o.parent(), "/"), Within: here, Links: []string{"lo", "cni0"}},
		{Dir: "/var/lib/crius", Roots: []string{"/var/lib/crius"}, Storage: "/var/lib/containers/storage", Leases: "/var/lib/cni/networks"},
		{Dir: "/run/netns", Roots: []string{"/run/netns", "/run/ipcns", "/run/utsns"}},
		{Dir: "/var/lib/containers/storage"},
		{Cgroup: "/system.slice/crius.service"},
		{Cgroup: "/test"},
		{Cgroup: "/test.slice"},
	}
	var lines []string
	for _, s := range scopes {
		snapshot, err := inventory.Take(s)
		if err != nil {
			return nil, err
		}
		lines = append(lines, snapshot.Lines()...)
	}
	lines = slices.DeleteFunc(lines, func(line string) bool {
		return slices.Contains(lasting, line) || strings.HasPrefix(line, crunCache)
	})
	units, err := units()
	return append(lines, units...), err
}

// units returns systemd's units that concern crius, and all failed ones.
func units() ([]string, error) {
	out, err := exec.Command("systemctl", "list-units", "--all", "--plain", "--no-legend", "--type=scope,service,mount").Output()
	if err != nil {
		return nil, fmt.Errorf("systemctl: %w", err)
	}
	var lines []string
	for line := range strings.Lines(string(out)) {
		// name, loaded, active, state, description
		if f := strings.Fields(line); len(f) > 3 && (strings.Contains(f[0], "crius") || f[2] == "failed") {
			lines = append(lines, "unit: "+strings.Join(f[:4], " "))
		}
	}
	return lines, nil
}

// settle waits until there is no more than before, and returns what is left.
func settle(o options, before []string) ([]string, error) {
	known := map[string]bool{}
	for _, line := range before {
		known[line] = true
	}
	var left []string
	var err error
	wait.Until(context.Background(), func() bool {
		left, err = take(o)
		left = slices.DeleteFunc(left, func(line string) bool { return known[line] })
		return err != nil || len(left) == 0
	})
	return left, err
}
