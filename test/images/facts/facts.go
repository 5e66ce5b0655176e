// Package facts is what a process can find out about itself: the ground truth
// with which a test compares a CRI request.
//
// The probe program prints [Self] as JSON from inside a container; the test
// decodes it with [Parse]. Everything is read from the kernel, nothing is
// inferred, and unreadable values stay zero.
package facts

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Facts describes one process.
type Facts struct {
	PID, PPID  int
	Args       []string
	Env        []string
	Cwd        string
	Hostname   string
	UID, GID   int
	Groups     []int // supplementary groups, ascending
	Umask      string
	Caps       Caps
	NoNewPrivs bool
	Seccomp    int // 0 disabled, 1 strict, 2 filter
	OOMScore   int // oom_score_adj
	Limits     map[string]Limit
	Mounts     []Mount
	Cgroups    []string          // lines of /proc/self/cgroup
	Namespaces map[string]string // "net" → "net:[4026531840]"
	FDs        map[int]string    // open file descriptors with their targets
	Processes  map[int]string    // command lines of every visible process
	Addresses  []string          // CIDRs of every interface except lo
}

// Caps are the five capability sets, as bit masks.
type Caps struct{ Inheritable, Permitted, Effective, Bounding, Ambient uint64 }

// Limit is one row of /proc/self/limits.
type Limit struct{ Soft, Hard string }

// Mount is one row of /proc/self/mountinfo.
type Mount struct {
	Root, Point  string
	Options      []string // of the mount: ro, nosuid, ...
	Optional     []string // propagation: shared:N, master:N
	Type, Source string
	Super        []string // of the file system
}

// Has reports whether c is in the set; bits are those of linux/capability.h.
func Has(set uint64, c int) bool { return set&(1<<c) != 0 }

// Mount returns the topmost mount at point, or nil.
func (f *Facts) Mount(point string) *Mount {
	for i, m := range slices.Backward(f.Mounts) {
		if m.Point == point {
			return &f.Mounts[i]
		}
	}
	return nil
}

// Getenv returns the value of the last assignment to name.
func (f *Facts) Getenv(name string) (string, bool) {
	for _, e := range slices.Backward(f.Env) {
		if v, ok := strings.CutPrefix(e, name+"="); ok {
			return v, true
		}
	}
	return "", false
}

// Parse decodes what the probe printed.
func Parse(data []byte) (*Facts, error) {
	f := new(Facts)
	if err := json.Unmarshal(data, f); err != nil {
		return nil, fmt.Errorf("facts: %w in %.200q", err, data)
	}
	return f, nil
}

// Self reads the facts of the calling process.
func Self() *Facts {
	f := &Facts{
		PID: os.Getpid(), PPID: os.Getppid(),
		Args: os.Args, Env: os.Environ(),
		UID: os.Getuid(), GID: os.Getgid(),
		Limits: limits(), Mounts: mounts(),
		Cgroups:    lines("/proc/self/cgroup"),
		Namespaces: links("/proc/self/ns"),
		FDs:        descriptors(), Processes: processes(),
		Addresses: addresses(),
	}
	f.Cwd, _ = os.Getwd()
	f.Hostname, _ = os.Hostname()
	f.Groups, _ = os.Getgroups()
	slices.Sort(f.Groups)
	f.OOMScore, _ = strconv.Atoi(strings.Join(lines("/proc/self/oom_score_adj"), ""))
	f.status()
	return f
}

// status fills in what is only in /proc/self/status.
func (f *Facts) status() {
	hex := func(s string) uint64 { n, _ := strconv.ParseUint(s, 16, 64); return n }
	for _, l := range lines("/proc/self/status") {
		k, v, _ := strings.Cut(l, ":")
		v = strings.TrimSpace(v)
		switch k {
		case "Umask":
			f.Umask = v
		case "NoNewPrivs":
			f.NoNewPrivs = v == "1"
		case "Seccomp":
			f.Seccomp, _ = strconv.Atoi(v)
		case "CapInh":
			f.Caps.Inheritable = hex(v)
		case "CapPrm":
			f.Caps.Permitted = hex(v)
		case "CapEff":
			f.Caps.Effective = hex(v)
		case "CapBnd":
			f.Caps.Bounding = hex(v)
		case "CapAmb":
			f.Caps.Ambient = hex(v)
		}
	}
}

func lines(file string) []string {
	data, err := os.ReadFile(file)
	if err != nil || len(data) == 0 {
		return nil
	}
	return strings.Split(strings.TrimSuffix(string(data), "\n"), "\n")
}

func links(dir string) map[string]string {
	out := map[string]string{}
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if to, err := os.Readlink(filepath.Join(dir, e.Name())); err == nil {
			out[e.Name()] = to
		}
	}
	return out
}

// descriptors leaves out the one needed for reading the directory itself.
func descriptors() map[int]string {
	out := map[int]string{}
	for name, to := range links("/proc/self/fd") {
		if n, err := strconv.Atoi(name); err == nil {
			out[n] = to
		}
	}
	return out
}

func processes() map[int]string {
	out := map[int]string{}
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if data, err := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline")); err == nil {
			out[pid] = strings.TrimSpace(strings.ReplaceAll(string(data), "\x00", " "))
		}
	}
	return out
}

// limits splits "Max open files 1024 4096 files" from the right, because the
// name has spaces and the unit may be missing.
func limits() map[string]Limit {
	out := map[string]Limit{}
	for _, l := range lines("/proc/self/limits")[min(1, len(lines("/proc/self/limits"))):] {
		if len(l) < 67 {
			continue
		}
		out[strings.TrimSpace(l[:26])] = Limit{
			Soft: strings.TrimSpace(l[26:47]),
			Hard: strings.TrimSpace(l[47:67]),
		}
	}
	return out
}

func mounts() []Mount {
	var out []Mount
	for _, l := range lines("/proc/self/mountinfo") {
		left, right, ok := strings.Cut(l, " - ")
		a, b := strings.Fields(left), strings.Fields(right)
		if !ok || len(a) < 6 || len(b) < 3 {
			continue
		}
		out = append(out, Mount{
			Root: a[3], Point: a[4],
			Options:  strings.Split(a[5], ","),
			Optional: a[6:],
			Type:     b[0], Source: b[1],
			Super: strings.Split(b[2], ","),
		})
	}
	return out
}
