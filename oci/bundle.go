package oci

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"unicode/utf8"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/regular"
	rules "github.com/crius-run/crius/oci/spec"
)

// writeSpec puts config.json into the bundle, unless it is longer than ReadSpec reads. It is
// derived from the record and needs no fsync.
func writeSpec(dir string, spec *specs.Spec) error {
	if size := SpecSize(spec); size > maxSpec { // before so much is made in memory
		return tooLong(size)
	}
	text, err := encode(spec)
	if err != nil {
		return err
	}
	if len(text) > maxSpec {
		return tooLong(len(text))
	}
	return os.WriteFile(filepath.Join(dir, "config.json"), text, 0o600)
}

// keptSpec is how much of a config.json is kept when its container has exited.
const keptSpec = 256 << 10

// shortening is one bundle at a time, since each is read as a whole.
var shortening sync.Mutex

// ShortenSpec takes what makes a config.json long out of the bundle of a container that
// has exited, until keptSpec is kept: its environment and arguments, then its lists, then its
// annotations and all but the beginning of its program's name. The rest stays, such as its
// namespaces. It leaves alone what is not long, and a bundle that hooks may read when the container
// is deleted.
func ShortenSpec(dir string) error {
	file := filepath.Join(dir, "config.json")
	info, err := os.Lstat(file)
	if errors.Is(err, os.ErrNotExist) || err == nil && info.Size() <= keptSpec {
		return nil
	}
	if err != nil {
		return err
	}
	shortening.Lock()
	defer shortening.Unlock()
	spec, err := readSpec[specs.Spec](dir, maxWritten)
	if err != nil {
		return err
	}
	if spec.Hooks != nil && len(spec.Hooks.Poststop) > 0 {
		return nil
	}
	text, err := shortened(spec)
	if err != nil || int64(len(text)) >= info.Size() {
		return err
	}
	return replace(file, text)
}

// shortened encodes a spec without as much of it as is needed, what says least about the
// container first. It changes the spec.
func shortened(spec *specs.Spec) (text []byte, err error) {
	for _, drop := range []func(*specs.Spec){dropCommand, dropLists, dropTexts} {
		drop(spec)
		if text, err = encode(spec); err != nil || len(text) <= keptSpec {
			break
		}
	}
	return text, err
}

func dropCommand(spec *specs.Spec) {
	if p := spec.Process; p != nil {
		p.Args = p.Args[:min(len(p.Args), 1)]
		p.Env = slices.DeleteFunc(p.Env, func(entry string) bool { return !strings.HasPrefix(entry, "PATH=") })
	}
}

func dropLists(spec *specs.Spec) {
	spec.Mounts = nil
	if p := spec.Process; p != nil {
		p.User.AdditionalGids = nil
	}
	if l := spec.Linux; l != nil {
		l.Seccomp, l.Devices, l.MaskedPaths, l.ReadonlyPaths = nil, nil, nil, nil
	}
}

// dropTexts: annotations are no longer read, and errors quote no more of a program's name.
func dropTexts(spec *specs.Spec) {
	const quoted = 256
	spec.Annotations = nil
	if p := spec.Process; p != nil {
		p.Env = nil // of a PATH that is long
		for i, arg := range p.Args {
			p.Args[i] = strings.ToValidUTF8(arg[:min(len(arg), quoted)], "")
		}
	}
}

// replace is seen by nobody half-way, unless the disk is full: then the file itself is written
// over, which needs no room.
func replace(file string, text []byte) error {
	part := file + ".part"
	err := os.WriteFile(part, text, 0o600)
	if err == nil {
		return os.Rename(part, file)
	}
	_ = os.Remove(part)
	if fault.DiskFull(err) {
		err = overwrite(file, text)
	}
	return err
}

// overwrite puts text, which is no longer than what is there, in its place.
func overwrite(file string, text []byte) error {
	f, err := os.OpenFile(file, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	return errors.Join(err, f.Truncate(int64(len(text))), f.Close())
}

func tooLong(size int) error {
	return fmt.Errorf("config.json of the container would have %d bytes, at most %d are allowed: shorten its environment, arguments, mounts and annotations: %w",
		size, maxSpec, fault.Invalid)
}

// encodeProcess encodes a command, which has the container's environment, when there is room
// for it in the container's pod. The caller calls free when it is written where the pod is
// measured, or no longer needed.
func (r Ref) encodeProcess(process *specs.Process) (text []byte, free func(), err error) {
	const rest = 4 << 10 // beside its texts
	size := SpecSize(&specs.Spec{Process: process}) + rest
	if size > maxSpec {
		return nil, nil, fmt.Errorf("command has %d bytes as JSON with the container's environment, at most %d are allowed: shorten its arguments or the container's environment: %w",
			size, maxSpec, fault.Invalid)
	}
	free = func() {}
	if r.Claim != nil {
		if free, err = r.Claim(size); err != nil {
			return nil, nil, err
		}
	}
	if text, err = encode(process); err != nil {
		free()
	}
	return text, free, err
}

// encode is json.Marshal without the escapes for HTML, of six bytes for a character.
func encode(v any) ([]byte, error) {
	var text bytes.Buffer
	e := json.NewEncoder(&text)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, err
	}
	return text.Bytes(), nil
}

