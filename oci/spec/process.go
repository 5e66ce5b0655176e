package spec

import (
	"cmp"
	"path"
	"slices"
	"strconv"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// command merges the request with the image as Docker does: a command replaces
// the image's entrypoint and its default arguments, arguments replace only the
// latter. An entrypoint of one empty word is how a Dockerfile resets it: none.
func command(in *Input, s *specs.Spec) error {
	request := in.Request.Container
	entrypoint, args := request.GetCommand(), request.GetArgs()
	if image := in.Request.Image; image != nil && len(entrypoint) == 0 {
		if entrypoint = image.Entrypoint; slices.Equal(entrypoint, []string{""}) {
			entrypoint = nil
		}
		if len(args) == 0 {
			args = image.Cmd
		}
	}
	s.Process.Args = slices.Concat(entrypoint, args)
	if len(s.Process.Args) == 0 || s.Process.Args[0] == "" {
		return invalid("nothing to run: neither the request nor the image names a command")
	}
	for i, arg := range s.Process.Args {
		if strings.ContainsRune(arg, 0) {
			return invalid("argument %d of the command contains a NUL byte", i)
		}
	}
	return nil
}

// environment merges, in order of priority: the request, the image, the node's
// defaults, what every container has. Values are bytes; keys must be names.
func environment(in *Input, s *specs.Spec) error {
	for _, kv := range in.Request.Container.GetEnvs() {
		if kv.GetKey() == "" || strings.Contains(kv.GetKey(), "=") {
			return invalid("environment variable %.80q: a name must not be empty or contain '='", kv.GetKey())
		}
	}
	env := in.environment()
	if !env.has("HOME") {
		home := in.Facts.User.Home
		if in.Facts.User.Username == "" { // as its entry in passwd will say
			home = in.Home()
		}
		env.set("HOME", cleanHome(home))
	}
	s.Process.Env = env.list()
	for _, entry := range s.Process.Env {
		if strings.ContainsRune(entry, 0) {
			name, _, _ := strings.Cut(entry, "=")
			return invalid("environment variable %.80q contains a NUL byte", name)
		}
	}
	return nil
}

func (in *Input) environment() *variables {
	env := &variables{}
	env.set("PATH", defaultPath)
	env.setEntries(in.base.Process.Env)
	if in.Facts.Hostname != "" {
		env.set("HOSTNAME", in.Facts.Hostname)
	}
	if in.Request.Container.GetTty() {
		env.set("TERM", "xterm")
	}
	env.setEntries(in.Defaults.Env)
	if in.Request.Image != nil {
		env.setEntries(in.Request.Image.Env)
	}
	for _, kv := range in.Request.Container.GetEnvs() {
		env.set(kv.GetKey(), string(kv.GetValue()))
	}
	return env
}

// variables is an environment in order of the first appearance of each name;
// the last value of a name wins.
type variables struct {
	names  []string
	values map[string]string
}

func (v *variables) set(name, value string) {
	if v.values == nil {
		v.values = map[string]string{}
	}
	if !v.has(name) {
		v.names = append(v.names, name)
	}
	v.values[name] = value
}

// setEntries takes NAME=value. Entries of any other form mean nothing to a
// process and are left out: images in the wild have them.
func (v *variables) setEntries(entries []string) {
	for _, entry := range entries {
		if name, value, ok := strings.Cut(entry, "="); ok && name != "" {
			v.set(name, value)
		}
	}
}

func (v *variables) has(name string) bool {
	_, ok := v.values[name]
	return ok
}

func (v *variables) list() []string {
	list := make([]string, 0, len(v.names))
	for _, name := range v.names {
		list = append(list, name+"="+v.values[name])
	}
	return list
}

// workdir prefers the request's directory to the image's. A path that leads
// through the kernel's magic links is refused: it names files that the runtime
// has open rather than a place in the container (CVE-2024-21626).
func workdir(in *Input, s *specs.Spec) error {
	dir := in.workdir()
	if !path.IsAbs(dir) || strings.ContainsRune(dir, 0) {
		return invalid("working directory %.256q is not an absolute path", dir)
	}
	s.Process.Cwd = path.Clean(dir)
	if magicLink(s.Process.Cwd) {
		return invalid("working directory %.256q leads through /proc/PID", dir)
	}
	return nil
}

func (in *Input) workdir() string {
	dir := in.Request.Container.GetWorkingDir()
	if dir == "" && in.Request.Image != nil {
		dir = in.Request.Image.WorkingDir
	}
	return cmp.Or(dir, "/")
}

// Home is the home directory of a user whom the image does not know: HOME of the
// container's environment, else its working directory.
func (in *Input) Home() string {
	if in.base == nil {
		in.base = in.Defaults.Base.spec()
	}
	if home := in.environment().values["HOME"]; home != "" {
		return home
	}
	return in.workdir()
}

// magicLink reports whether a clean path is inside a process's directory in
// /proc or among the links to it in /dev.
func magicLink(clean string) bool {
	parts := strings.Split(strings.TrimPrefix(clean, "/"), "/")
	if len(parts) < 2 {
		return false
	}
	switch parts[0] {
	case "proc":
		_, err := strconv.Atoi(parts[1])
		return err == nil || parts[1] == "self" || parts[1] == "thread-self"
	case "dev":
		return slices.Contains([]string{"fd", "stdin", "stdout", "stderr"}, parts[1])
	}
	return false
}

// limits writes the rest of what the request says about the process: terminal,
// no_new_privs, rlimits and the OOM score.
func limits(in *Input, s *specs.Spec) error {
	s.Process.Terminal = in.Request.Container.GetTty()
	s.Process.NoNewPrivileges = in.security().GetNoNewPrivs()
	limits := MergeUlimits(in.Defaults.Ulimits, in.Asked.Ulimits)
	s.Process.Rlimits = in.limitOpenFiles(append(in.baseLimits(limits), limits...))

	score := in.Request.Container.GetLinux().GetResources().GetOomScoreAdj()
	if score < -1000 || score > 1000 {
		return invalid("oom_score_adj %d is not between -1000 and 1000", score)
	}
	// Always set: otherwise the container would inherit the monitor's score.
	s.Process.OOMScoreAdj = new(OOMScoreAdj(score, in.Facts.Host))
	return nil
}

// limitOpenFiles adds a limit if the node's policy has none: the soft limit of an untouched
// node, and crius's own hard limit. With a higher soft limit, programs that close all
// descriptors one after the other, or keep a table of them, take seconds and gigabytes to
// start (cri-o#7703).
func (in *Input) limitOpenFiles(limits []specs.POSIXRlimit) []specs.POSIXRlimit {
	const name, soft = "RLIMIT_NOFILE", 1024
	hard := in.Facts.OpenFiles
	if hard == 0 || slices.ContainsFunc(limits, func(l specs.POSIXRlimit) bool { return l.Type == name }) {
		return limits
	}
	return append(limits, specs.POSIXRlimit{Type: name, Soft: min(soft, hard), Hard: hard})
}

// MergeUlimits returns the limits in first that over does not have, followed by those in over.
func MergeUlimits(first, over []specs.POSIXRlimit) []specs.POSIXRlimit {
	kept := slices.DeleteFunc(slices.Clone(first), func(limit specs.POSIXRlimit) bool {
		return slices.ContainsFunc(over, func(o specs.POSIXRlimit) bool { return o.Type == limit.Type })
	})
	return append(kept, over...)
}

// CheckOpenFiles refuses ulimits with more open files than the kernel allows any process; most is
// from MaxOpenFiles.
func CheckOpenFiles(limits []specs.POSIXRlimit, most uint64) error {
	for _, limit := range limits {
		if limit.Type == "RLIMIT_NOFILE" && most != 0 && limit.Hard > most {
			hard := "unlimited"
			if limit.Hard != ^uint64(0) {
				hard = strconv.FormatUint(limit.Hard, 10)
			}
			return invalid("ulimit nofile %s is above fs.nr_open of the node, which is %d", hard, most)
		}
	}
	return nil
}

// OOMScoreAdj returns the score for a process of the container: not below the
// floor, because the kernel refuses lower ones and runc dies without saying
// why.
func OOMScoreAdj(asked int64, host Host) int { return max(int(asked), host.OOMScoreAdjMin) }

// ParseUlimit reads a resource limit such as nofile=1024:4096 (soft, hard) or
// nofile=1024; -1 and "unlimited" mean no limit.
func ParseUlimit(s string) (specs.POSIXRlimit, error) {
	name, value, ok := strings.Cut(s, "=")
	if !ok || !slices.Contains(rlimits(), name) {
		return specs.POSIXRlimit{}, invalid("ulimit %.80q: must be name=soft:hard with one of the names %s",
			s, strings.Join(rlimits(), ", "))
	}
	softText, hardText, two := strings.Cut(value, ":")
	if !two {
		hardText = softText
	}
	soft, okSoft := parseLimit(softText)
	hard, okHard := parseLimit(hardText)
	if !okSoft || !okHard || soft > hard {
		return specs.POSIXRlimit{}, invalid("ulimit %.80q: limits must be numbers, -1 or unlimited, and soft at most hard", s)
	}
	return specs.POSIXRlimit{Type: "RLIMIT_" + strings.ToUpper(name), Soft: soft, Hard: hard}, nil
}

func parseLimit(s string) (uint64, bool) {
	if s == "-1" || s == "unlimited" {
		return ^uint64(0), true
	}
	n, err := strconv.ParseUint(s, 10, 64)
	return n, err == nil
}

func rlimits() []string {
	return []string{
		"as", "core", "cpu", "data", "fsize", "locks", "memlock", "msgqueue", "nice",
		"nofile", "nproc", "rss", "rtprio", "rttime", "sigpending", "stack",
	}
}
