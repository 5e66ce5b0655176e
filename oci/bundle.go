package oci

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crius-run/crius/internal/regular"
)

// writeSpec puts config.json into the bundle. It is derived from the record
// and needs no fsync.
func writeSpec(dir string, spec *specs.Spec) error {
	text, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "config.json"), text, 0o600)
}

// ReadOnlyFile is a mount that shows a file of the node in the container.
func ReadOnlyFile(source, destination string) specs.Mount {
	return specs.Mount{Destination: destination, Type: "bind", Source: source, Options: []string{"bind", "ro", "nosuid", "nodev"}}
}

// maxSpec is far above what becomes of the largest request.
const maxSpec = 64 << 20

// ReadSpec reads the config.json of a bundle, or a part of it: T may be any
// type that the document decodes into. The bundle may be another server's.
func ReadSpec[T any](dir string) (*T, error) {
	text, err := regular.ReadIn(dir, "config.json", maxSpec)
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
	f, err := regular.OpenIn(dir, "config.json", maxSpec)
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
