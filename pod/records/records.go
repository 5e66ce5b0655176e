// Package records holds the records of pods and containers: what they are made from, how far
// their verbs have come, and what an operator reads in pod.json and container.json.
//
// A record has two parts. The plan was decided when the object was made, and never changes. The
// state is what verbs change. This package changes nothing on the node except for the records.
package records

import (
	"bytes"
	"encoding/json"
	"errors"
	"path/filepath"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/record"
)

// Version changes when a record of the old form can no longer be read.
const Version = 1

// Store has the records below a state directory.
type Store struct {
	Pods       *record.Dir[Pod]
	Containers *record.Dir[Container]
}

// At returns the records below a state directory, which may not be there yet.
func At(stateDir string) *Store {
	return &Store{
		Pods:       record.At[Pod](filepath.Join(stateDir, "pods"), "pod.json", Version),
		Containers: record.At[Container](filepath.Join(stateDir, "containers"), "container.json", Version),
	}
}

// Make makes the directories of all records.
func (s *Store) Make() error { return errors.Join(s.Pods.Make(), s.Containers.Make()) }

// Sync returns when all records are on the disk.
func (s *Store) Sync() error { return errors.Join(s.Pods.Sync(), s.Containers.Sync()) }

// Count counts the records.
func (s *Store) Count() (pods, containers int, err error) {
	podDocs, _, _, podErr := s.Pods.Read()
	ctrDocs, _, _, ctrErr := s.Containers.Read()
	return len(podDocs), len(ctrDocs), errors.Join(podErr, ctrErr)
}

// Has reports whether an id is on record, or may be.
func (s *Store) Has(id string) bool {
	_, podErr := s.Pods.Get(id)
	_, ctrErr := s.Containers.Get(id)
	return !errors.Is(podErr, fault.NotFound) || !errors.Is(ctrErr, fault.NotFound)
}

// Phase is how far the verbs of an object have come.
type Phase string

// Phases in the order in which they are reached.
const (
	Creating Phase = "creating"
	Ready    Phase = "ready"    // pod
	Stopping Phase = "stopping" // pod: dead, and its network is being released
	Stopped  Phase = "stopped"  // pod: everything but the record and the run directory is gone
	Created  Phase = "created"  // container
	Starting Phase = "starting" // container: only the runtime knows whether it started
	Started  Phase = "started"  // container
	Removing Phase = "removing" // both: hidden from readers
)

// Message stores a protobuf message in a JSON document in its own JSON form, which an operator
// can read.
type Message[M proto.Message] struct{ M M }

// MarshalJSON writes the JSON form of the message, null for none.
func (m Message[M]) MarshalJSON() ([]byte, error) {
	if !m.M.ProtoReflect().IsValid() {
		return []byte("null"), nil
	}
	text, err := protojson.Marshal(m.M)
	// protojson varies its white space on purpose; a record must not.
	var compact bytes.Buffer
	if err == nil {
		err = json.Compact(&compact, text)
	}
	return compact.Bytes(), err
}

// UnmarshalJSON reads what MarshalJSON of this version or a later one wrote.
func (m *Message[M]) UnmarshalJSON(text []byte) error {
	var typed M
	if string(text) == "null" {
		return nil
	}
	m.M = typed.ProtoReflect().New().Interface().(M)
	return protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(text, m.M)
}
