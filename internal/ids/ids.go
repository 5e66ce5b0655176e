// Package ids makes the ids of pods and containers.
//
// They are 64 hex digits, as tools that read cgroup names expect. Servers on
// one node may share places where an object has nothing but an id: cgroup
// parents, namespace directories, IPAM leases. So an id also identifies its
// server: 40 random digits, an 8-digit checksum that distinguishes it from ids
// of earlier versions and of other runtimes, and 16 digits derived from the
// root.
package ids

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"path/filepath"
	"strings"
)

// Valid reports whether id has the form of crius's ids: 64 lower-case hex
// digits. Nothing else ever becomes part of a path.
func Valid(id string) bool {
	return len(id) == 64 && strings.Trim(id, "0123456789abcdef") == ""
}

// Unmarked returns an id without a mark, like those of other runtimes and
// earlier versions.
func Unmarked() string {
	var id [32]byte
	_, _ = rand.Read(id[:]) // never fails
	return hex.EncodeToString(id[:])
}

const (
	randomDigits = 40
	markStart    = 48
)

// Mark returns the suffix of the ids of a root. It is derived from the path as
// configured: a root that is moved and replaced by a link keeps its mark.
func Mark(root string) string {
	sum := sha256.Sum256([]byte("crius root " + filepath.Clean(root)))
	return hex.EncodeToString(sum[:])[:64-markStart]
}

// New returns a new id with the mark of a root.
func New(mark string) string {
	random := Unmarked()[:randomDigits]
	return random + checksum(random, mark) + mark
}

func checksum(random, mark string) string {
	sum := sha256.Sum256([]byte(random + mark))
	return hex.EncodeToString(sum[:])[:markStart-randomDigits]
}

// OfOther reports whether another crius has made a valid id: the id has a mark that is
// not ours. An id without a mark does not say which server has made it.
func OfOther(id, ours string) bool {
	mark := id[markStart:]
	return mark != ours && HasMark(id, mark)
}

// HasMark reports whether a valid id was made for the root with that mark.
func HasMark(id, mark string) bool {
	return id == id[:randomDigits]+checksum(id[:randomDigits], mark)+mark
}
