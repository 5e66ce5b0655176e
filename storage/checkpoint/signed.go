package checkpoint

import (
	"cmp"
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/crius-run/crius/internal/fault"
)

// Signed is the manifest of a pod's checkpoint, which a trusted key has signed.
type Signed struct {
	Manifest PodManifest
	Key      string // name of the key that has signed it
	SHA256   string // of the manifest, in hexadecimal
	files    map[string]File
}

// ReadSigned returns a manifest that one of keys has signed. The error is fault.Denied without such a signature,
// fault.Invalid for what is no checkpoint, fault.Precondition for one that this node cannot restore.
func ReadSigned(keys []ed25519.PublicKey, manifest, signature []byte) (s Signed, err error) {
	if s.Key, err = verify(keys, manifest, signature); err != nil {
		return s, err
	}
	if err := json.Unmarshal(manifest, &s.Manifest); err != nil {
		return s, fmt.Errorf("%s: %w: %w", Manifest, err, fault.Invalid)
	}
	sum := sha256.Sum256(manifest)
	s.SHA256 = hex.EncodeToString(sum[:])
	return s, cmp.Or(s.checkOrigin(), s.checkFiles(), s.checkParts())
}

// Check returns why a checkpoint with this manifest would not be read.
func (m PodManifest) Check() error {
	s := Signed{Manifest: m}
	return cmp.Or(s.checkOrigin(), s.checkFiles(), s.checkParts())
}

// File returns the file of the checkpoint with a path.
func (s *Signed) File(name string) (f File, ok bool) {
	f, ok = s.files[name]
	return f, ok
}

func (s *Signed) checkOrigin() error {
	switch m := &s.Manifest; {
	case m.Version != manifestVersion:
		return fmt.Errorf("version %d of the checkpoint is not known to this crius, which knows %d: %w", m.Version, manifestVersion, fault.Precondition)
	case m.Architecture != runtime.GOARCH:
		return fmt.Errorf("the checkpoint is of the architecture %q and this node is %s: %w", m.Architecture, runtime.GOARCH, fault.Precondition)
	}
	return nil
}

// checkFiles checks the list of files.
func (s *Signed) checkFiles() error {
	if len(s.Manifest.Files) > maxFiles {
		return fmt.Errorf("%s has more than %d files: %w", Manifest, maxFiles, fault.Invalid)
	}
	s.files = map[string]File{}
	var size int64
	for _, f := range s.Manifest.Files {
		if !filepath.IsLocal(f.Path) || path.Clean(f.Path) != f.Path || strings.Count(f.Path, "/") > 2 {
			return fmt.Errorf("%s has the path %.100q: %w", Manifest, f.Path, fault.Invalid)
		}
		if _, twice := s.files[f.Path]; twice || f.Path == Manifest || f.Path == Signature {
			return fmt.Errorf("%s has %.100q twice: %w", Manifest, f.Path, fault.Invalid)
		}
		if f.Size < 0 || f.Size > math.MaxInt64-size {
			return fmt.Errorf("%s has a file of %d bytes: %w", Manifest, f.Size, fault.Invalid)
		}
		size += f.Size
		s.files[f.Path] = f
	}
	return nil
}

// checkParts checks the list of containers: each has a name and a directory of its own.
func (s *Signed) checkParts() error {
	m := &s.Manifest
	if len(m.Containers) == 0 || len(m.Containers) > maxParts {
		return fmt.Errorf("%s has %d containers, at least 1 and at most %d are allowed: %w", Manifest, len(m.Containers), maxParts, fault.Invalid)
	}
	names, dirs := map[string]bool{}, map[string]bool{}
	for _, c := range m.Containers {
		if c.Name == "" || names[c.Name] || dirs[c.Directory] || !filepath.IsLocal(c.Directory) || strings.Contains(c.Directory, "/") || c.Directory == "." {
			return fmt.Errorf("%s has the container %.100q in %.100q: %w", Manifest, c.Name, c.Directory, fault.Invalid)
		}
		names[c.Name], dirs[c.Directory] = true, true
	}
	if m.SharedMemory != "" && m.SharedMemory != Shm {
		return fmt.Errorf("%s has shared memory in %.100q: %w", Manifest, m.SharedMemory, fault.Invalid)
	}
	if m.Request != "" && m.Request != Request {
		return fmt.Errorf("%s has the requests in %.100q: %w", Manifest, m.Request, fault.Invalid)
	}
	for name := range s.files {
		if dir, _, below := strings.Cut(name, "/"); below && !dirs[dir] || !below && name != m.SharedMemory && name != m.Request {
			return fmt.Errorf("%s has the file %.100q, which belongs to no container: %w", Manifest, name, fault.Invalid)
		}
	}
	return nil
}

// Size returns how many bytes the files of the checkpoint have.
func (s *Signed) Size() (size uint64) {
	for _, f := range s.files {
		size += uint64(f.Size)
	}
	return size
}

// Part returns the container with a name.
func (s *Signed) Part(name string) (PodPart, bool) {
	i := slices.IndexFunc(s.Manifest.Containers, func(c PodPart) bool { return c.Name == name })
	if i < 0 {
		return PodPart{}, false
	}
	return s.Manifest.Containers[i], true
}

func missing(name string) error { return fmt.Errorf("%s is missing: %w", name, fault.Invalid) }

func notSigned(name string) error {
	return fmt.Errorf("%s is not the file that was signed for: %w", name, fault.Denied)
}

// Receive writes the file, which must not exist, from a stream. A stream that has anything but the content that
// was signed for is fault.Denied.
func (f File) Receive(ctx context.Context, at string, from io.Reader) error {
	to, err := os.OpenFile(at, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	err = f.Copy(ctx, to, from)
	return errors.Join(err, to.Close())
}

// Copy writes the content of the file from a stream. A stream that has anything else than what was signed for is
// fault.Denied, after parts of it have been written.
func (f File) Copy(ctx context.Context, to io.Writer, from io.Reader) error {
	sum := sha256.New()
	err := copyFile(ctx, io.MultiWriter(to, sum), from, f.Size)
	if err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("copy %s: %w", f.Path, err)
	}
	n, _ := io.ReadFull(from, make([]byte, 1))
	if err != nil || n > 0 || hex.EncodeToString(sum.Sum(nil)) != f.SHA256 {
		return notSigned(f.Path)
	}
	return nil
}
