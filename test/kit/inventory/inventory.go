// Package inventory lists what a node may leave behind: processes, mounts,
// namespaces, cgroups, IP leases, network interfaces, firewall rules, abstract
// sockets and files, also in places that all nodes of this machine share.
//
// A snapshot is a set of lines. Each line says by itself what was found and
// where, so that a difference needs no explanation. Everything is read from the
// kernel and the disk; nothing is asked of the server.
//
// It leaves out the firewall chains that the portmap plugin installs once and
// never removes.
package inventory

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/crius-run/crius/internal/ids"
)

// Scope says what belongs to a node. An empty field leaves out its kind.
type Scope struct {
	Dir     string                   // contains everything on disk; appears in command lines, mounts and sockets
	Roots   []string                 // directories whose files are listed
	Storage string                   // containers/storage root: its containers are listed, its images are not
	Leases  string                   // data directory of the host-local plugin
	Cgroup  string                   // parent of all cgroups, relative to each hierarchy
	NetNS   uint64                   // inode of the network namespace
	Within  func(func() error) error // runs a function inside that namespace
	Links   []string                 // interfaces that stay: the bridge plugin never removes its bridge
	Ignore  []int                    // processes that are not the node's

	Shared []string // patterns of paths that nodes share: those whose last elements have an id of the node
	Mark   string   // of the node's ids
}

// OfRuntimes are the places where runtimes keep files wherever their root is: Kata 1, and shims.
var OfRuntimes = []string{
	"/run/kata-containers/*/*", "/run/kata-containers/shared/sandboxes/*", "/run/vc/*/*", "/var/lib/vc/*/*",
	"/run/containerd/*/*/*", "/run/runsc-*",
}

// Snapshot is the state at one moment: "kind: what" lines.
type Snapshot struct{ lines map[string]bool }

// Difference is what changed between two snapshots, ascending.
type Difference struct{ Added, Gone []string }

// Take lists everything within the scope.
func Take(s Scope) (*Snapshot, error) {
	out := &Snapshot{lines: map[string]bool{}}
	for _, pid := range Processes(s) {
		if what, alive := describe(pid); alive {
			out.add(kindProcess, what)
		}
	}
	for _, dir := range Cgroups(s.Cgroup) {
		out.add("cgroup", dir)
	}
	mounts, err := Mounts(s.Dir)
	if err != nil {
		return nil, err
	}
	for _, m := range mounts {
		out.add("mount", m)
	}
	out.files(s)
	if err := out.shared(s); err != nil {
		return nil, err
	}
	if s.Within == nil {
		return out, nil
	}
	return out, s.Within(func() error { return out.network(s.Links) })
}

// Drop removes lines.
func (s *Snapshot) Drop(lines ...string) {
	for _, line := range lines {
		delete(s.lines, line)
	}
}

func (s *Snapshot) add(kind, what string) { s.lines[kind+": "+what] = true }

// Lines returns all lines, ascending.
func (s *Snapshot) Lines() []string { return slices.Sorted(maps.Keys(s.lines)) }

// About returns the lines that name one of the given ids.
func (s *Snapshot) About(ids ...string) []string {
	var out []string
	for _, line := range s.Lines() {
		if slices.ContainsFunc(ids, func(id string) bool { return strings.Contains(line, id) }) {
			out = append(out, line)
		}
	}
	return out
}

// Diff compares two snapshots.
func Diff(before, after *Snapshot) Difference {
	return Difference{Added: Beyond(before.Lines(), after.Lines()), Gone: Beyond(after.Lines(), before.Lines())}
}

// Beyond returns the lines about objects that no known line is about. A process
// counts as the same after execve, because containers start as the runtime's
// init.
func Beyond(known, lines []string) []string {
	seen := map[string]bool{}
	for _, line := range known {
		seen[identity(line)] = true
	}
	return slices.DeleteFunc(slices.Clone(lines), func(line string) bool { return seen[identity(line)] })
}

const kindProcess = "process"

