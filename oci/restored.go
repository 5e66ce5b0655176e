package oci

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	rules "github.com/crius-run/crius/oci/spec"
)

// A restored process has what it had: the runtime applies the mounts, devices, limits and namespaces of the
// request, and none of its credentials. So both specs must say the same, and the processes are looked at before
// they continue.

func mismatch(what string, had, wanted any) error {
	return fmt.Errorf("%s of the checkpoint and of the request differ: %.200s and %.200s; restore it with the request that it was made from: %w", what, fmt.Sprint(had), fmt.Sprint(wanted), fault.Precondition)
}

// compareSpecs refuses a request for which a container of the checkpoint does not do. dumped is the spec of that
// container.
func compareSpecs(dumped []byte, request *specs.Spec) error {
	text, err := json.Marshal(request)
	if err != nil {
		return err
	}
	var had, asked specs.Spec
	if err := json.Unmarshal(text, &asked); err != nil { // so that both have come the same way
		return err
	}
	if err := json.Unmarshal(dumped, &had); err != nil {
		return fmt.Errorf("read the spec of the checkpoint: %w: %w", err, fault.Invalid)
	}
	if had.Process == nil || had.Linux == nil || had.Root == nil {
		return fmt.Errorf("the spec of the checkpoint is incomplete: %w", fault.Invalid)
	}
	before, now := securityOf(&had), securityOf(&asked)
	for i := range before {
		if !reflect.DeepEqual(before[i].value, now[i].value) {
			return mismatch(before[i].what, before[i].value, now[i].value)
		}
	}
	for _, n := range asked.Linux.Namespaces {
		if n.Type == specs.UserNamespace {
			return fmt.Errorf("a container in a user namespace cannot be restored: criu cannot join that of the pod: %w", fault.Precondition)
		}
	}
	return checkHooks(asked.Hooks)
}

// checkHooks refuses hooks that no runtime runs when it restores a container.
func checkHooks(h *specs.Hooks) error {
	if h == nil || len(h.CreateContainer)+len(h.StartContainer)+len(h.Poststart) == 0 {
		return nil
	}
	return fmt.Errorf("a container with OCI hooks of the stages createContainer, startContainer or poststart cannot be restored: runtimes do not run them then: %w", fault.Precondition)
}

type aspect struct {
	what  string
	value any
}

// securityOf returns everything of a spec that a process keeps over a checkpoint, or that its images rely on.
func securityOf(s *specs.Spec) []aspect {
	p, l := s.Process, s.Linux
	return []aspect{
		{"user", p.User.UID},
		{"group", p.User.GID},
		{"additional groups", sorted(p.User.AdditionalGids)},
		{"capabilities", fmt.Sprintf("%x", capabilitiesOf(p.Capabilities))},
		{"no_new_privs", p.NoNewPrivileges},
		{"rlimits", rlimits(p.Rlimits)},
		{"AppArmor profile", p.ApparmorProfile},
		{"SELinux label", p.SelinuxLabel},
		{"seccomp filter", seccompOf(l.Seccomp)},
		{"read-only root", s.Root.Readonly},
		{"propagation of the root", l.RootfsPropagation},
		{"personality", l.Personality},
		{"umask", p.User.Umask},
		{"scheduler", p.Scheduler},
		{"I/O priority", p.IOPriority},
		{"mounts", mountPoints(s.Mounts)},
		{"devices", devices(l.Devices)},
		{"masked paths", sorted(l.MaskedPaths)},
		{"read-only paths", sorted(l.ReadonlyPaths)},
		{"namespaces", namespaces(l.Namespaces)},
		{"terminal", p.Terminal},
		{"command", plain(p.Args)},
		{"working directory", p.Cwd},
		{"environment", environment(p.Env)},
	}
}

func plain(list []string) []string { return append([]string{}, list...) }

func sorted[T ~string | ~uint32](list []T) []T {
	all := append([]T{}, list...)
	slices.Sort(all)
	return all
}

// environment leaves out the hostname, which is the new pod's.
func environment(env []string) []string {
	return sorted(slices.DeleteFunc(slices.Clone(env), func(e string) bool { return strings.HasPrefix(e, "HOSTNAME=") }))
}

func capabilitiesOf(c *specs.LinuxCapabilities) [5]rules.CapSet {
	if c == nil {
		return [5]rules.CapSet{}
	}
	var all [5]rules.CapSet
	for i, names := range [][]string{c.Inheritable, c.Permitted, c.Effective, c.Bounding, c.Ambient} {
		all[i], _ = rules.ParseCapabilities(names) // names that no kernel knows grant nothing
	}
	return all
}

func rlimits(list []specs.POSIXRlimit) []string {
	var all []string
	for _, r := range list {
		all = append(all, fmt.Sprint(r.Type, " ", r.Soft, " ", r.Hard))
	}
	return sorted(all)
}

