// Package quota bounds the writable layers of containers by project quotas of XFS and ext4.
//
// The directories of a layer get a project of their own, which all files in them inherit. The file
// system enforces the project's limits and counts its usage; nothing else is on record. The work
// directory says which project that is, since no container can reach it: the upper directory is the
// container's /, and its root may change its project. A project is taken from the moment a
// directory belongs to it until its last file is gone.
package quota

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/docker/go-units"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/mount"
)

// Limits are bytes and inodes; 0 is no limit.
type Limits struct{ Bytes, Inodes uint64 }

// TakeOptions removes the limits that storage.conf(5) sets by overlay.size and overlay.inodes from
// driver options, and returns them. containers/storage, which honours them only on XFS, would
// refuse them or apply them to layers that crius does not use.
func TakeOptions(options []string) (rest []string, limits Limits, err error) {
	for _, option := range options {
		key, value, _ := strings.Cut(option, "=")
		switch strings.ToLower(key[strings.LastIndex(key, ".")+1:]) {
		case "size":
			var bytes int64
			bytes, err = units.RAMInBytes(value)
			limits.Bytes = uint64(max(bytes, 0))
		case "inodes":
			limits.Inodes, err = strconv.ParseUint(value, 10, 63)
		default:
			rest = append(rest, option)
		}
		if err != nil {
			return nil, Limits{}, fmt.Errorf("storage option %q: %w: %w", option, err, fault.Invalid)
		}
	}
	return rest, limits, nil
}

// The projects of writable layers. The kubelet takes its projects from 1048577 on,
// containers/storage from ten thousand times an inode number. A project in use is never taken,
// whoever uses it.
const (
	firstProject = 1 << 30
	kinds        = 1 << 20 // distance to the projects for layers in user namespaces
)

// Projects are the projects of the writable layers in one directory.
type Projects struct {
	dir    string
	limits Limits
	kernel kernel
}

// In returns the projects of the layers in dir, which need not exist. New layers get limits.
func In(dir string, limits Limits) *Projects {
	return &Projects{dir: dir, limits: limits, kernel: filesystem(dir)}
}

// With returns the projects for new layers that get other limits.
func (p *Projects) With(limits Limits) *Projects {
	return &Projects{dir: p.dir, limits: limits, kernel: p.kernel}
}

// Check says why the limits cannot be enforced. The error is fault.Precondition.
func (p *Projects) Check() error {
	if p.limits == (Limits{}) {
		return nil
	}
	existing := p.dir
	for existing != "/" {
		if _, err := os.Stat(existing); !errors.Is(err, fs.ErrNotExist) {
			break
		}
		existing = filepath.Dir(existing)
	}
	if (filesystem(existing)).enforced() {
		return nil
	}
	where, err := mount.Of(existing)
	if err != nil {
		return err
	}
	return fmt.Errorf("size of writable layers in %s cannot be limited: the %s file system mounted at %s has no project quotas; "+
		"mount XFS with pquota, or ext4 made with -O project,quota with prjquota (Linux 5.14 or later), "+
		"or remove image.writable_layer_size and image.writable_layer_inodes, size and inodes from the overlay options of storage.conf, "+
		"and the pod's annotation for the size: %w",
		p.dir, where.Type, where.Point, fault.Precondition)
}

// Bound gives the two directories of a new writable layer a project with the limits. A layer that
// has a project keeps it, and gets the present limits; a layer that has files but no project stays
// without limits. userNS says that the container is in a user namespace, so it cannot take its
// files out of the project (ioctl_xfs_fssetxattr(2)).
func (p *Projects) Bound(upper, work string, userNS bool) error {
	if p.limits == (Limits{}) {
		return nil
	}
	id, err := p.kernel.project(work)
	if err != nil {
		return err
	}
	if !ours(id) {
		if names, err := os.ReadDir(upper); err != nil || len(names) > 0 {
			return err
		}
		if id, err = p.take(work, userNS); err != nil {
			return err
		}
	}
	// Overlayfs makes files in one directory and moves them to the other, for which both need the
	// same project.
	if err := p.kernel.setProject(upper, id); err != nil {
		return err
	}
	if err := p.kernel.setLimits(id, p.limits); err != nil {
		return fmt.Errorf("limit project %d: %w", id, err)
	}
	return nil
}

// take puts the empty directory into a project that nothing else uses.
func (p *Projects) take(dir string, userNS bool) (uint32, error) {
	const attempts = 100
	for range attempts {
		id := firstProject + rand.Uint32N(kinds)
		if userNS {
			id += kinds
		}
		if of, err := p.kernel.account(id); err != nil {
			return 0, fmt.Errorf("read quota of project %d: %w", id, err)
		} else if of != (account{}) {
			continue
		}
		if err := p.kernel.setProject(dir, id); err != nil {
			return 0, err
		}
		// If two take it at the same moment, both see two directories and give it up.
		if of, err := p.kernel.account(id); err != nil {
			return 0, fmt.Errorf("read quota of project %d: %w", id, err)
		} else if of.used.Inodes == 1 {
			return id, nil
		}
	}
	return 0, fmt.Errorf("no free project found for %s in %d attempts: %w", dir, attempts, fault.Exhausted)
}

func ours(id uint32) bool     { return firstProject <= id && id < firstProject+2*kinds }
func inUserNS(id uint32) bool { return ours(id) && id >= firstProject+kinds }

// Usage returns the usage of the layer with this work directory. If ok is false, its files must be
// counted: it has no project, or its container may have taken files out of it.
func (p *Projects) Usage(work string) (used Limits, ok bool) {
	id, err := p.kernel.project(work)
	if err != nil || !inUserNS(id) {
		return Limits{}, false
	}
	of, err := p.kernel.account(id)
	return of.used, err == nil
}

// Remove calls remove, which deletes a layer, its work directory last, and releases its project.
func (p *Projects) Remove(work string, remove func() error) error {
	id, unknown := p.kernel.project(work)
	if err := remove(); err != nil || unknown != nil || !ours(id) {
		return err
	}
	if err := p.kernel.setLimits(id, Limits{}); err != nil && p.kernel.enforced() {
		return fmt.Errorf("remove limits of project %d: %w", id, err)
	}
	return nil
}

// Sweep releases the projects of deleted layers whose removal was interrupted.
func (p *Projects) Sweep() error {
	var errs []error
	for id, ok := p.kernel.next(firstProject); ok && ours(id); id, ok = p.kernel.next(id + 1) {
		of, err := p.kernel.account(id)
		if err == nil && of.used == (Limits{}) && of.limits != (Limits{}) {
			err = p.kernel.setLimits(id, Limits{})
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("project %d: %w", id, err))
		}
	}
	return errors.Join(errs...)
}
