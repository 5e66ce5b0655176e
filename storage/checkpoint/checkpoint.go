// Package checkpoint writes what a checkpoint consists of: the archive of one container, as CRI-O and
// checkpointctl know it, or a directory of a pod with a part for each container.
//
// Names are created in a directory that is open, so that nobody can put another one in its place
// meanwhile, and links are never followed. A file has its name only when it is whole and on the disk.
package checkpoint

import (
	"archive/tar"
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
)

// Names of what a part has, which CRI-O gave them.
const (
	Images      = "checkpoint" // directory with the images of criu
	specFile    = "spec.dump"
	configFile  = "config.dump"
	diffFile    = "rootfs-diff.tar"
	deletedFile = "deleted.files"
	opaqueFile  = "opaque.dirs" // crius's own
	DumpLog     = "dump.log"    // of criu
)

// Shm is the name of an archive of a pod's /dev/shm beside the parts of its containers.
const Shm = "devshm-checkpoint.tar"

// Request is the name of the file with the CRI requests by which the pod and its containers were made, as JSON.
const Request = "request.json"

// MaxRequest bounds that file: CRI servers read no larger messages.
const MaxRequest = 16 << 20

// Manifest is the name of the file that says what a pod's checkpoint consists of. It is written last.
const Manifest = "manifest.json"

// Config describes a container, by the names that checkpointctl reads.
type Config struct {
	ID             string    `json:"id"`
	Name           string    `json:"name"`
	ImageID        string    `json:"rootfsImage,omitempty"`
	ImageRef       string    `json:"rootfsImageRef,omitempty"`
	ImageName      string    `json:"rootfsImageName,omitempty"`
	Runtime        string    `json:"runtime,omitempty"`
	CreatedAt      time.Time `json:"createdTime"`
	CheckpointedAt time.Time `json:"checkpointedTime"`
	Format         string    `json:"imageFormat,omitempty"` // crius's own: what has written the images
}

// Values of Config.Format.
const (
	FormatCriu   = "criu"
	FormatGvisor = "gvisor"
)

// Part is the directory of what is known of one container.
type Part struct{ Dir string }

// Make makes the directory, which must not exist, with an empty one for the images in it.
func (p Part) Make() error {
	if err := os.Mkdir(p.Dir, 0o700); err != nil {
		return err
	}
	return os.Mkdir(p.Images(), 0o700)
}

// Images returns the directory for the images of criu or gVisor.
func (p Part) Images() string { return filepath.Join(p.Dir, Images) }

// PutConfig writes the description of the container and its spec.
func (p Part) PutConfig(c Config, spec any) error {
	return errors.Join(p.putJSON(configFile, c), p.putJSON(specFile, spec))
}

// PutLayer writes what the container has changed of its root file system; see Diff.
func (p Part) PutLayer(ctx context.Context, upper string, hidden []string) error {
	f, err := p.create(diffFile)
	if err != nil {
		return err
	}
	to := bufio.NewWriterSize(f, 1<<20)
	changes, err := Diff(ctx, upper, hidden, to)
	if err == nil {
		err = to.Flush()
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	err = p.putJSON(deletedFile, slices.Concat([]string{}, changes.Deleted))
	if len(changes.Opaque) > 0 {
		err = errors.Join(err, p.putJSON(opaqueFile, changes.Opaque))
	}
	return err
}

func (p Part) create(name string) (*os.File, error) {
	return os.OpenFile(filepath.Join(p.Dir, name), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
}

func (p Part) putJSON(name string, value any) error {
	text, err := json.Marshal(value)
	if err != nil {
		return err
	}
	f, err := p.create(name)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	return errors.Join(err, f.Close())
}

// Sync returns when all files of the part are on the disk.
func (p Part) Sync() error {
	return filepath.WalkDir(p.Dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.IsDir() && !e.Type().IsRegular() {
			return err
		}
		f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW, 0)
		if err != nil {
			return err
		}
		return errors.Join(f.Sync(), f.Close())
	})
}

// Size returns the number of bytes in the files of the part.
func (p Part) Size() (size int64) {
	_ = filepath.WalkDir(p.Dir, func(_ string, e fs.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() {
			if info, err := e.Info(); err == nil {
				size += info.Size()
			}
		}
		return nil
	})
	return size
}

// pack writes the part as an archive. Entries are named as the kubelet's tests and checkpointctl expect
// them, and belong to root.
func (p Part) pack(ctx context.Context, to io.Writer) error {
	out := tar.NewWriter(to)
	err := filepath.WalkDir(p.Dir, func(path string, e fs.DirEntry, err error) error {
		if err == nil {
			err = ctx.Err()
		}
		name, _ := filepath.Rel(p.Dir, path)
		if err != nil || name == "." {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		h := &tar.Header{Name: name, Mode: 0o600, ModTime: info.ModTime()}
		if e.IsDir() {
			h.Typeflag, h.Name, h.Mode = tar.TypeDir, name+"/", 0o700
			return out.WriteHeader(h)
		}
		return packFile(ctx, out, h, path)
	})
	if err == nil {
		err = out.Close()
	}
	return err
}

func packFile(ctx context.Context, out *tar.Writer, h *tar.Header, path string) error {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return fmt.Errorf("%s is no file: %w", path, fault.Internal)
	}
	h.Typeflag, h.Size = tar.TypeReg, info.Size()
	if err := out.WriteHeader(h); err != nil {
		return err
	}
	return copyFile(ctx, out, f, h.Size)
}
