package spec

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"strings"

	securejoin "github.com/cyphar/filepath-securejoin"
	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Limits on the volumes that an image declares, far above those of real images.
const (
	maxVolumes    = 128
	maxVolumePath = unix.PathMax - 1

	// maxVolumeDepth is in directories. MakeVolumes may have to make each one and
	// looks it up from the root: thousands in each volume would take minutes.
	maxVolumeDepth = 32
)

// MakeVolumes makes the missing directories among the volumes that the image
// declares, for the container's user, and returns all of them, parents first,
// with links resolved inside the root file system. It leaves out volumes at or
// below a target of the request's mounts. Invalid volumes are ignored; the
// second result has an error for each. Too many volumes are fault.Invalid.
//
// The root file system must be mounted, and no process may run in it yet.
func MakeVolumes(in *Input) (volumes []string, ignored []error, err error) {
	if in.Request.Image == nil || len(in.Request.Image.Volumes) == 0 {
		return nil, nil, nil
	}
	if count := len(in.Request.Image.Volumes); count > maxVolumes {
		return nil, nil, invalid("the image declares %d volumes, more than %d: use another image, or set image.volumes to \"ignore\"", count, maxVolumes)
	}
	root, err := os.OpenRoot(in.Facts.Rootfs)
	if err != nil {
		return nil, nil, err
	}
	defer root.Close()
	covered, err := mountTargets(in)
	if err != nil {
		return nil, nil, err
	}
	users := in.podSecurity().GetNamespaceOptions().GetUsernsOptions()
	uid, gid := nodeID(users.GetUids(), in.Facts.User.UID), nodeID(users.GetGids(), in.Facts.User.GID)
	for _, declared := range slices.Sorted(maps.Keys(in.Request.Image.Volumes)) {
		volume, err := resolveVolume(in.Facts.Rootfs, declared)
		if err == nil && (slices.Contains(volumes, volume) || atOrBelow(volume, covered)) {
			continue
		}
		if err == nil {
			err = makeVolume(root, volume, uid, gid)
		}
		switch {
		case err == nil:
			volumes = append(volumes, volume)
		case imageCausedVolumeError(err):
			ignored = append(ignored, fmt.Errorf("%.256q: %w", declared, err))
		default:
			return nil, nil, fmt.Errorf("make the image's volume %.256q: %w", declared, err)
		}
	}
	return volumes, ignored, nil
}

// mountTargets returns the targets of the request's mounts, with links
// resolved.
func mountTargets(in *Input) ([]string, error) {
	var targets []string
	for _, m := range in.Request.Container.GetMounts() {
		target, err := securejoin.SecureJoin(in.Facts.Rootfs, m.GetContainerPath())
		if err != nil {
			return nil, invalid("mount at %q: resolve symbolic links in the image: %v", m.GetContainerPath(), err)
		}
		targets = append(targets, below(in.Facts.Rootfs, target))
	}
	return targets, nil
}

var errVolumePath = errors.New("not an absolute path below /, or it contains \"..\"")

// resolveVolume returns the path to which a volume leads inside the root file
// system.
func resolveVolume(rootfs, declared string) (string, error) {
	if !path.IsAbs(declared) || len(declared) > maxVolumePath || strings.ContainsRune(declared, 0) ||
		slices.Contains(strings.Split(declared, "/"), "..") {
		return "", errVolumePath
	}
	if strings.Count(declared, "/") > maxVolumeDepth {
		return "", errVolumeDepth
	}
	target, err := securejoin.SecureJoin(rootfs, declared)
	if err != nil {
		return "", err
	}
	volume := below(rootfs, target)
	if volume == "/" {
		return "", errVolumePath
	}
	if strings.Count(volume, "/") > maxVolumeDepth {
		return "", errVolumeDepth
	}
	if atOrBelow(volume, reservedPaths) {
		return "", errVolumeReserved
	}
	return volume, nil
}