// seccompOf returns a digest of the filter, which would fill a message.
func seccompOf(s *specs.LinuxSeccomp) string {
	if s == nil {
		return "none"
	}
	text, _ := json.Marshal(s) // cannot fail: it was read from JSON
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:8])
}

// mountPoints leaves out the sources, which are the new pod's. All else of a mount is as it was, whatever the
// request says: also that it is read-only.
func mountPoints(mounts []specs.Mount) []string {
	var all []string
	for _, m := range mounts {
		all = append(all, path.Clean(m.Destination)+" "+m.Type+" "+strings.Join(sorted(m.Options), ","))
	}
	return sorted(all)
}

func devices(list []specs.LinuxDevice) []string {
	var all []string
	for _, d := range list {
		all = append(all, fmt.Sprint(d.Path, " ", d.Type, " ", d.Major, ":", d.Minor))
	}
	return sorted(all)
}

func namespaces(list []specs.LinuxNamespace) []string {
	var all []string
	for _, n := range list {
		all = append(all, fmt.Sprint(n.Type, " ", n.Path != ""))
	}
	return sorted(all)
}

// checkHeld compares all tasks of a container that is held with what its spec gives them, and gives them its
// oom_score_adj. init is its first process.
func checkHeld(init int, group string, spec *specs.Spec) error {
	if init == 0 {
		return fmt.Errorf("the restored container has ended: %w", fault.Precondition)
	}
	pids, err := cgroup.Procs(group)
	if err != nil {
		return err
	}
	own, err := pidNamespace("self")
	if err != nil {
		return err
	}
	all, err := besides(init)
	if err != nil {
		return err
	}
	for _, pid := range append(all, init) {
		if !slices.Contains(pids, pid) {
			return fmt.Errorf("the restored process %d is not in the cgroup of its container; with cgroup v2, update runc: its version 1.1 leaves processes in the cgroup of the checkpoint: %w", pid, fault.Precondition)
		}
	}
	for _, pid := range pids {
		in, err := pidNamespace(strconv.Itoa(pid))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		if in == own { // the runtime's helpers
			continue
		}
		if err := cmp.Or(checkNamespaces(pid, init), checkTasks(pid, spec)); err != nil {
			return fmt.Errorf("restored process %d: %w", pid, err)
		}
	}
	return checkInit(init, spec.Linux.Namespaces)
}

// checkInit refuses a container whose first process is not in the namespaces of its request: its own, or the pod's. That
// of cgroups is only a view, whose cgroups have been looked at.
func checkInit(init int, namespaces []specs.LinuxNamespace) error {
	for _, n := range namespaces {
		if n.Type == specs.CgroupNamespace {
			continue
		}
		kind := string(n.Type)
		if short, ok := map[specs.LinuxNamespaceType]string{specs.MountNamespace: "mnt", specs.NetworkNamespace: "net"}[n.Type]; ok {
			kind = short
		}
		in, err := os.Stat(fmt.Sprintf("/proc/%d/ns/%s", init, kind))
		if err != nil {
			return err
		}
		with, joined := n.Path, n.Path != ""
		if !joined {
			with = "/proc/self/ns/" + kind
		}
		other, err := os.Stat(with)
		if err != nil {
			return err
		}
		if os.SameFile(in, other) != joined {
			return fmt.Errorf("the restored container is not in the %s namespace of its request: %w", n.Type, fault.Precondition)
		}
	}
	return nil
}

// besides returns the other processes in the PID namespace of one, wherever their cgroups are. The dead
// that nobody has reaped run nothing, and are in no cgroup.
func besides(init int) (pids []int, err error) {
	in, err := pidNamespace(strconv.Itoa(init))
	if err != nil {
		return nil, err
	}
	links, err := filepath.Glob("/proc/[0-9]*")
	for _, dir := range links {
		pid, _ := strconv.Atoi(filepath.Base(dir))
		if at, gone := pidNamespace(strconv.Itoa(pid)); gone == nil && at == in && pid != init && !isDead(dir) {
			pids = append(pids, pid)
		}
	}
	return pids, err
}

// isDead reports whether all threads of a process have ended. Its first thread may end before the others.
func isDead(dir string) bool {
	text, err := os.ReadFile(filepath.Join(dir, "status"))
	if err != nil {
		return !errors.Is(err, fs.ErrPermission)
	}
	status := parseStatus(string(text))
	return strings.ContainsAny(status["State"][:min(1, len(status["State"]))], "ZX") && status["Threads"] == "1"
}

func pidNamespace(pid string) (string, error) { return os.Readlink("/proc/" + pid + "/ns/pid") }

// checkNamespaces refuses a process in other namespaces than the first one of its container, whose mounts and network
// nobody has looked at.
func checkNamespaces(pid, init int) error {
	for _, kind := range []string{"mnt", "net", "ipc", "uts", "user"} {
		of, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", init, kind))
		if err != nil {
			return err
		}
		in, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, kind))
		if err != nil {
			return err
		}
		if in != of {
			return fmt.Errorf("it is in a namespace of its own, %s, and the first process of the container in %s: %w", in, of, fault.Precondition)
		}
	}
	return nil
}

