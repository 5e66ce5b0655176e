package storage

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/storage/diskusage"
	"github.com/crius-run/crius/storage/unpack"
	"github.com/crius-run/crius/storage/unpack/layers"
	"github.com/crius-run/crius/storage/unpack/wire"
	"github.com/crius-run/crius/test/kit/image"
)

// hostileWorker is a worker that its image has taken over, if a test has made this program the worker. It
// tries what it must not do, and fails its pull with a list of what it could do.
func hostileWorker() bool {
	if len(os.Args) != 1 || os.Args[0] != wire.Name {
		return false
	}
	var order wire.Order
	if err := json.NewDecoder(os.Stdin).Decode(&order); err != nil {
		panic(err)
	}
	h := &hostile{order: order, store: connect(wire.StoreFD)}
	h.writeElsewhere()
	h.addWhatIsNoLayer()
	h.askTooMuch()
	text := "nothing was possible"
	if len(h.done) > 0 {
		text = "possible: " + strings.Join(h.done, ", ")
	}
	_ = json.NewEncoder(connect(wire.SocketFD)).Encode(wire.Message{Failed: &wire.Failure{Text: text}})
	os.Exit(0)
	return true
}

func connect(fd uintptr) net.Conn {
	conn, err := net.FileConn(os.NewFile(fd, "socket"))
	if err != nil {
		panic(err)
	}
	return conn
}

type hostile struct {
	order wire.Order
	store net.Conn
	done  []string // that was possible
}

// decoy is what a worker tries to have moved and opened, so that a test that fails does no harm: a directory of the
// test beside the graph root.
const decoy = "decoy"

func (h *hostile) decoy() string {
	overlay := filepath.Dir(filepath.Dir(h.order.Staging.Dir))
	return filepath.Join(filepath.Dir(filepath.Dir(overlay)), decoy)
}

// writeElsewhere changes files of the store.
func (h *hostile) writeElsewhere() {
	place := filepath.Dir(h.order.Staging.Dir)
	overlay := filepath.Dir(place)
	graph := filepath.Dir(overlay)
	for what, try := range map[string]func() error{
		"write beside its directory": func() error { return os.WriteFile(filepath.Join(place, "x"), nil, 0o600) },
		"make a layer":               func() error { return os.Mkdir(filepath.Join(overlay, "x"), 0o700) },
		"change records of layers":   func() error { return os.Truncate(filepath.Join(graph, "overlay-layers", "layers.lock"), 0) },
		"write records of layers": func() error {
			return os.WriteFile(filepath.Join(graph, "overlay-layers", "layers.json"), []byte("[]"), 0o600)
		},
		"write records of images": func() error {
			return os.WriteFile(filepath.Join(graph, "overlay-images", "images.json"), []byte("[]"), 0o600)
		},
		"write to the directory of the job": func() error { return os.WriteFile(filepath.Join(filepath.Dir(h.order.Temporary), "x"), nil, 0o600) },
		"move its directory":                func() error { return os.Rename(h.order.Staging.Dir, filepath.Join(overlay, "x")) },
		"change a layer's mode":             func() error { return unix.Chmod(h.stored(), 0o777) },
		"read the node's files":             func() error { _, err := os.ReadDir("/etc"); return err },
		"open a device":                     func() error { return openDevice(filepath.Join(h.order.Staging.Dir, "null")) },
		"listen":                            func() error { _, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0); return err },
	} {
		if try() == nil {
			h.done = append(h.done, what)
		}
	}
}

// stored returns the directory of a layer of another image.
func (h *hostile) stored() string {
	stored, err := filepath.Glob(filepath.Join(filepath.Dir(filepath.Dir(h.order.Staging.Dir)), strings.Repeat("?", 64)))
	if err != nil || len(stored) == 0 {
		panic("there is no layer of another image")
	}
	return stored[0]
}

// openDevice makes a device and opens it.
func openDevice(path string) error {
	if err := unix.Mknod(path, unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))); err != nil {
		panic(err)
	}
	device, err := os.OpenFile(path, os.O_WRONLY, 0)
	_ = device.Close()
	return err
}

