// Package artifact keeps OCI artifacts: files from a registry, such as models, that pods mount as
// image volumes (docs/decisions/0030-artifacts.md).
//
//	<dir>/blobs/<algorithm>-<hex>          content, once for all artifacts
//	<dir>/artifacts/<id>/record.json       names and signatures
//	<dir>/artifacts/<id>/manifest.json     as in the registry
//	<dir>/artifacts/<id>/files/…           for mounts: hard links to blobs
//	<dir>/pending/…                        pulls and removals in progress
//	<dir>/crius-downloads/…                downloads of content (package download)
//
// An artifact is made in pending and moved to its place, synced, by one rename. Removing it does
// the same in reverse. Its files never change. A blob that has no other link is in no artifact.
package artifact

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/regular"
	"github.com/crius-run/crius/storage/diskusage"
	"github.com/crius-run/crius/storage/registry/source"
)

// Artifact is a stored artifact. It is shared between callers and must not be modified.
type Artifact struct {
	ID    string // the SHA-256 digest of its manifest, 64 hexadecimal digits
	Files []source.File
	Record

	Annotations map[string]string // of the manifest; large ones are left out

	ReadOnly bool // in an additional store

	dir     string    // with its files
	remote  *remote   // nil: dir is on this node
	changed time.Time // of the directory; set if ReadOnly

	blocks []uint64        // bytes on the disk, of each of Files
	beside diskusage.Usage // of directories, manifest and record
}

// Record is the part of an artifact that may change.
type Record struct {
	Names   []string        `json:"names"`          // full names by which it was pulled, the newest first
	Former  []string        `json:"former"`         // names that mean other images now
	Digests []digest.Digest `json:"digests"`        // of its manifest and of indexes that led to it
	Refs    []string        `json:"refs,omitempty"` // of Terms, the newest first
	Pulled  time.Time       `json:"pulled"`
	// Removed was set by earlier versions if the artifact was removed while in use. Here it means
	// nothing; other stores that share the artifact leave it out.
	Removed bool `json:"removed"`
}

// document is a record as on the disk. Signatures are read from there when they are needed: they
// may have 2 MiB.
type document struct {
	Record
	Signatures [][]byte `json:"signatures"` // in the form of trust.Blobs
}

// Limits of one artifact, as for images.
const (
	maxNames   = 64 // older ones are removed
	maxDigests = 16 // of its manifest and of indexes; older ones are removed
	maxRefs    = 1024
)

// Limits of all artifacts, which are listed from memory.
const (
	maxArtifacts = 4096
	maxKept      = 32 << 20 // bytes, as kept counts them
	fileOverhead = 64       // bytes
)

// kept returns approximately the memory of an artifact.
func (a *Artifact) kept() (sum int) {
	sum = source.Bytes(a.Annotations)
	for _, f := range a.Files {
		sum += fileOverhead + len(f.Path) + len(f.Digest)
	}
	for _, name := range slices.Concat(a.Names, a.Former, a.Refs) {
		sum += len(name)
	}
	return sum
}

// Size returns the bytes of the disk that the artifact's manifest, record and files take, each content
// counted once.
func (a *Artifact) Size() uint64 { return a.usageWithout(map[digest.Digest]bool{}).Bytes }

// usageWithout returns what the artifact takes of the disk without content in counted, and adds the
// artifact's content to counted.
func (a *Artifact) usageWithout(counted map[digest.Digest]bool) diskusage.Usage {
	sum := a.beside
	for i, f := range a.Files {
		if !counted[f.Digest] {
			counted[f.Digest] = true
			sum = sum.Plus(diskusage.Usage{Bytes: a.blocks[i], Inodes: 1})
		}
	}
	return sum
}

// measure measures the artifact in a directory.
func (a *Artifact) measure(dir string) error {
	blocks := make([]uint64, len(a.Files))
	content, counted := diskusage.Usage{}, map[digest.Digest]bool{}
	for i, f := range a.Files {
		var st unix.Stat_t
		if err := unix.Lstat(filepath.Join(dir, filesName, f.Path), &st); err != nil {
			return &fs.PathError{Op: "lstat", Path: f.Path, Err: err}
		}
		blocks[i] = uint64(st.Blocks) * 512
		if !counted[f.Digest] {
			counted[f.Digest] = true
			content = content.Plus(diskusage.Usage{Bytes: blocks[i], Inodes: 1})
		}
	}
	all, err := diskusage.Of(nil, dir)
	a.blocks, a.beside = blocks, diskusage.Usage{Bytes: all.Bytes - content.Bytes, Inodes: all.Inodes - content.Inodes}
	return err
}

// Content returns the content of the first file of an artifact of a kind, as in the registry. If
// the artifact has been removed, the error is fault.NotFound.
func (a *Artifact) Content(ctx context.Context, kind source.Kind) ([]byte, error) {
	return read(ctx, a.remote, a.dir, func() ([]byte, error) { return a.content(kind) })
}

