package checkpoint

import (
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/regular"
)

// Bounds of a checkpoint that is read.
const (
	maxFiles     = 1 << 14
	maxParts     = 1 << 8
	maxDocument  = 16 << 20 // spec.dump, config.dump and the lists of paths
	MaxSignature = 1 << 10
)

// Source is the directory of a pod's checkpoint, which stays open and is not changed. Its files are read only
// below that directory, behind no link and no mount, and only those that a trusted key has signed for.
type Source struct {
	Signed
	dir *os.File
}

// OpenSource opens the directory at an absolute path, and verifies the signature of its manifest by one of keys
// before anything else is read. The error is fault.Denied without such a signature, fault.Invalid for what is
// no checkpoint, fault.Precondition for one that this node cannot restore.
func OpenSource(at string, keys []ed25519.PublicKey) (*Source, error) {
	fd, err := unix.Openat2(unix.AT_FDCWD, at, &unix.OpenHow{
		Flags: unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS,
	})
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil, fmt.Errorf("%s: %w: %w", at, err, fault.NotFound)
	case errors.Is(err, unix.ELOOP):
		return nil, fmt.Errorf("a part of the path %s is a symbolic link, send the path without links: %w", at, fault.Invalid)
	case errors.Is(err, unix.ENOTDIR):
		return nil, fmt.Errorf("%s is not a directory: %w", at, fault.Invalid)
	case err != nil:
		return nil, &os.PathError{Op: "open", Path: at, Err: err}
	}
	s := &Source{dir: os.NewFile(uintptr(fd), at)}
	if err := s.read(keys); err != nil {
		s.Close()
		return nil, fmt.Errorf("%s: %w", at, err)
	}
	return s, nil
}

// Close closes the directory.
func (s *Source) Close() { _ = s.dir.Close() }

// open opens a regular file.
func (s *Source) open(name string) (*os.File, error) {
	fd, err := unix.Openat2(int(s.dir.Fd()), name, &unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_NOFOLLOW | unix.O_NONBLOCK | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
	})
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil, missing(name)
	case errors.Is(err, unix.ELOOP), errors.Is(err, unix.EXDEV), errors.Is(err, unix.ENXIO), errors.Is(err, unix.ENOTDIR):
		return nil, fmt.Errorf("%s is not a regular file of the directory: %w", name, fault.Invalid)
	case err != nil:
		return nil, &os.PathError{Op: "open", Path: name, Err: err}
	}
	f := os.NewFile(uintptr(fd), name)
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file: %w", name, fault.Invalid)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// text reads a small file.
func (s *Source) text(name string, most int64) ([]byte, error) {
	f, err := s.open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, most+1))
	if err == nil && int64(len(text)) > most {
		err = fmt.Errorf("%s is larger than %d bytes: %w", name, most, fault.Invalid)
	}
	return text, err
}

func (s *Source) read(keys []ed25519.PublicKey) error {
	signature, err := s.text(Signature, MaxSignature)
	if err != nil {
		return err
	}
	manifest, err := s.text(Manifest, MaxManifest)
	if err != nil {
		return err
	}
	if s.Signed, err = ReadSigned(keys, manifest, signature); err != nil {
		return err
	}
	return s.checkSet()
}

// Open opens a file of the checkpoint, its manifest or its signature. Nobody has verified what is in it.
func (s *Source) Open(name string) (*os.File, error) {
	if _, known := s.files[name]; !known && name != Manifest && name != Signature {
		return nil, missing(name)
	}
	return s.open(name)
}

// checkSet checks that the directory has the files of the manifest, and nothing else. Whoever can write to it may put
// millions of names there: it reads few beyond those that it knows.
func (s *Source) checkSet() error {
	dirs := map[string]bool{".": true}
	for _, c := range s.Manifest.Containers {
		dirs[c.Directory], dirs[c.Directory+"/"+Images] = true, true
	}
	for name := range s.files {
		for dir := path.Dir(name); dir != "."; dir = path.Dir(dir) {
			dirs[dir] = true
		}
	}
	found := 0
	for _, dir := range slices.Sorted(maps.Keys(dirs)) { // parents come first
		files, err := s.checkDirectory(dir, dirs)
		if err != nil {
			return err
		}
		found += files
	}
	if found != len(s.files) {
		return fmt.Errorf("%d of the %d files of its manifest are there: %w", found, len(s.files), fault.Invalid)
	}
	return nil
}

