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

// writeSpec writes config.json into the bundle, unless it is longer than
// ReadSpec reads. It is derived from the record and needs no fsync.
func writeSpec(dir string, spec *specs.Spec) error {
	if size := SpecSize(spec); size > maxSpec { // before so much memory is used
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

// keptSpec is the number of bytes of config.json that are kept after its
// container has exited.
const keptSpec = 256 << 10

// shortening admits one bundle at a time, because each is read into memory as a
// whole.
var shortening sync.Mutex

// ShortenSpec shortens the config.json of an exited container to keptSpec: it
// removes the environment and arguments, then lists, then annotations and all
// but the beginning of the program's name, until it is short enough. The rest
// stays, such as the namespaces. It leaves a short config.json alone, and a
// bundle that hooks may read when the container is deleted.
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

// shortened encodes a spec without as many parts as necessary, beginning with
// those that say least about the container. It changes the spec.
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

// dropTexts drops annotations, which are no longer read, and most of the
// program's name, which errors only quote.
func dropTexts(spec *specs.Spec) {
	const quoted = 256
	spec.Annotations = nil
	if p := spec.Process; p != nil {
		p.Env = nil // a PATH may be long
		for i, arg := range p.Args {
			p.Args[i] = strings.ToValidUTF8(arg[:min(len(arg), quoted)], "")
		}
	}
}

// replace replaces a file atomically. If the disk is full it overwrites the
// file in place instead, which needs no space.
func replace(file string, text []byte) error {
	part := file + ".part"
	err := os.WriteFile(part, text, 0o600)
	if err == nil {
		err = os.Rename(part, file)
	}
	if err == nil {
		return nil
	}
	_ = os.Remove(part)
	if fault.DiskFull(err) {
		err = overwrite(file, text)
	}
	return err
}

// overwrite writes text, which must not be longer than the file, over the
// file's content.
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

// encodeProcess encodes a command, including the container's environment, once
// the pod's memory budget has room for it. The caller calls free when the text
// has been written where the pod's memory is measured, or is no longer needed.
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

// encode is json.Marshal without HTML escapes, which take six bytes per
// character.
func encode(v any) ([]byte, error) {
	var text bytes.Buffer
	e := json.NewEncoder(&text)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, err
	}
	return text.Bytes(), nil
}

// SpecSize returns the size of a config.json in bytes, without the parts whose
// size is about the same for all.
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

// encodedSize returns the length of a string in JSON, with its quotes and a
// comma.
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

// checkProcess refuses a process that the kernel cannot start or config.json
// cannot hold.
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

// checkPaths refuses paths that the kernel does not accept, before a runtime
// fails with them.
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

// ReadOnlyFile returns a mount that shows a file of the node in the container,
// read-only.
func ReadOnlyFile(source, destination string) specs.Mount {
	return specs.Mount{Destination: destination, Type: "bind", Source: source, Options: []string{"bind", "ro", "nosuid", "nodev"}}
}

const (
	// maxSpec has room for everything that the kernel passes to a program, and
	// for its mounts.
	maxSpec = 16 << 20
	// maxRead is larger, for files that other servers and earlier versions have
	// written.
	maxRead = 64 << 20
	// maxWritten is the largest file that earlier versions made of a request: 16
	// MiB, six bytes per character.
	maxWritten = 112 << 20
)

// ReadSpec reads the config.json of a bundle, or a part of it: T may be any
// type into which the document decodes. The bundle may be another server's.
func ReadSpec[T any](dir string) (*T, error) { return readSpec[T](dir, maxRead) }

func readSpec[T any](dir string, limit int64) (*T, error) {
	text, err := regular.ReadIn(dir, "config.json", limit)
	if err != nil {
		return nil, err
	}
	part := new(T)
	return part, json.Unmarshal(text, part)
}

// readProcess reads the process of a bundle, or a part of it, like ReadSpec,
// but stops at its end: the process is near the beginning of a document that is
// mostly the seccomp profile.
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

// decodeField decodes one field of the object that comes next.
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
