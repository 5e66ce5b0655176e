package integration

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/encoding/protowire"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// entry is a field of a message in an image of criu, as it is encoded.
type entry struct {
	number  protowire.Number
	encoded []byte // with its tag
	content []byte // of what has a length
	value   uint64 // of a number
}

func entriesOf(t *testing.T, message []byte) (all []entry) {
	t.Helper()
	for len(message) > 0 {
		number, kind, tag := protowire.ConsumeTag(message)
		size := protowire.ConsumeFieldValue(number, kind, message[max(tag, 0):])
		if tag < 0 || size < 0 {
			t.Fatalf("not a message: %x", message)
		}
		e := entry{number: number, encoded: message[:tag+size]}
		switch kind {
		case protowire.BytesType:
			e.content, _ = protowire.ConsumeBytes(message[tag:])
		case protowire.VarintType:
			e.value, _ = protowire.ConsumeVarint(message[tag:])
		}
		all, message = append(all, e), message[tag+size:]
	}
	return all
}

// numbers returns the values of a field of numbers, which is below the fields in path.
func numbers(t *testing.T, message []byte, path ...protowire.Number) (all []uint64) {
	t.Helper()
	for _, e := range entriesOf(t, message) {
		switch {
		case e.number != path[0]:
		case len(path) > 1:
			all = append(all, numbers(t, e.content, path[1:]...)...)
		default:
			all = append(all, e.value)
		}
	}
	return all
}

// set replaces all values of a field, which is below the fields in path.
func set(t *testing.T, message []byte, encoded []byte, path ...protowire.Number) (changed []byte) {
	t.Helper()
	found := false
	for _, e := range entriesOf(t, message) {
		switch {
		case e.number != path[0]:
			changed = append(changed, e.encoded...)
		case len(path) > 1:
			changed = protowire.AppendTag(changed, e.number, protowire.BytesType)
			changed = protowire.AppendBytes(changed, set(t, e.content, encoded, path[1:]...))
			found = true
		}
	}
	if len(path) > 1 && !found {
		t.Fatalf("field %d is not in the image", path[0])
	}
	if len(path) == 1 {
		changed = append(changed, encoded...)
	}
	return changed
}

// number encodes a field of numbers.
func number(field protowire.Number, values ...uint64) (encoded []byte) {
	for _, v := range values {
		encoded = protowire.AppendVarint(protowire.AppendTag(encoded, field, protowire.VarintType), v)
	}
	return encoded
}

func words(field protowire.Number, value string) []byte {
	return protowire.AppendString(protowire.AppendTag(nil, field, protowire.BytesType), value)
}

// dump is the directory of the images of a container in a checkpoint.
type dump struct{ dir string }

// header is the size of what says what an image is: two numbers, of which the inventory lacks the first.
func header(image string) int {
	if image == "inventory.img" {
		return 4
	}
	return 8
}

// messages returns those of an image. Each follows its length.
func (d dump) messages(t *testing.T, image string) (all [][]byte) {
	t.Helper()
	data := []byte(read(t, filepath.Join(d.dir, image)))[header(image):]
	for len(data) > 0 {
		size := 4 + binary.LittleEndian.Uint32(data)
		all, data = append(all, data[4:size]), data[size:]
	}
	return all
}

// edit replaces each message of an image.
func (d dump) edit(t *testing.T, image string, change func(message []byte) []byte) {
	t.Helper()
	file := filepath.Join(d.dir, image)
	edited := []byte(read(t, file))[:header(image)]
	for _, m := range d.messages(t, image) {
		m = change(m)
		edited = append(binary.LittleEndian.AppendUint32(edited, uint32(len(m))), m...)
	}
	must(t, os.WriteFile(file, edited, 0o600))
}

// tasks returns the first thread of the second process, and the last one, by their numbers in the images.
func (d dump) tasks(t *testing.T) (first, last uint64) {
	t.Helper()
	const pid, parent, threads = 1, 2, 5
	for _, process := range d.messages(t, "pstree.img") {
		if all := numbers(t, process, threads); numbers(t, process, parent)[0] != 0 {
			return numbers(t, process, pid)[0], all[len(all)-1]
		}
	}
	t.Fatal("the images have one process")
	return 0, 0
}

// descriptors is the file in which runc notes the streams that criu has to connect.
const descriptors = "descriptors.json"

// Fields of the images.
const (
	coreThread  = 5 // in core-ID.img
	threadCreds = 10
	threadMode  = 11 // of seccomp

	idsNet, idsMount = 6, 9 // in ids-ID.img

	mountType, mountID, mountParent, mountFlags, mountPoint, mountSource, mountOptions, mountBlock = 1, 2, 4, 5, 7, 8, 9, 17

	fileRegular, fileName, fileMode = 3, 6, 10 // in files.img
)