// checkDirectory returns how many files of the manifest are in a directory. One that does not exist has none.
func (s *Source) checkDirectory(name string, dirs map[string]bool) (files int, err error) {
	const atOnce = 256
	fd, err := unix.Openat2(int(s.dir.Fd()), name, &unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
	})
	switch {
	case errors.Is(err, unix.ENOENT):
		return 0, nil
	case errors.Is(err, unix.ELOOP), errors.Is(err, unix.EXDEV), errors.Is(err, unix.ENOTDIR):
		return 0, fmt.Errorf("%.100q is not a directory in it: %w", name, fault.Invalid)
	case err != nil:
		return 0, &os.PathError{Op: "open", Path: name, Err: err}
	}
	dir := os.NewFile(uintptr(fd), name)
	defer dir.Close()
	for {
		entries, err := dir.ReadDir(atOnce)
		for _, e := range entries {
			at := path.Join(name, e.Name())
			_, known := s.files[at]
			switch {
			case at == Manifest || at == Signature || e.IsDir() && dirs[at]:
			case !known || !e.Type().IsRegular():
				return 0, fmt.Errorf("%.100q is no file of its manifest: %w", at, fault.Invalid)
			default:
				files++
			}
		}
		if errors.Is(err, io.EOF) {
			return files, nil
		}
		if err != nil {
			return 0, &os.PathError{Op: "read", Path: name, Err: err}
		}
	}
}

// Fetch copies the files of a container to a new directory, and returns it. A file that is not as it was signed
// for is fault.Denied. What is read from the copy has been verified, whatever becomes of the directory.
func (s *Source) Fetch(ctx context.Context, c PodPart, dir string) (Part, error) {
	p := Part{Dir: dir}
	if err := p.Make(); err != nil {
		return p, err
	}
	for _, f := range s.Manifest.Files {
		rest, ok := strings.CutPrefix(f.Path, c.Directory+"/")
		if !ok {
			continue
		}
		if above := path.Dir(rest); above != "." && above != Images {
			return p, fmt.Errorf("%.100q has an unknown directory: %w", f.Path, fault.Invalid)
		}
		if err := s.copyTo(ctx, f, filepath.Join(dir, rest)); err != nil {
			return p, err
		}
	}
	return p, nil
}

// Request returns the CRI requests by which the pod and its containers were made, as JSON. A file that is not as
// it was signed for is fault.Denied; a checkpoint without one is fault.Precondition.
func (s *Source) Request() ([]byte, error) {
	if s.Manifest.Request == "" {
		return nil, fmt.Errorf("the checkpoint does not have the requests of its pod and containers (it is older than this crius, or they were too large): restore it by CRI's RestorePod with requests of your own: %w", fault.Precondition)
	}
	f, ok := s.files[Request]
	if !ok {
		return nil, missing(Request)
	}
	text, err := s.text(Request, MaxRequest)
	if err != nil {
		return nil, err
	}
	if sum := sha256.Sum256(text); hex.EncodeToString(sum[:]) != f.SHA256 {
		return nil, notSigned(Request)
	}
	return text, nil
}

// FetchShm copies the archive of /dev/shm to a new file.
func (s *Source) FetchShm(ctx context.Context, to string) error {
	f, ok := s.files[s.Manifest.SharedMemory]
	if !ok {
		return missing(s.Manifest.SharedMemory)
	}
	return s.copyTo(ctx, f, to)
}

func (s *Source) copyTo(ctx context.Context, f File, at string) error {
	from, err := s.open(f.Path)
	if err != nil {
		return err
	}
	defer from.Close()
	return f.Receive(ctx, at, from)
}

// Spec returns the OCI spec of the container that was checkpointed.
func (p Part) Spec() ([]byte, error) { return p.document(specFile) }

func (p Part) document(name string) ([]byte, error) {
	return regular.Read(filepath.Join(p.Dir, name), maxDocument)
}

func (p Part) list(name string) (paths []string, err error) {
	text, err := p.document(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &paths)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return paths, nil
}

// ApplyLayer makes the changes of the container in a root file system that nobody else uses.
func (p Part) ApplyLayer(ctx context.Context, root string) error {
	deleted, err := p.list(deletedFile)
	if err != nil {
		return err
	}
	opaque, err := p.list(opaqueFile)
	if err != nil {
		return err
	}
	f, err := regular.Open(filepath.Join(p.Dir, diffFile))
	if err != nil {
		return err
	}
	defer f.Close()
	return Apply(ctx, f, Changes{Deleted: deleted, Opaque: opaque}, root)
}
