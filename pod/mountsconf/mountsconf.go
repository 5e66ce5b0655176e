// Package mountsconf gives containers what the node's mounts.conf lists
// (containers-mounts.conf(5)): secrets and entitlements, such as a subscription to the
// repositories of an enterprise distribution, and the files that say that the node is in FIPS
// mode.
//
// Each container gets its own copies, so that it can neither change the node's files nor keep a
// later version of them. A user who can write to a source could have any file of the node
// copied, by a link. So every directory, link and file on the way must belong to this process's
// user and must not be writable by anyone else. Links between such places are followed, since
// entitlements consist of links.
//
// If something is wrong with the node's files, containers are created without them: they help,
// and restrict nothing.
package mountsconf

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/regular"
	"github.com/crius-run/crius/oci/spec"
)

// Limits of what the containers of a node get.
const (
	maxFile  = 64 << 10 // bytes of a mounts.conf
	maxLines = 64
)

// FIPSFile says by its existence that the node is in FIPS mode.
const FIPSFile = "/etc/system-fips"

// Where programs in a container look for FIPS mode, and the policies of an image for it.
const (
	secretsDir   = "/run/secrets"
	backendsDir  = "/etc/crypto-policies/back-ends"
	fipsBackends = "/usr/share/crypto-policies/back-ends/FIPS"
)

// Set is what is copied.
type Set struct {
	lines []line
	fips  bool
}

// line is a line of mounts.conf.
type line struct{ source, destination string }

// Read reads the first of these files that exists. The set is in FIPS mode if fipsFile exists;
// an empty fipsFile never does. The errors say what will not be copied, and why.
func Read(files []string, fipsFile string) (Set, []error) {
	var set Set
	if fipsFile != "" {
		_, err := os.Stat(fipsFile)
		set.fips = err == nil
	}
	for _, file := range files {
		text, err := regular.ReadTrusted(file, maxFile)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return set, []error{err}
		}
		var errs []error
		set.lines, errs = parse(file, string(text))
		return set, errs
	}
	return set, nil
}

// parse leaves out sources that are not there, as on a node without a subscription.
func parse(file, text string) (lines []line, errs []error) {
	for number, item := range strings.Split(text, "\n") {
		item = strings.TrimSpace(item)
		if item == "" || strings.HasPrefix(item, "#") {
			continue
		}
		l, err := parseLine(item)
		if err == nil && len(lines) == maxLines {
			err = fmt.Errorf("more than %d mounts", maxLines)
		}
		if err == nil && slices.ContainsFunc(lines, func(before line) bool { return before.destination == l.destination }) {
			err = fmt.Errorf("%s is a destination twice", l.destination)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s:%d: %w: %w", file, number+1, err, fault.Precondition))
			continue
		}
		if _, err := os.Stat(l.source); !errors.Is(err, fs.ErrNotExist) {
			lines = append(lines, l)
		}
	}
	return lines, errs
}

func parseLine(text string) (line, error) {
	source, destination, found := strings.Cut(text, ":")
	if !found {
		destination = source
	}
	destination = strings.TrimSuffix(destination, "/")
	if !path.IsAbs(source) || !path.IsAbs(destination) || path.Clean(destination) != destination {
		return line{}, fmt.Errorf("%.200q is not of the form /SOURCE:/DESTINATION", text)
	}
	for _, kernel := range []string{"/proc", "/sys", "/dev"} {
		if strings.HasPrefix(destination+"/", kernel+"/") {
			return line{}, fmt.Errorf("nothing can be mounted at %.200s", destination)
		}
	}
	return line{path.Clean(source), destination}, nil
}

// WithoutFIPS returns the set for a container that does not follow FIPS mode.
func (s Set) WithoutFIPS() Set { return Set{lines: s.lines} }

// Empty reports whether there is nothing to copy.
func (s Set) Empty() bool { return len(s.lines) == 0 && !s.fips }

// Copy copies the set into an empty directory, for a container with this root file system, and
// returns the mounts that show it to the container. All copies belong to uid and gid. Skipped
// says what was not copied, and why.
func (s Set) Copy(dir, rootfs string, uid, gid int) (mounts []*cri.Mount, skipped []error, err error) {
	c := copier{uid: uid, gid: gid, bytes: maxBytes, files: maxFiles}
	secrets := ""
	for i, l := range s.lines {
		to := filepath.Join(dir, strconv.Itoa(i))
		done, err := c.copy(l.source, to, 0)
		if err != nil {
			return nil, nil, err
		}
		if !done {
			continue
		}
		mounts = append(mounts, bind(to, l.destination))
		if l.destination != secretsDir {
			continue
		}
		if info, err := os.Stat(to); err != nil || !info.IsDir() {
			c.skip(fmt.Errorf("%s is no directory, so that nothing in it can say that the node is in FIPS mode: %w", secretsDir, fault.Precondition))
			s.fips = false
			continue
		}
		secrets = to
	}
	if !s.fips {
		return mounts, c.skipped, nil
	}
	if secrets == "" {
		secrets = filepath.Join(dir, "fips")
		if err := c.makeDir(secrets, 0o755); err != nil {
			return nil, nil, err
		}
		mounts = append(mounts, bind(secrets, secretsDir))
	}
	if err := c.makeFile(filepath.Join(secrets, "system-fips"), nil, 0o644); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, nil, err
	}
	backends, err := spec.ResolveBelow(rootfs, fipsBackends)
	if err == nil && !slices.ContainsFunc(mounts, func(m *cri.Mount) bool { return m.GetContainerPath() == backendsDir }) {
		mounts = append(mounts, bind(backends, backendsDir))
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		c.skip(err)
	}
	return mounts, c.skipped, nil
}

func bind(source, destination string) *cri.Mount {
	return &cri.Mount{ContainerPath: destination, HostPath: source}
}