// creds changes a number in the credentials of the last thread.
func creds(field protowire.Number, values ...uint64) func(*testing.T, dump) {
	return func(t *testing.T, d dump) {
		_, last := d.tasks(t)
		d.edit(t, fmt.Sprintf("core-%d.img", last), func(m []byte) []byte {
			return set(t, m, number(field, values...), coreThread, threadCreds, field)
		})
	}
}

// mounted changes the mount at a point.
func mounted(point string, change func(t *testing.T, m []byte) []byte) func(*testing.T, dump) {
	return func(t *testing.T, d dump) {
		d.edit(t, d.mounts(t), func(m []byte) []byte {
			if slices.ContainsFunc(entriesOf(t, m), func(e entry) bool { return e.number == mountPoint && string(e.content) == point }) {
				return change(t, m)
			}
			return m
		})
	}
}

// mounts returns the image of the mounts.
func (d dump) mounts(t *testing.T) string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(d.dir, "mountpoints-*.img"))
	must(t, err)
	return filepath.Base(found[0])
}

// writable makes a mount one.
func writable(t *testing.T, m []byte) []byte {
	t.Helper()
	const readOnly = 1
	for _, field := range []protowire.Number{mountFlags, mountBlock} {
		m = set(t, m, number(field, numbers(t, m, field)[0]&^readOnly), field)
	}
	return m
}

// ownMounts gives the second process mounts of its own, which are those of the container.
func ownMounts(t *testing.T, d dump) {
	const other, apart = 9999, 50000
	first, _ := d.tasks(t)
	d.edit(t, fmt.Sprintf("ids-%d.img", first), func(m []byte) []byte { return set(t, m, number(idsMount, other), idsMount) })
	copied := fmt.Sprintf("mountpoints-%d.img", other)
	put(t, filepath.Join(d.dir, copied), read(t, filepath.Join(d.dir, d.mounts(t))))
	d.edit(t, copied, func(m []byte) []byte {
		for _, field := range []protowire.Number{mountID, mountParent} {
			m = set(t, m, number(field, numbers(t, m, field)[0]+apart), field)
		}
		return m
	})
}

// ownNetwork gives the second process the number of the network in which criu has run: criu makes a new one.
func ownNetwork(t *testing.T, d dump) {
	const inventoryIDs = 3
	first, _ := d.tasks(t)
	criu := numbers(t, d.messages(t, "inventory.img")[0], inventoryIDs, idsNet)[0]
	d.edit(t, fmt.Sprintf("ids-%d.img", first), func(m []byte) []byte { return set(t, m, number(idsNet, criu), idsNet) })
}

// refusesToWrite has a process of the container try to write a file on a volume that is read-only.
func (c *container) refusesToWrite(t *testing.T, file string) {
	t.Helper()
	if said := c.execResult(t, "write "+file+" text"); said.ExitCode == 0 || !strings.Contains(string(said.Stderr), "read-only file system") {
		t.Errorf("writing %s ended with code %d: %s", file, said.ExitCode, said.Stderr)
	}
}