func (a *Artifact) content(kind source.Kind) ([]byte, error) {
	manifest, err := os.ReadFile(filepath.Join(a.dir, manifestName))
	if err == nil {
		err = kind.Check(manifest, a.Files)
	}
	var content []byte
	if err == nil {
		content, err = regular.Read(filepath.Join(a.dir, filesName, a.Files[0].Path), kind.MaxSize)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("artifact %s is not in the store any more, pull it again: %w: %w", a.ID, err, fault.NotFound)
	}
	if err != nil {
		return nil, err
	}
	if wanted := a.Files[0].Digest; wanted.Algorithm().FromBytes(content) != wanted {
		return nil, fmt.Errorf("%w: its file %q has not the digest that the manifest says; remove it and pull it again", ErrDamaged, a.Files[0].Path)
	}
	return content, nil
}

// Intact returns an ErrDamaged if the content of a file is not that of its digest. It reads all
// files.
func (a *Artifact) Intact() error {
	for _, f := range a.Files {
		content, err := regular.Read(filepath.Join(a.dir, filesName, f.Path), f.Size)
		if err != nil {
			return missing(err)
		}
		if f.Digest.Algorithm().FromBytes(content) != f.Digest {
			return fmt.Errorf("%w: its file %q has not the digest that the manifest says", ErrDamaged, f.Path)
		}
	}
	return nil
}

// withPull returns the record after a pull.
func (r Record) withPull(src *source.Image, ref string) Record {
	r = r.withRef(ref)
	name := src.Name.String()
	r.Names = front(r.Names, maxNames, name)
	r.Former = slices.DeleteFunc(slices.Clone(r.Former), func(n string) bool { return n == name })
	r.Digests = front(r.Digests, maxDigests, src.Digests()...)
	r.Removed, r.Pulled = false, time.Now()
	return r
}

func (r Record) withRef(ref string) Record {
	if ref != "" && !slices.Contains(r.Refs, ref) {
		r.Refs = front(r.Refs, maxRefs, ref)
	}
	return r
}

// same reports whether another record differs only in its time.
func (r Record) same(other Record) bool {
	return r.Removed == other.Removed && slices.Equal(r.Names, other.Names) && slices.Equal(r.Former, other.Former) &&
		slices.Equal(r.Digests, other.Digests) && slices.Equal(r.Refs, other.Refs)
}

// without returns the record without a name, which becomes a former name.
func (r Record) without(name string) Record {
	r.Names = slices.DeleteFunc(slices.Clone(r.Names), func(n string) bool { return n == name })
	r.Former = front(r.Former, maxNames, name)
	return r
}

// front returns list with first in front, without duplicates of first, and with at most limit
// elements.
func front[T comparable](list []T, limit int, first ...T) []T {
	all := slices.Clone(first)
	for _, one := range list {
		if !slices.Contains(all, one) {
			all = append(all, one)
		}
	}
	return all[:min(len(all), limit)]
}

// ErrDamaged says that an artifact lacks something that its record or manifest lists.
var ErrDamaged = errors.New("artifact is damaged")

// load reads the artifact in a directory, and checks that its files exist.
func load(dir string) (*Artifact, error) {
	a := &Artifact{ID: filepath.Base(dir), dir: dir}
	doc, err := readRecord(dir)
	if err != nil {
		return nil, err
	}
	a.Record = doc.Record
	content, err := os.ReadFile(filepath.Join(dir, manifestName))
	if err != nil {
		return nil, missing(err)
	}
	if digest.FromBytes(content).Encoded() != a.ID {
		return nil, fmt.Errorf("%w: its manifest has another digest", ErrDamaged)
	}
	a.Annotations = source.AnnotationsOf(content)
	if a.Files, err = source.FilesOf(content); err != nil { // not damaged: the version that pulled it had other rules
		return nil, err
	}
	for _, f := range a.Files {
		info, err := os.Lstat(filepath.Join(dir, filesName, f.Path))
		if err != nil {
			return nil, missing(err)
		}
		if !info.Mode().IsRegular() || info.Size() != f.Size {
			return nil, fmt.Errorf("%w: its file %q has not the size that the manifest says", ErrDamaged, f.Path)
		}
	}
	return a, a.measure(dir)
}

// document reads the record with the signatures.
func (a *Artifact) document(ctx context.Context) (document, error) {
	return read(ctx, a.remote, a.dir, func() (document, error) { return readRecord(a.dir) })
}

func readRecord(dir string) (doc document, err error) {
	text, err := os.ReadFile(filepath.Join(dir, recordName))
	if err != nil {
		return doc, missing(err)
	}
	return doc, damagedIf(json.Unmarshal(text, &doc))
}

func writeRecord(dir string, doc document) error {
	text, err := json.Marshal(doc)
	if err != nil {
		return err
	}
	path := filepath.Join(dir, recordName)
	if err := writeSynced(path+".new", bytes.NewReader(text)); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

func missing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return damagedIf(err)
	}
	return err
}

func damagedIf(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%w: %w", ErrDamaged, err)
}

// Names within the directory of an artifact.
const (
	recordName   = "record.json"
	manifestName = "manifest.json"
	filesName    = "files"
)