// addWhatIsNoLayer has the server add things that are no layers, or that are elsewhere.
func (h *hostile) addWhatIsNoLayer() {
	first, second := h.order.Layers[0].ID, h.order.Layers[1].ID
	files := h.order.Staging.FilesOf
	split := func(name string) string { return h.order.Staging.SplitOf(name) }
	plain := func(name string) error {
		return errors.Join(os.Mkdir(files(name), 0o755), os.WriteFile(split(name), nil, 0o600))
	}
	target := filepath.Join(h.order.Staging.Dir, "target")
	if err := os.WriteFile(target, nil, 0o600); err != nil {
		panic(err)
	}
	for name, prepare := range map[string]func() error{
		"11": func() error {
			return errors.Join(os.Symlink(h.decoy(), files("11")), os.WriteFile(split("11"), nil, 0o600))
		},
		"12": func() error {
			return errors.Join(os.WriteFile(files("12"), nil, 0o600), os.WriteFile(split("12"), nil, 0o600))
		},
		"13": func() error {
			return errors.Join(os.Mkdir(files("13"), 0o755), os.Symlink(filepath.Join(h.decoy(), "file"), split("13")))
		},
		"14": func() error { return errors.Join(os.Mkdir(files("14"), 0o755), unix.Mkfifo(split("14"), 0o600)) },
		"15": func() error {
			return errors.Join(os.Mkdir(files("15"), 0o755), os.WriteFile(split("15"), nil, 0o600), os.Link(split("15"), split("15-too")))
		},
		"16": func() error { return os.Mkdir(files("16"), 0o755) },
		"17": func() error { return errors.Join(os.Mkdir(files("17"), 0o755), os.Mkdir(split("17"), 0o755)) },
	} {
		if err := prepare(); err != nil {
			panic(err)
		}
		h.try("add "+name, wire.Question{Add: []wire.Unpacked{{ID: first, Name: name}}})
	}
	for _, name := range []string{"20", "21"} {
		if err := plain(name); err != nil {
			panic(err)
		}
	}
	elsewhere, err := filepath.Rel(h.order.Staging.Dir, h.decoy())
	if err != nil {
		panic(err)
	}
	if err := os.WriteFile(filepath.Join(h.order.Staging.Splits, "20"), nil, 0o600); err != nil {
		panic(err)
	}
	for what, all := range map[string][]wire.Unpacked{
		"a directory elsewhere":        {{ID: first, Name: elsewhere}},
		"the staging directory":        {{ID: first, Name: "."}},
		"by another path":              {{ID: first, Name: "x/../20"}},
		"a foreign layer":              {{ID: strings.Repeat("a", 64), Name: "20"}},
		"a layer without its parent":   {{ID: second, Name: "20"}},
		"layers in the wrong order":    {{ID: second, Name: "20"}, {ID: first, Name: "21"}},
		"one layer twice":              {{ID: first, Name: "20"}, {ID: first, Name: "21"}},
		"a layer with many owners":     {{ID: first, Name: "20", UIDs: make([]uint32, layers.KeptOwners+1)}},
		"a layer of a negative size":   {{ID: first, Name: "20", Size: -1}},
		"a layer of an absurd size":    {{ID: first, Name: "20", Size: math.MaxInt64}},
		"a layer of absurd files":      {{ID: first, Name: "20", Usage: diskusage.Usage{Bytes: math.MaxUint64}}},
		"a layer of too many files":    {{ID: first, Name: "20", Usage: diskusage.Usage{Inodes: math.MaxUint64}}},
		"a layer that nobody unpacked": {{ID: first}},
	} {
		h.try("add "+what, wire.Question{Add: all})
	}
	h.try("find a directory elsewhere", wire.Question{Dirs: elsewhere})
	h.try("look for a foreign layer", wire.Question{Has: filepath.Base(h.stored())})
	h.try("find a foreign layer", wire.Question{Dirs: filepath.Base(h.stored())})
	h.try("ask nothing", wire.Question{})
}

// ask asks the server, and reports whether there was an answer.
func (h *hostile) ask(q wire.Question) (answer wire.Answer, answered bool) {
	if json.NewEncoder(h.store).Encode(q) != nil {
		return answer, false
	}
	line, err := bufio.NewReader(h.store).ReadBytes('\n')
	return answer, err == nil && json.Unmarshal(line, &answer) == nil
}

func (h *hostile) try(what string, q wire.Question) {
	if answer, answered := h.ask(q); !answered || answer.Failed == nil || len(answer.Added) > 0 {
		h.done = append(h.done, fmt.Sprintf("%s (answered: %t)", what, answered))
	}
}

// askTooMuch keeps the server busy.
func (h *hostile) askTooMuch() {
	for range 1000 {
		if _, answered := h.ask(wire.Question{Has: h.order.Layers[0].ID}); !answered {
			return
		}
	}
	h.done = append(h.done, "ask for ever")
}

// A worker that a layer has taken over can change nothing but its own files, and what it hands over as a
// layer is looked at.
func TestHostileWorker(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	precious := filepath.Join(n.dir, decoy, "file")
	ok(t, os.Mkdir(filepath.Dir(precious), 0o700))
	ok(t, os.WriteFile(precious, nil, 0o600))
	base := motd(t, "somebody else's")
	var all []image.Layer
	for i := range 20 { // so that it may ask as often as it does
		all = append(all, layer(t, image.Text("file", fmt.Sprint(i))))
	}
	r := serve(t, "app", "1", build(t, image.Image{Layers: all}))
	r.Push("app", "base", base)
	n.pull(r.Addr() + "/app:base")
	before := n.layerRecords()
	path, err := os.Executable()
	ok(t, err)
	itself, err := unpack.OpenProgram(path, n.cfg.Root, filepath.Join(n.cfg.Root, "overlay"))
	ok(t, err)
	good := n.puller.Program
	n.puller.Program = itself
	_, err = n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1"})
	if err == nil || !strings.Contains(err.Error(), "nothing was possible") {
		t.Errorf("%v", err)
	}
	n.puller.Program = good
	ok(t, itself.Close())
	if _, err := os.Stat(precious); err != nil {
		t.Error(err)
	}
	if after := n.layerRecords(); !reflect.DeepEqual(before, after) {
		t.Errorf("records of layers: %v, before %v", after, before)
	}
	n.noDebris()
	n.pull(r.Addr() + "/app:1")
}