// Who has a key that a node trusts can sign for images that criu would never have written. What a process has more
// than the request gives it is noticed before it runs, in whichever of them it is.
func TestRestoreOfEditedImages(t *testing.T) {
	t.Parallel()
	w, ok := dumps(t)
	if !ok {
		return
	}
	volume, outside := w.dir(t), filepath.Join(w.dir(t), "secret")
	put(t, outside, "secret")
	p := w.run(t, "runc")
	c := p.start(t, "fork 1 lines 1000000000 20ms ; sleep", func(c *cri.ContainerConfig) {
		c.Mounts = []*cri.Mount{{ContainerPath: "/data", HostPath: volume, Readonly: true}}
		c.Linux.SecurityContext.ReadonlyRootfs = true
		c.Linux.SecurityContext.NoNewPrivs = true
		c.Linux.SecurityContext.Capabilities = &cri.Capability{DropCapabilities: []string{"ALL"}}
	})
	c.says(t, "line 1")
	dir := p.checkpointed(t, c)
	p.vanish(t)
	sysAdmin := uint64(1) << unix.CAP_SYS_ADMIN
	for name, attack := range map[string]struct {
		code  codes.Code
		words string
		edit  func(*testing.T, dump)
	}{
		"nothing":           {codes.OK, "", func(*testing.T, dump) {}},
		"user":              {codes.FailedPrecondition, "user ids", creds(1, 1000)},
		"file system user":  {codes.FailedPrecondition, "user ids", creds(7, 1000)},
		"group":             {codes.FailedPrecondition, "group ids", creds(4, 7)},
		"additional groups": {codes.FailedPrecondition, "additional groups", creds(14, 0, 7)},
		"bounding set":      {codes.FailedPrecondition, "CapBnd", creds(12, sysAdmin, 0)},
		"capabilities": {codes.FailedPrecondition, "CapPrm", func(t *testing.T, d dump) {
			for _, field := range []protowire.Number{10, 11, 12} {
				creds(field, sysAdmin, 0)(t, d)
			}
		}},
		"inheritable":  {codes.Unknown, "Unable to restore capabilities", creds(9, sysAdmin, 0)},
		"no_new_privs": {codes.FailedPrecondition, "no_new_privs", creds(18, 0)},
		"no filter": {codes.FailedPrecondition, "seccomp mode", func(t *testing.T, d dump) {
			first, _ := d.tasks(t)
			d.edit(t, fmt.Sprintf("core-%d.img", first), func(m []byte) []byte { return set(t, m, number(threadMode, 0), coreThread, threadMode) })
		}},
		"network":         {codes.FailedPrecondition, "namespace", ownNetwork},
		"mount namespace": {codes.FailedPrecondition, "namespace", ownMounts},
		"writable root":   {codes.FailedPrecondition, "/ is not one of the request: it can be written to", mounted("/", writable)},
		"writable volume": {codes.OK, "", mounted("/data", writable)}, // which is made read-only again
		"writable sysfs":  {codes.FailedPrecondition, "/sys is not one of the request: it can be written to", mounted("/sys", writable)},
		"setuid programs": {codes.FailedPrecondition, "it is not nosuid", mounted("/sys", func(t *testing.T, m []byte) []byte {
			return set(t, m, number(mountFlags, numbers(t, m, mountFlags)[0]&^unix.MS_NOSUID), mountFlags)
		})},
		"files of the node": {codes.FailedPrecondition, "/dev/mqueue is not one of the request: it shows / of a file system of the type overlay", mounted("/dev/mqueue", func(t *testing.T, m []byte) []byte {
			const overlay = 17
			m = set(t, set(t, m, number(mountType, overlay), mountType), words(mountSource, "overlay"), mountSource)
			return set(t, m, words(mountOptions, "lowerdir="+volume+":"+filepath.Dir(outside)), mountOptions)
		})},
		"no descriptors": {codes.Unknown, "descriptors.json", func(t *testing.T, d dump) { must(t, os.Remove(filepath.Join(d.dir, descriptors))) }},
		"wrong descriptors": {codes.Unknown, "cannot unmarshal", func(t *testing.T, d dump) {
			put(t, filepath.Join(d.dir, descriptors), `{"0":"/dev/null"}`)
		}},
		"more descriptors": {codes.Unknown, "Bad file descriptor", func(t *testing.T, d dump) {
			file := filepath.Join(d.dir, descriptors)
			put(t, file, strings.TrimSuffix(strings.TrimSpace(read(t, file)), "]")+`,"pipe:[1]","pipe:[2]","pipe:[3]"]`)
		}},
		"file of the node": {codes.Unknown, "No such file", func(t *testing.T, d dump) {
			d.edit(t, "files.img", func(m []byte) []byte {
				for _, e := range entriesOf(t, m) {
					if e.number == fileRegular && bytes.Contains(e.content, []byte("/dev/null")) {
						m = set(t, m, words(fileName, "/../../../../.."+outside), fileRegular, fileName)
						m = set(t, m, nil, fileRegular, fileMode)
					}
				}
				return m
			})
		}},
	} {
		t.Run(name, func(t *testing.T) {
			edited := w.dir(t)
			must(t, os.CopyFS(edited, os.DirFS(dir)))
			attack.edit(t, dump{filepath.Join(edited, c.id, "checkpoint")})
			sign(t, w.StateRoot(), edited)
			req := w.restoring(t, edited, c)
			resp, err := w.tryRestore(t, req)
			t.Log(err)
			if attack.code != codes.OK {
				wantCode(t, err, attack.code, attack.words)
				equal(t, "pods", w.podsNamed(t, req.Config.Metadata.Name), 0)
				return
			}
			must(t, err)
			q := &pod{w: w, id: resp.PodSandboxId, handler: "runc", config: req.Config, made: []string{resp.PodSandboxId}}
			restored := &container{q, resp.RestoredContainers[0].ContainerId, c.config}
			restored.start(t)
			restored.refusesToWrite(t, "/data/new")
			q.vanish(t)
		})
	}
}