func checkTasks(pid int, spec *specs.Spec) error {
	dir := filepath.Join("/proc", strconv.Itoa(pid))
	tasks, err := os.ReadDir(filepath.Join(dir, "task"))
	if err != nil {
		return err
	}
	for _, task := range tasks {
		at := filepath.Join(dir, "task", task.Name())
		text, err := os.ReadFile(filepath.Join(at, "status"))
		if err != nil {
			return err
		}
		if err := checkStatus(parseStatus(string(text)), spec.Process, spec.Linux.Seccomp != nil); err != nil {
			return err
		}
		if err := checkLabel(at, spec.Process); err != nil {
			return err
		}
	}
	if score := spec.Process.OOMScoreAdj; score != nil {
		return os.WriteFile(filepath.Join(dir, "oom_score_adj"), []byte(strconv.Itoa(*score)), 0)
	}
	return nil
}

// checkLabel compares the label of a security module, which a process cannot change by itself.
func checkLabel(task string, p *specs.Process) error {
	if p.ApparmorProfile == "" && p.SelinuxLabel == "" {
		return nil
	}
	text, err := os.ReadFile(filepath.Join(task, "attr/current"))
	if err != nil {
		return err
	}
	label := strings.Trim(string(text), "\x00\n")
	if p.SelinuxLabel != "" && label != p.SelinuxLabel {
		return mismatch("SELinux label", label, p.SelinuxLabel)
	}
	if profile, _, _ := strings.Cut(label, " ("); p.SelinuxLabel == "" && p.ApparmorProfile != "unconfined" && profile != p.ApparmorProfile {
		return mismatch("AppArmor profile", label, p.ApparmorProfile)
	}
	return nil
}

func parseStatus(text string) map[string]string {
	fields := map[string]string{}
	for line := range strings.Lines(text) {
		name, value, _ := strings.Cut(line, ":")
		fields[name] = strings.Join(strings.Fields(value), " ")
	}
	return fields
}

// checkStatus compares /proc/PID/status with what a process of the request has. A process may have fewer
// capabilities, which it can drop by itself, and other ids if a process of the request can take these.
func checkStatus(status map[string]string, p *specs.Process, filtered bool) error {
	four := func(id uint32) string {
		return strings.TrimSuffix(strings.Repeat(strconv.FormatUint(uint64(id), 10)+" ", 4), " ")
	}
	if want := four(p.User.UID); status["Uid"] != want && !mayBecome(p, "CAP_SETUID") {
		return mismatch("user ids", status["Uid"], want)
	}
	if !mayBecome(p, "CAP_SETGID") {
		if want := four(p.User.GID); status["Gid"] != want {
			return mismatch("group ids", status["Gid"], want)
		}
		if had, want := groupsOf(status["Groups"]), groupsOfUser(p.User); !slices.Equal(had, want) {
			return mismatch("additional groups", had, want)
		}
	}
	if err := checkCapabilities(status, p); err != nil {
		return err
	}
	if p.NoNewPrivileges && status["NoNewPrivs"] != "1" {
		return mismatch("no_new_privs", status["NoNewPrivs"], 1)
	}
	if filtered && status["Seccomp"] != "2" {
		return mismatch("seccomp mode", status["Seccomp"], 2)
	}
	return nil
}

// mayBecome reports whether a process of the request has the capability to change its ids: the workers of a
// server that root starts have others.
func mayBecome(p *specs.Process, capability string) bool {
	one, err := rules.ParseCapabilities([]string{capability})
	return err == nil && capabilitiesOf(p.Capabilities)[2]&one == one // effective
}

func groupsOfUser(u specs.User) []uint32 { return slices.Compact(sorted(u.AdditionalGids)) }

func groupsOf(text string) []uint32 {
	groups := []uint32{}
	for word := range strings.FieldsSeq(text) {
		n, err := strconv.ParseUint(word, 10, 32)
		if err != nil {
			n = 1<<32 - 1 // which no request gives
		}
		groups = append(groups, uint32(n))
	}
	slices.Sort(groups)
	return groups
}

func checkCapabilities(status map[string]string, p *specs.Process) error {
	caps := capabilitiesOf(p.Capabilities)
	inheritable, bounding, ambient := caps[0], caps[3], caps[4]
	gained := ambient // by execve(2): root gains what it is not kept from
	if p.User.UID == 0 {
		gained = bounding | inheritable
	}
	for _, set := range []struct {
		field string
		most  rules.CapSet
	}{
		{"CapInh", inheritable}, {"CapPrm", gained}, {"CapEff", gained}, {"CapBnd", bounding}, {"CapAmb", ambient},
	} {
		n, err := strconv.ParseUint(status[set.field], 16, 64)
		if err != nil || rules.CapSet(n)&^set.most != 0 {
			return mismatch(set.field, status[set.field], fmt.Sprintf("%016x", uint64(set.most)))
		}
	}
	return nil
}