var errVolumeDepth = fmt.Errorf("it is more than %d directories deep", maxVolumeDepth)

// reservedPaths are where the kernel's file systems and the pod's files are
// mounted.
var reservedPaths = []string{"/proc", "/sys", "/dev", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf"}

var errVolumeReserved = errors.New("it would cover a kernel file system or a file that crius manages")

// below returns the path of target, a path in the container, as seen inside the
// root file system.
func below(rootfs, target string) string {
	return path.Join("/", strings.TrimPrefix(target, path.Clean(rootfs)))
}

func atOrBelow(name string, dirs []string) bool {
	return slices.ContainsFunc(dirs, func(dir string) bool {
		return name == dir || strings.HasPrefix(name, strings.TrimSuffix(dir, "/")+"/")
	})
}

var errVolumeFile = errors.New("the image has a file at this path, not a directory")

// makeVolume makes a directory and its missing parents.
func makeVolume(root *os.Root, volume string, uid, gid int) error {
	name := strings.TrimPrefix(volume, "/")
	for end := range len(name) + 1 {
		if end < len(name) && name[end] != '/' {
			continue
		}
		err := root.Mkdir(name[:end], 0o755)
		if errors.Is(err, fs.ErrExist) {
			continue
		}
		if err == nil {
			err = root.Chmod(name[:end], 0o755) // regardless of the server's umask
		}
		if err == nil {
			err = root.Lchown(name[:end], uid, gid)
		}
		if err != nil {
			return err
		}
	}
	info, err := root.Lstat(name)
	if err == nil && !info.IsDir() {
		err = errVolumeFile
	}
	return err
}

// imageCausedVolumeError reports whether the volume, and not the node, is at
// fault.
func imageCausedVolumeError(err error) bool {
	for _, cause := range []error{errVolumePath, errVolumeDepth, errVolumeReserved, errVolumeFile, unix.ENOTDIR, unix.ELOOP, unix.ENAMETOOLONG} {
		if errors.Is(err, cause) {
			return true
		}
	}
	return false
}

// containerEnv is the file by which programs know that they are in a container: systemd,
// buildah, virt-what. podman and CRI-O mount it, which makes it appear on the node where a
// container has the node's /run (podman#25655).
const containerEnv = "/run/.containerenv"

// MarkRootfs makes that file, empty, unless the image has one. An image in which it cannot be
// goes without.
func MarkRootfs(in *Input) error {
	root, err := os.OpenRoot(in.Facts.Rootfs)
	if err != nil {
		return err
	}
	defer root.Close()
	name, err := resolveVolume(in.Facts.Rootfs, containerEnv)
	if err == nil {
		users := in.podSecurity().GetNamespaceOptions().GetUsernsOptions()
		err = makeFile(root, name, nodeID(users.GetUids(), 0), nodeID(users.GetGids(), 0))
	}
	full := errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) // the container may do without
	if err == nil || full || errors.Is(err, fs.ErrExist) || imageCausedVolumeError(err) {
		return nil
	}
	return fmt.Errorf("make %s: %w", containerEnv, err)
}

// makeFile makes an empty file, and the directories above it that are missing.
func makeFile(root *os.Root, name string, uid, gid int) error {
	if dir := path.Dir(name); dir != "/" {
		if err := makeVolume(root, dir, uid, gid); err != nil {
			return err
		}
	}
	name = strings.TrimPrefix(name, "/")
	f, err := root.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	return errors.Join(f.Chmod(0o644), f.Close(), root.Lchown(name, uid, gid))
}

// nodeID maps an id of the container to the id on the node.
func nodeID(mappings []*cri.IDMapping, id uint32) int {
	for _, m := range mappings {
		if id >= m.GetContainerId() && id-m.GetContainerId() < m.GetLength() {
			return int(m.GetHostId() + id - m.GetContainerId())
		}
	}
	return int(id)
}
