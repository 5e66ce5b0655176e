// Powercut is the init of a machine whose power is cut again and again: it
// starts what crius needs, starts crius, checks that everything is right after
// the last cut, and then works until the next one.
//
// It reports to the host in lines that begin with "@ ": how long crius took to
// answer, what was verified, that the work begins, and what the node has
// promised since. A failure is reported and powers off the machine.
//
// On a machine booted by another init (whose service manager starts crius, as
// installed) it does the same without the first part.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencontainers/go-digest"

	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/registry"
)

const (
	bench    = "/bench" // files from the host
	disk     = "/mnt"   // survives the cuts
	stateDir = "/var/lib/crius"
	runDir   = "/run/crius"
	graph    = "/var/lib/containers/storage"
	leases   = "/var/lib/cni/networks"
	socket   = runDir + "/crius.sock"
	logFile  = "/run/crius.log"
	address  = "127.0.0.1:5000" // of the registry
)

// served is an image in the registry, as built by the host.
type served struct {
	Name, ID, Digest string
	Blobs            []string
	Manifest         []byte
	Sum              string
}

func (s *served) ref() string { return address + "/" + s.Name + ":latest" }

func tell(format string, args ...any) { fmt.Printf("@ "+format+"\n", args...) }

func main() {
	err := run(context.Background())
	tell("failed %q", fmt.Sprint(err))
	log, _ := os.ReadFile(logFile)
	fmt.Printf("crius's log:\n%s\n", log[max(0, len(log)-16<<10):])
	if os.Getpid() == 1 {
		unix.Sync()
		_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
	}
	os.Exit(1)
}

func run(ctx context.Context) error {
	alone := os.Getpid() == 1
	if alone {
		if err := bringUp(); err != nil {
			return fmt.Errorf("bring the machine up: %w", err)
		}
	}
	images, err := serve()
	if err != nil {
		return err
	}
	n := &node{images: images, log: logFile}
	started := time.Now()
	ended := make(chan error, 1)
	if alone {
		if err := startCrius(ended); err != nil {
			return err
		}
	}
	if err := n.connect(ctx, ended); err != nil {
		return fmt.Errorf("crius does not answer after %v: %w", time.Since(started), err)
	}
	tell("answered %d", time.Since(started).Milliseconds())
	failed := make(chan error, 1)
	go func() { failed <- n.life(ctx) }()
	select {
	case err := <-failed:
		return err
	case err := <-ended:
		return fmt.Errorf("crius ended by itself: %w", err)
	}
}

// life runs between two cuts, and returns only with an error.
func (n *node) life(ctx context.Context) error {
	if err := n.verify(ctx); err != nil {
		return err
	}
	seed, _ := strconv.ParseUint(os.Getenv("POWERCUT_SEED"), 10, 64)
	tell("load")
	return n.load(ctx, rand.New(rand.NewPCG(seed, 0)))
}

// mounts are the file systems of the machine, in this order.
var mounts = []struct{ what, where, kind, data string }{
	{"proc", "/proc", "proc", ""},
	{"sysfs", "/sys", "sysfs", ""},
	{"cgroup", "/sys/fs/cgroup", "cgroup2", ""},
	{"dev", "/dev", "devtmpfs", ""},
	{"pts", "/dev/pts", "devpts", ""},
	{"shm", "/dev/shm", "tmpfs", ""},
	{"mqueue", "/dev/mqueue", "mqueue", ""},
	{"run", "/run", "tmpfs", "mode=755"},
	{"tmp", "/tmp", "tmpfs", ""},
	{"var", "/var", "tmpfs", "mode=755"},
}

// bringUp turns a bare kernel into a node.
func bringUp() error {
	for _, m := range mounts {
		err := os.MkdirAll(m.where, 0o755)
		if err == nil {
			err = unix.Mount(m.what, m.where, m.kind, 0, m.data)
		}
		if err != nil && !errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("mount %s: %w", m.where, err)
		}
	}
	if err := unix.Mount("/dev/ubdc", disk, "ext4", 0, os.Getenv("POWERCUT_MOUNT")); err != nil {
		return fmt.Errorf("mount the disk: %w", err)
	}
	for _, dir := range []string{"crius", "containers", "cni"} {
		if err := os.MkdirAll(filepath.Join(disk, dir), 0o755); err != nil {
			return err
		}
		path := filepath.Join("/var/lib", dir)
		if err := os.MkdirAll(path, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(filepath.Join(disk, dir), path, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("mount %s: %w", path, err)
		}
	}
	const path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	if err := errors.Join(os.Setenv("PATH", path), os.Setenv("HOME", "/root")); err != nil {
		return err
	}
	for _, argv := range [][]string{
		{"ip", "link", "set", "lo", "up"},
		{"modprobe", "-a", "overlay", "veth", "bridge", "iptable_nat", "ip6table_nat", "xt_comment", "xt_MASQUERADE"},
		{"sysctl", "-qw", "net.ipv4.ip_forward=1"},
	} {
		if out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput(); err != nil {
			return fmt.Errorf("%v: %w: %s", argv, err, out)
		}
	}
	return nil
}

// startCrius starts the server as its service would. It is never restarted.
func startCrius(ended chan<- error) error {
	log, err := os.Create(logFile)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(bench+"/crius", "--config", bench+"/crius.toml", "serve")
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &unix.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	signal.Ignore(unix.SIGHUP)
	go func() {
		err := cmd.Wait()
		if err == nil {
			err = errors.New("with exit code 0")
		}
		ended <- err
	}()
	return nil
}

// serve starts the registry, whose blobs stay on the host's disk.
func serve() ([]*served, error) {
	dir := filepath.Join(bench, "images")
	text, err := os.ReadFile(filepath.Join(dir, "index.json"))
	if err != nil {
		return nil, err
	}
	var images []*served
	if err := json.Unmarshal(text, &images); err != nil {
		return nil, err
	}
	r := registry.New()
	for _, one := range images {
		a := &image.Artifact{
			MediaType: "application/vnd.oci.image.manifest.v1+json", Manifest: one.Manifest,
			Blobs: map[digest.Digest][]byte{},
		}
		for _, name := range one.Blobs {
			if a.Blobs[digest.Digest(name)], err = mapFile(filepath.Join(dir, name)); err != nil {
				return nil, err
			}
		}
		r.Push(one.Name, "latest", a)
	}
	return images, r.Listen(address)
}

func mapFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	return unix.Mmap(int(f.Fd()), 0, int(info.Size()), unix.PROT_READ, unix.MAP_PRIVATE)
}

// wanted returns the images that the node has promised to have.
func wanted() []string {
	return strings.FieldsFunc(os.Getenv("POWERCUT_WANT"), func(r rune) bool { return r == ',' })
}
