package storage

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/crius-run/crius/internal/race"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/registry"
	"github.com/crius-run/crius/test/kit/registry/registrytest"
	"github.com/crius-run/crius/test/kit/tools"
	"github.com/crius-run/crius/test/kit/wait"
)

var unpacker string // path of crius-unpack

func TestMain(m *testing.M) {
	if Init() || hostileWorker() {
		return
	}
	if os.Getenv("STORAGE_TEST_LOG") == "" {
		slog.SetDefault(slog.New(slog.DiscardHandler))
	}
	if runChild() {
		return
	}
	var err error
	if unpacker, err = tools.Unpacker(context.Background(), race.Enabled); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	// Much of a test's time is waiting, so more run at once than there are CPUs.
	if err := flag.Set("test.parallel", "6"); err != nil {
		panic(err)
	}
	code := m.Run()
	if left := goroutinesLeft(); code == 0 && left != "" {
		fmt.Fprintln(os.Stderr, "goroutines left behind:\n"+left)
		code = 1
	}
	os.Exit(code)
}

// goroutinesLeft are the stacks of goroutines that run our code or that of the
// libraries after all tests; idle HTTP connections end by themselves.
func goroutinesLeft() string {
	var left []string
	wait.Until(context.Background(), func() bool {
		left = nil
		buf := make([]byte, 1<<20)
		for _, stack := range strings.Split(string(buf[:runtime.Stack(buf, true)]), "\n\n") {
			ours := strings.Contains(stack, "crius/storage.(") || strings.Contains(stack, "go.podman.io/")
			if ours && !strings.Contains(stack, "goroutinesLeft") {
				left = append(left, stack)
			}
		}
		return left == nil
	})
	return strings.Join(left, "\n\n")
}

// node is a store with its own roots and configuration files.
type node struct {
	*Store
	t   testing.TB
	dir string
	cfg Options
}

const acceptAll = `{"default": [{"type": "insecureAcceptAnything"}]}`

// newNode opens an empty store that takes any signature and speaks http to the
// loopback addresses.
func newNode(t testing.TB, change ...func(*Options)) *node {
	t.Helper()
	dir := t.TempDir()
	cfg := Options{Config: DefaultConfig(), Unpacker: unpacker}
	cfg.StateDir = filepath.Join(dir, "state")
	cfg.Root = filepath.Join(dir, "root")
	cfg.RunRoot = filepath.Join(dir, "run")
	cfg.Options = []string{"overlay.sync=none"} // the disk is shared with all other tests
	cfg.RegistriesConf = filepath.Join(dir, "registries.conf")
	cfg.SignaturePolicy = filepath.Join(dir, "policy.json")
	n := &node{t: t, dir: dir}
	n.write("registries.conf", insecure("127.0.0.1", "127.0.0.2", "127.0.0.3"))
	n.write("policy.json", acceptAll)
	for _, c := range change {
		c(&cfg)
	}
	n.cfg = cfg
	t.Cleanup(func() { checkMounts(t, dir) }) // runs after Close
	n.open()
	t.Cleanup(func() {
		if err := n.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return n
}

func (n *node) open() {
	n.t.Helper()
	store, err := openStore(context.Background(), n.cfg)
	if err != nil {
		n.t.Fatal(err) // the store of before stays, for Close
	}
	n.Store = store
}

// openStore calls Open, and then reads the layers.
func openStore(ctx context.Context, cfg Options) (*Store, error) {
	driverSetUp.Lock()
	defer driverSetUp.Unlock()
	s, err := Open(ctx, cfg)
	if err == nil {
		_, err = s.store.Layers()
	}
	return s, err
}

// Close is that of the store.
func (n *node) Close(ctx context.Context) error {
	driverSetUp.Lock()
	defer driverSetUp.Unlock()
	return n.Store.Close(ctx)
}

// driverSetUp is held while the library's driver may be set up, which keeps the kind of file system
// in a variable of the package: only tests have several stores in a process. The first read of
// layers sets it up, and so does the first one after another Store of the same place was closed.
var driverSetUp sync.Mutex

// restart opens a new Store on the same disk, like a new process.
func (n *node) restart() {
	n.t.Helper()
	if err := n.Close(context.Background()); err != nil {
		n.t.Fatal(err)
	}
	n.open()
}

func (n *node) write(name, content string) {
	n.t.Helper()
	if err := os.WriteFile(filepath.Join(n.dir, name), []byte(content), 0o600); err != nil {
		n.t.Fatal(err)
	}
}

// insecure is a registries.conf that allows http to hosts, on any port.
func insecure(hosts ...string) string {
	var conf strings.Builder
	for _, host := range hosts {
		fmt.Fprintf(&conf, "[[registry]]\nlocation = %q\ninsecure = true\n", host)
	}
	return conf.String()
}

// checkMounts fails the test if anything is mounted below dir.
func checkMounts(t testing.TB, dir string) {
	t.Helper()
	if mounts := mountsBelow(t, dir); len(mounts) > 0 {
		t.Errorf("still mounted: %s", strings.Join(mounts, "\n"))
	}
}

func mountsBelow(t testing.TB, dir string) (found []string) {
	t.Helper()
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(table)) {
		if fields := strings.Fields(line); len(fields) > 4 && strings.HasPrefix(fields[4], dir+"/") {
			found = append(found, fields[4])
		}
	}
	return found
}

// ctx ends with the test, and well before the go tool would end it.
func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), wait.Limit)
	t.Cleanup(cancel)
	return ctx
}

