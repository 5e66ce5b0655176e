package spec

import (
	"path"
	"regexp"
	"strings"
)

// Cgroup drivers, as the kubelet calls them.
const (
	Cgroupfs = "cgroupfs"
	Systemd  = "systemd"
)

// Prefixes of the names of containers' cgroups. cAdvisor takes CrioPrefix for
// CRI-O's.
const (
	CgroupPrefix = "crius"
	CrioPrefix   = "crio"
)

// CgroupsPath returns linux.cgroupsPath for the container id below the pod's
// cgroup_parent: with the cgroupfs driver a path to prefix-id, with the systemd
// driver "slice:prefix:id", which runtimes turn into prefix-id.scope in that
// slice. A parent that belongs to the other driver is refused, because the
// container would escape the pod's limits (CVE-2025-47291).
func CgroupsPath(driver, prefix, parent, id string) (string, error) {
	if id == "" || strings.ContainsAny(id, "/:\x00") {
		return "", invalid("container id %q cannot name a cgroup", id)
	}
	switch driver {
	case Cgroupfs:
		dir, err := cgroupfsParent(parent)
		if err != nil {
			return "", err
		}
		return path.Join(dir, prefix+"-"+id), nil
	case Systemd:
		slice, err := systemdSlice(parent)
		if err != nil {
			return "", err
		}
		return slice + ":" + prefix + ":" + id, nil
	}
	return "", invalid("cgroup driver %q is unknown: must be %s or %s", driver, Cgroupfs, Systemd)
}

// CgroupfsPath returns the path, below the mount of each hierarchy, of the
// cgroup that a CgroupsPath names.
func CgroupfsPath(driver, cgroupsPath string) (string, error) {
	if driver != Systemd {
		return cgroupfsParent(cgroupsPath)
	}
	parts := strings.Split(cgroupsPath, ":")
	if len(parts) != 3 || parts[1] == "" || parts[2] == "" || strings.Contains(cgroupsPath, "/") {
		return "", invalid("cgroup path %q is not of the form slice:prefix:name", cgroupsPath)
	}
	dir, err := expandSlice(parts[0])
	if err != nil {
		return "", err
	}
	return path.Join(dir, parts[1]+"-"+parts[2]+".scope"), nil
}

func cgroupfsParent(parent string) (string, error) {
	if strings.HasSuffix(parent, ".slice") {
		return "", invalid("cgroup_parent %q is a systemd slice, but crius uses the cgroupfs driver: the kubelet seems to use systemd; set the kubelet's cgroupDriver and runtime.cgroup_driver to the same value", parent)
	}
	if parent == "" || strings.ContainsRune(parent, 0) {
		return "", invalid("cgroup_parent %q is not a path", parent)
	}
	for step := range strings.SplitSeq(parent, "/") {
		if step == ".." || step == "." {
			return "", invalid("cgroup_parent %q must not contain %q", parent, step)
		}
	}
	return path.Clean("/" + parent), nil
}

// systemdSlice takes the name of a slice or its path in the hierarchy and
// returns the name.
func systemdSlice(parent string) (string, error) {
	if !strings.HasSuffix(parent, ".slice") {
		return "", invalid("cgroup_parent %q is not a systemd slice, but crius uses the systemd driver: the kubelet seems to use cgroupfs; set the kubelet's cgroupDriver and runtime.cgroup_driver to the same value", parent)
	}
	slice := path.Base(parent)
	dir, err := expandSlice(slice)
	if err != nil {
		return "", err
	}
	if strings.Contains(parent, "/") && "/"+strings.Trim(parent, "/") != dir {
		return "", invalid("cgroup_parent %q is not the path of systemd slice %s, which is %s", parent, slice, dir)
	}
	return slice, nil
}

// sliceName matches a unit name whose dashes separate the slices in which it is
// nested.
var sliceName = regexp.MustCompile(`^[A-Za-z0-9_.\\@]+(-[A-Za-z0-9_.\\@]+)*\.slice$`)

// expandSlice returns the directory of a slice: a-b.slice lies in a.slice.
func expandSlice(slice string) (string, error) {
	if slice == "-.slice" {
		return "/", nil
	}
	if len(slice) > 255 || !sliceName.MatchString(slice) {
		return "", invalid("cgroup_parent %.300q is not a valid systemd slice name", slice)
	}
	dir, prefix := "/", ""
	for step := range strings.SplitSeq(strings.TrimSuffix(slice, ".slice"), "-") {
		prefix += step
		dir = path.Join(dir, prefix+".slice")
		prefix += "-"
	}
	return dir, nil
}