func identity(line string) string {
	if kind, what, _ := strings.Cut(line, ": "); kind == kindProcess {
		pid, _, _ := strings.Cut(what, " ")
		return kind + ": " + pid
	}
	return line
}

// Empty reports that nothing changed.
func (d Difference) Empty() bool { return len(d.Added)+len(d.Gone) == 0 }

// String returns one change per line, and no more than a person can read.
func (d Difference) String() string {
	return Brief("left over: ", d.Added) + Brief("gone: ", d.Gone)
}

// Brief formats the first few lines of each kind.
func Brief(prefix string, lines []string) string {
	const most = 4
	var out strings.Builder
	count := map[string]int{}
	for _, line := range lines {
		kind, _, _ := strings.Cut(line, ":")
		if count[kind]++; count[kind] <= most {
			fmt.Fprintf(&out, "%s%s\n", prefix, line)
		}
	}
	for _, kind := range slices.Sorted(maps.Keys(count)) {
		if more := count[kind] - most; more > 0 {
			fmt.Fprintf(&out, "%s%s: and %d more\n", prefix, kind, more)
		}
	}
	return out.String()
}

// files lists the roots, the leases and the containers of containers/storage.
func (s *Snapshot) files(scope Scope) {
	for _, root := range scope.Roots {
		_ = filepath.WalkDir(root, func(path string, e os.DirEntry, err error) error {
			if err != nil {
				return nil //nolint:nilerr // it went away meanwhile
			}
			if isUnsynced(path) || isNodeKey(path) {
				return nil
			}
			s.add("file", fmt.Sprintf("%s (%s)", path, e.Type()))
			if e.IsDir() && isMount(path, root) {
				return filepath.SkipDir
			}
			return nil
		})
	}
	if scope.Storage != "" {
		containers, _ := filepath.Glob(filepath.Join(scope.Storage, "*-containers", "*"))
		for _, c := range containers {
			if len(filepath.Base(c)) == 64 {
				s.add("storage", c)
			}
		}
	}
	if scope.Leases != "" {
		leases, _ := filepath.Glob(filepath.Join(scope.Leases, "*", "*[.:]*"))
		for _, l := range leases {
			if strings.HasPrefix(filepath.Base(l), "last_reserved_ip") {
				continue
			}
			owner, _ := os.ReadFile(l)
			s.add("lease", fmt.Sprintf("%s of %s", l, strings.Join(strings.Fields(string(owner)), " ")))
		}
	}
}

var anID = regexp.MustCompile("[0-9a-f]{64}")

// shared lists the files with ids of the node in places that it shares with others.
func (s *Snapshot) shared(scope Scope) error {
	paths, err := Shared(scope.Shared, scope.Mark)
	for _, path := range paths {
		s.add("file", path)
	}
	return err
}

// Shared returns the paths that match one of the patterns and whose last elements
// have an id with the mark.
func Shared(patterns []string, mark string) ([]string, error) {
	var found []string
	for _, pattern := range patterns {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			return nil, err
		}
		for _, path := range paths {
			isOurs := func(id string) bool { return ids.HasMark(id, mark) }
			if slices.ContainsFunc(anID.FindAllString(filepath.Base(path), -1), isOurs) {
				found = append(found, path)
			}
		}
	}
	return found, nil
}

// isNodeKey recognizes the keys that a node has from its first checkpoint of a pod on.
func isNodeKey(path string) bool {
	name := filepath.Base(path)
	return name == "checkpoint.key" || name == "checkpoint.pub"
}

// isUnsynced recognizes the previous version of a record that is not on disk
// yet; it is removed by itself (docs/decisions/0012-records.md).
func isUnsynced(path string) bool {
	record, is := strings.CutSuffix(path, ".json.last")
	if !is {
		return false
	}
	_, err := os.Stat(record + ".json")
	return err == nil
}

// isMount reports whether path is a mount point below root, whose content is
// not listed: a root file system may be large.
func isMount(path, root string) bool {
	return path != root && device(path) != device(filepath.Dir(path))
}
