// Command kataruntime is a runtime for tests that behaves like kata-runtime,
// the command line of Kata 1, without a virtual machine. It ignores --root and
// keeps its state where Kata does, below /run; only runc's is in the directory of
// --kata-config. Each pod has a machine and a proxy, processes of their own that delete ends, which
// does nothing without the bundle; a container's cgroup is called kata_NAME;
// what exec has started is out of reach, except for signals to its kata-shim;
// a container that has been sent SIGTERM by kill is killed soon after that.
// It lets runc make the containers. If the machine dies, every kata-shim stays:
// see machine.go.
//
// Programs of other names in its directory are links to it: see tools.KataRuntime.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

const version = `kata-runtime  : 1.13.0-alpha0
   commit   : fake
   OCI specs: 1.0.1-dev
`

// call is a command line.
type call struct {
	state string // directory
	verb  string
	args  []string // after the verb, without the id
	id    string
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run() error {
	switch filepath.Base(os.Args[0]) {
	case machineProgram, proxyProgram:
		for {
			time.Sleep(time.Hour) // until it is killed
		}
	case shimProgram:
		return shim(os.Args[1], os.Args[2], os.Args[3])
	}
	c, err := parse(os.Args[1:])
	if err != nil {
		return err
	}
	switch c.verb {
	case "--version":
		fmt.Print(version)
		return nil
	case "list":
		return c.list()
	case "create":
		return c.create()
	}
	if _, err := os.Stat(c.mapping()); err != nil {
		if c.verb == "delete" && slices.Contains(c.args, "--force") {
			return nil
		}
		return fmt.Errorf("container not found: %s", c.id)
	}
	if c.machineDied() {
		return c.withoutMachine()
	}
	switch c.verb {
	case "delete":
		return c.remove()
	case "exec":
		return c.exec()
	case "kill":
		return c.kill()
	}
	return c.runc(append([]string{c.verb}, c.args...)...)
}

// parse reads a command line. The id is the last argument, except with kill,
// where a signal follows.
func parse(args []string) (c call, err error) {
	for len(args) > 0 && strings.HasPrefix(args[0], "--") {
		flag, value, joined := strings.Cut(args[0], "=")
		if flag == "--version" {
			return call{verb: flag}, nil
		}
		if args = args[1:]; !joined {
			value, args = args[0], args[1:]
		}
		if flag == "--kata-config" {
			c.state = value
		}
	}
	if len(args) == 0 || c.state == "" {
		return c, errors.New("usage: kata-runtime --kata-config DIR VERB [ARG...] ID")
	}
	c.verb, c.args = args[0], args[1:]
	for _, arg := range c.args {
		if len(arg) == 64 {
			c.id = arg
		}
	}
	return c, nil
}

func (c call) path(names ...string) string {
	return filepath.Join(append([]string{c.state}, names...)...)
}

// Where Kata 1 keeps its state.
const (
	mappings  = "/run/kata-containers/containers-mapping"
	sandboxes = "/run/vc/sbs"
	configs   = "/var/lib/vc/sbs"                       // until 1.9
	shares    = "/run/kata-containers/shared/sandboxes" // what the guest sees of the node
)

func (c call) mapping() string            { return filepath.Join(mappings, c.id) }
func (c call) sandbox(name string) string { return filepath.Join(sandboxes, c.id, name) }
func (c call) config() string             { return filepath.Join(configs, c.id, "config.json") }

// sharedBy returns the directory of a pod in shares.
func sharedBy(pod string) string { return filepath.Join(shares, pod) }

// podOf returns the id of the pod that a container is in.
func podOf(annotations map[string]string) string {
	return annotations["io.kubernetes.cri.sandbox-id"]
}

// share mounts the container's volumes for the guest. Here it does not use them.
func (c call) share(spec *specs.Spec) error {
	for i, m := range spec.Mounts {
		st, err := os.Stat(m.Source)
		if m.Type != "bind" || err != nil || !st.IsDir() {
			continue
		}
		point := filepath.Join(sharedBy(podOf(spec.Annotations)), c.id+"-"+strconv.Itoa(i))
		if err := create(filepath.Join(point, "hidden"), ""); err != nil {
			return err
		}
		if err := unix.Mount(m.Source, point, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("share %s: %w", m.Source, err)
		}
	}
	return nil
}

// unshare undoes share.
func (c call) unshare() error {
	points, err := filepath.Glob(filepath.Join(shares, "*", c.id+"-*"))
	for _, point := range points {
		err = errors.Join(err, unix.Unmount(point, unix.MNT_DETACH))
		if err == nil {
			err = os.RemoveAll(point)
		}
		_ = os.Remove(filepath.Dir(point))
	}
	return err
}

// runc becomes runc.
func (c call) runc(args ...string) error {
	path, err := exec.LookPath("runc")
	if err != nil {
		return err
	}
	return unix.Exec(path, append([]string{path, "--root", c.path("runc")}, args...), os.Environ())
}

func (c call) list() error {
	entries, err := os.ReadDir(mappings)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	for _, entry := range entries {
		fmt.Println(entry.Name())
	}
	return err
}

// flag returns the value of a flag of the verb.
func (c call) flag(name string) string {
	if i := slices.Index(c.args, name); i >= 0 && i+1 < len(c.args) {
		return c.args[i+1]
	}
	return ""
}

func (c call) create() error {
	dir := c.flag("--bundle")
	text, err := os.ReadFile(filepath.Join(dir, "config.json"))
	if err != nil {
		return err
	}
	var spec specs.Spec
	if err := json.Unmarshal(text, &spec); err != nil {
		return err
	}
	err = errors.Join(os.MkdirAll(c.path("bundles", c.id), 0o700), create(c.mapping(), dir))
	if err == nil && spec.Annotations["io.kubernetes.cri.container-type"] == "sandbox" {
		err = c.boot()
	}
	if err != nil {
		return err
	}
	if err := refusal(dir, spec.Process.Args[0]); err != nil {
		return err
	}
	if err := c.share(&spec); err != nil {
		return err
	}
	spec.Root.Path = filepath.Join(dir, "rootfs")
	parent, name := filepath.Split(spec.Linux.CgroupsPath)
	spec.Linux.CgroupsPath = parent + "kata_" + name
	if text, err = json.Marshal(spec); err != nil {
		return err
	}
	if err := os.WriteFile(c.path("bundles", c.id, "config.json"), text, 0o600); err != nil {
		return err
	}
	args := append([]string{"create"}, c.args...)
	args[slices.Index(args, "--bundle")+1] = c.path("bundles", c.id)
	return c.runc(args...)
}

// refusal returns the error of the guest's runc if a program is not in the root
// file system, nor mounted there.
func refusal(dir, program string) error {
	const words = "rpc error: code = Internal desc = Could not run process: container_linux.go:348: starting container process caused %q"
	if _, err := os.Stat(filepath.Join(dir, "rootfs", program)); !errors.Is(err, os.ErrNotExist) || program == "/pause" {
		return nil
	}
	if !strings.Contains(program, "/") {
		for _, bin := range []string{"usr/local/sbin", "usr/local/bin", "usr/sbin", "usr/bin", "sbin", "bin"} {
			if _, err := os.Stat(filepath.Join(dir, "rootfs", bin, program)); err == nil {
				return nil
			}
		}
		return fmt.Errorf(words, fmt.Sprintf("exec: %q: executable file not found in $PATH", program))
	}
	if !filepath.IsAbs(program) {
		return nil
	}
	return fmt.Errorf(words, fmt.Sprintf("exec: %q: stat %s: no such file or directory", program, program))
}

// boot starts what a pod has beside its containers.
func (c call) boot() error {
	if err := create(c.config(), "{}"); err != nil {
		return err
	}
	for _, name := range []string{machineProgram, proxyProgram} {
		cmd := command(name, "-name", "sandbox-"+c.id, "-chardev", "path="+c.path("console.sock"))
		cmd.Dir = "/"
		if err := cmd.Start(); err != nil {
			return err
		}
		if err := create(c.sandbox(name), strconv.Itoa(cmd.Process.Pid)); err != nil {
			return err
		}
	}
	return nil
}

// Programs that are links to this one.
const (
	machineProgram = "qemu-system-fakekata"
	proxyProgram   = "kata-proxy"
	shimProgram    = "kata-shim"
)

// command returns a command for one of the links, in its own session.
func command(name string, args ...string) *exec.Cmd {
	self, err := os.Executable()
	if err != nil {
		panic(err)
	}
	cmd := exec.Command(filepath.Join(filepath.Dir(self), name), args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	return cmd
}

// remove deletes a container, and with the pod's own one its machine. Without
// the bundle it does not know what it is about, and does nothing.
func (c call) remove() error {
	dir, err := os.ReadFile(c.mapping())
	if err != nil {
		return err
	}
	if _, err := os.Stat(filepath.Join(string(dir), "config.json")); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	path, err := exec.LookPath("runc")
	if err != nil {
		return err
	}
	args := append([]string{"--root", c.path("runc"), "delete"}, c.args...)
	if out, err := exec.Command(path, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	for _, name := range []string{machineProgram, proxyProgram} {
		if text, err := os.ReadFile(c.sandbox(name)); err == nil {
			pid, _ := strconv.Atoi(string(text))
			_ = unix.Kill(pid, unix.SIGKILL)
		}
	}
	err = errors.Join(c.unshare(), os.RemoveAll(c.sandbox("")), os.RemoveAll(filepath.Dir(c.config())), os.RemoveAll(c.path("bundles", c.id)), os.Remove(c.mapping()))
	for _, dir := range []string{mappings, sandboxes, configs, shares} {
		_ = os.Remove(dir) // nothing is to be left of a test: the last one removes them
		_ = os.Remove(filepath.Dir(dir))
	}
	return err
}

// patience is how long Kata waits for the end of a container that it has sent
// SIGTERM, before it kills it; there it is ten seconds.
const patience = time.Second

// kill sends a signal to a container.
func (c call) kill() error {
	args := append([]string{"kill"}, c.args...)
	if args[len(args)-1] != strconv.Itoa(int(unix.SIGTERM)) {
		return c.runc(args...)
	}
	send := func(args ...string) error {
		return exec.Command("runc", append([]string{"--root", c.path("runc")}, args...)...).Run()
	}
	if err := send(args...); err != nil {
		return err
	}
	for end := time.Now().Add(patience); c.shimRuns() && time.Now().Before(end); {
		time.Sleep(100 * time.Millisecond)
	}
	if c.shimRuns() {
		_ = send("kill", c.id, strconv.Itoa(int(unix.SIGKILL))) // it may have ended by now
	}
	return nil
}

// create writes a file, in a directory that another process may just remove.
func create(file, text string) (err error) {
	for range 100 {
		if err = errors.Join(os.MkdirAll(filepath.Dir(file), 0o700), os.WriteFile(file, []byte(text), 0o600)); err == nil {
			break
		}
	}
	return err
}