// SpecSize is how many bytes a config.json takes, but for what is of one size in all.
func SpecSize(spec *specs.Spec) int {
	size := 0
	count := func(texts ...string) {
		for _, text := range texts {
			size += encodedSize(text)
		}
	}
	if p := spec.Process; p != nil {
		count(p.Args...)
		count(p.Env...)
	}
	for _, m := range spec.Mounts {
		count(m.Destination, m.Source, m.Type)
		count(m.Options...)
	}
	for key, value := range spec.Annotations {
		count(key, value)
	}
	return size
}

// encodedSize is the length of a string in JSON, with its quotes and a comma.
func encodedSize(text string) int {
	size := len(text) + len(`"",`)
	for i := range len(text) {
		switch c := text[i]; {
		case c < ' ':
			size += len(`\u0000`) - 1
		case c == '"' || c == '\\':
			size++
		}
	}
	return size
}

// checkProcess refuses what the kernel cannot start, and what config.json cannot hold.
func checkProcess(p *specs.Process) error {
	if p == nil {
		return nil
	}
	var stack unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_STACK, &stack); err != nil {
		return fmt.Errorf("read stack limit: %w", err)
	}
	if err := rules.CheckExec(p, stack.Cur); err != nil {
		return err
	}
	for _, entry := range p.Env {
		if name, _, _ := strings.Cut(entry, "="); !utf8.ValidString(entry) {
			return fmt.Errorf("environment variable %.80q is not valid UTF-8, which config.json cannot hold: put its value into a file: %w", name, fault.Invalid)
		}
	}
	return nil
}

// checkPaths refuses paths that the kernel does not take, before a runtime fails with them.
func checkPaths(spec *specs.Spec) error {
	check := func(what string, paths ...string) error {
		for _, path := range paths {
			if len(path) >= unix.PathMax {
				return fmt.Errorf("%s %.80q has %d bytes, but the kernel takes at most %d: %w", what, path, len(path), unix.PathMax-1, fault.Invalid)
			}
		}
		return nil
	}
	var errs []error
	if spec.Process != nil {
		errs = append(errs, check("working directory", spec.Process.Cwd))
	}
	for _, m := range spec.Mounts {
		errs = append(errs, check("mount path", m.Destination, m.Source))
	}
	if l := spec.Linux; l != nil {
		errs = append(errs, check("masked path", l.MaskedPaths...), check("read-only path", l.ReadonlyPaths...))
		for _, d := range l.Devices {
			errs = append(errs, check("device path", d.Path))
		}
	}
	return cmp.Or(errs...)
}

// ReadOnlyFile is a mount that shows a file of the node in the container.
func ReadOnlyFile(source, destination string) specs.Mount {
	return specs.Mount{Destination: destination, Type: "bind", Source: source, Options: []string{"bind", "ro", "nosuid", "nodev"}}
}

const (
	// maxSpec has room for all that the kernel passes to a program, and for its mounts.
	maxSpec = 16 << 20
	// maxRead is more, for what other servers and earlier versions have written.
	maxRead = 64 << 20
	// maxWritten is what earlier versions made of a request: 16 MiB, six bytes for each.
	maxWritten = 112 << 20
)

// ReadSpec reads the config.json of a bundle, or a part of it: T may be any
// type that the document decodes into. The bundle may be another server's.
func ReadSpec[T any](dir string) (*T, error) { return readSpec[T](dir, maxRead) }

func readSpec[T any](dir string, limit int64) (*T, error) {
	text, err := regular.ReadIn(dir, "config.json", limit)
	if err != nil {
		return nil, err
	}
	part := new(T)
	return part, json.Unmarshal(text, part)
}

// readProcess reads the process of a bundle, or a part of it, as ReadSpec does, but
// no further than to its end: it is near the beginning of a document that is mostly
// the seccomp profile.
func readProcess[T any](dir string) (*T, error) {
	f, err := regular.OpenIn(dir, "config.json", maxRead)
	if err != nil {
		return nil, fmt.Errorf("read bundle: %w", err)
	}
	defer f.Close()
	process := new(T)
	if err := decodeField(json.NewDecoder(f), "process", process); err != nil {
		return nil, fmt.Errorf("read %s: %w", f.Name(), err)
	}
	return process, nil
}

// decodeField decodes one field of the object that is next.
func decodeField(d *json.Decoder, name string, into any) error {
	if _, err := d.Token(); err != nil { // {
		return err
	}
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return err
		}
		if key == name {
			return d.Decode(into)
		}
		var other json.RawMessage
		if err := d.Decode(&other); err != nil {
			return err
		}
	}
	return fmt.Errorf("field %q is missing", name)
}