func layer(t testing.TB, files ...image.File) image.Layer {
	t.Helper()
	l, err := image.NewLayer(files...)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func build(t testing.TB, i image.Image) *image.Artifact {
	t.Helper()
	a, err := i.Build()
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func index(t testing.TB, images ...*image.Artifact) *image.Artifact {
	t.Helper()
	a, err := image.Index(images...)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// motd is an image of two layers that says text in /etc/motd.
func motd(t testing.TB, text string) *image.Artifact {
	t.Helper()
	return build(t, image.Image{
		Config: imagespec.ImageConfig{User: "1000:1000", Env: []string{"A=b"}, Cmd: []string{"/bin/true"}},
		Layers: []image.Layer{
			layer(t, image.Dir("etc"), image.Text("etc/hostname", "base\n")),
			layer(t, image.Text("etc/motd", text)),
		},
	})
}

// serve starts a registry that has a under name:tag (tag may be empty).
func serve(t testing.TB, name, tag string, a *image.Artifact) *registry.Registry {
	t.Helper()
	r := registrytest.Start(t)
	r.Push(name, tag, a)
	return r
}

// pull pulls or ends the test.
func (n *node) pull(ref string) *Image {
	n.t.Helper()
	img, err := n.Pull(testContext(n.t), PullRequest{Image: ref})
	if err != nil {
		n.t.Fatal(err)
	}
	return img
}

func (n *node) list() []*Image {
	n.t.Helper()
	images, err := n.Images(testContext(n.t))
	if err != nil {
		n.t.Fatal(err)
	}
	return images
}

func (n *node) remove(ref string) {
	n.t.Helper()
	if err := n.Remove(testContext(n.t), ref); err != nil {
		n.t.Fatal(err)
	}
}

// empty fails the test unless the store holds no layer, image, record or
// temporary file at all.
func (n *node) empty() {
	n.t.Helper()
	layers, err := n.store.Layers()
	if err != nil {
		n.t.Fatal(err)
	}
	images, err := n.store.Images()
	if err != nil {
		n.t.Fatal(err)
	}
	containers, err := n.store.Containers()
	if err != nil {
		n.t.Fatal(err)
	}
	if len(layers)+len(images)+len(containers) > 0 {
		n.t.Errorf("left in the store: %d layers, %d images, %d containers", len(layers), len(images), len(containers))
	}
	n.noDebris()
}

// noDebris fails the test if there are directories of layers without a record
// or files of unfinished pulls.
func (n *node) noDebris() {
	n.t.Helper()
	layers, err := n.store.Layers()
	if err != nil {
		n.t.Fatal(err)
	}
	known := map[string]bool{}
	for _, l := range layers {
		known[l.ID] = true
	}
	for _, dir := range n.entries("root/overlay") {
		if len(dir) == 64 && !known[dir] {
			n.t.Errorf("layer directory without a record: %s", dir)
		}
	}
	for _, place := range []string{"root/crius-pulls", "root/overlay/tempdirs", "root/overlay/staging", "root/overlay-layers/tmp"} {
		for _, entry := range n.entries(place) {
			n.t.Errorf("left behind: %s/%s", place, entry)
		}
	}
}

// entries are the names in a directory of the node; none if it is not there.
func (n *node) entries(dir string) (names []string) {
	n.t.Helper()
	list, err := os.ReadDir(filepath.Join(n.dir, dir))
	if err != nil && !os.IsNotExist(err) {
		n.t.Fatal(err)
	}
	for _, entry := range list {
		names = append(names, entry.Name())
	}
	return names
}

func entriesOf(t testing.TB, dir string) (names []string) {
	t.Helper()
	list, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range list {
		names = append(names, entry.Name())
	}
	return names
}

func random(size int) []byte {
	data := make([]byte, size)
	rand.Read(data)
	return data
}

// layerDigest is the digest of an image's i-th layer.
func layerDigest(a *image.Artifact, i int) string {
	var m imagespec.Manifest
	if err := json.Unmarshal(a.Manifest, &m); err != nil {
		panic(err)
	}
	return m.Layers[i].Digest.String()
}

// waitLayers waits until the store has so many layers.
func (n *node) waitLayers(count int) {
	n.t.Helper()
	wait.For(n.t, fmt.Sprintf("%d layers", count), func() bool {
		layers, err := n.store.Layers()
		if err != nil {
			n.t.Fatal(err)
		}
		return len(layers) >= count
	})
}

// rootfs describes the root file system of a container.
func (n *node) rootfs(name, imageID string) Rootfs {
	id := digestOf(name)
	return Rootfs{
		ID:      id,
		ImageID: imageID,
		Dir:     filepath.Join(n.containersDir, id),
		Target:  filepath.Join(n.dir, "containers", id, "rootfs"),
	}
}

func (n *node) mount(r Rootfs) {
	n.t.Helper()
	if err := n.MountRootfs(testContext(n.t), r); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) removeRootfs(r Rootfs) {
	n.t.Helper()
	if err := n.RemoveRootfs(testContext(n.t), r); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) read(r Rootfs, name string) string {
	n.t.Helper()
	content, err := os.ReadFile(filepath.Join(r.Target, name))
	if err != nil {
		n.t.Fatal(err)
	}
	return string(content)
}
