package config

import (
	"fmt"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/nri"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/oci/annotation"
	"github.com/crius-run/crius/oci/pullcgroup"
	"github.com/crius-run/crius/oci/spec"
	"github.com/crius-run/crius/oci/tuning"
	"github.com/crius-run/crius/server/otlp"
	"github.com/crius-run/crius/storage"
)

// maxSocketPath is the longest path in a sockaddr_un, without the final NUL: unix(7).
const maxSocketPath = 107

// validator collects problems of the values in a configuration.
type validator struct {
	origin   map[string]origin
	paths    map[any]string // of the options, by pointers to them
	problems []error
}

// validate checks all values beyond their types.
func (l *Loaded) validate() []error {
	v := &validator{origin: l.origin, paths: map[any]string{}}
	for k := range l.Config.keys() {
		v.paths[k.value.Addr().Interface()] = k.Path
		v.key(k)
	}
	v.together(&l.Config)
	return v.problems
}

// key checks one value by itself.
func (v *validator) key(k Key) {
	number := int64(1)
	var texts []string
	switch value := k.value.Interface().(type) {
	case time.Duration:
		number = int64(value)
	case int64:
		number = value
	case int:
		number = int64(value)
	case string:
		texts = []string{value}
	case []string:
		texts = value
		v.require(!slices.Contains(value, ""), k.Path, "an item of the list is empty: remove it")
	}
	v.require(number >= 0, k.Path, "must be 0 or more, got %s", k.TOML())
	v.require(number > 0 || !k.form().above, k.Path, "must be %s, got %s", k.form().words, k.TOML())
	for _, text := range texts {
		v.text(k, text)
	}
}

func (v *validator) text(k Key, text string) {
	if allowed := k.Choices(); allowed != nil {
		v.require(slices.Contains(allowed, text), k.Path, "must be one of %s, got %s", strings.Join(allowed, ", "), quote(text))
	}
	form := k.form()
	v.require(form.ok == nil || form.ok(text), k.Path, "must be %s, got %s", form.words, quote(text))
	v.require(!strings.ContainsRune(text, 0), k.Path, "must not contain NUL bytes, got %s", quote(text))
}

// together checks values that depend on each other, and the names of tables.
func (v *validator) together(c *Config) {
	v.require(filepath.Clean(c.Root) != filepath.Clean(c.RunRoot), &c.RunRoot,
		"must differ from root: a reboot may empty run_root, but root must survive it")
	v.apart(c)
	for _, socket := range []*string{&c.API.Listen, &c.API.CrioSocket, &c.NRI.Socket, &c.Runtime.LogJournal} {
		v.require(len(*socket) <= maxSocketPath, socket,
			"path is %d bytes long, but a unix socket path can have at most %d: choose a shorter one", len(*socket), maxSocketPath)
	}
	if dir := filepath.Dir(c.NRI.Socket); len(c.NRI.Socket) <= maxSocketPath {
		v.require(len(dir) <= nri.MaxSocketDir, &c.NRI.Socket,
			"path of the directory is %d bytes long, but can have at most %d: choose a shorter one", len(dir), nri.MaxSocketDir)
	}
	v.require(c.API.CrioSocket == "" || filepath.Clean(c.API.CrioSocket) != filepath.Clean(c.API.Listen), &c.API.CrioSocket,
		"must differ from api.listen")
	v.require(c.Tracing.SamplingRate <= otlp.PerMillion, &c.Tracing.SamplingRate,
		"must be at most %d, got %d", otlp.PerMillion, c.Tracing.SamplingRate)
	v.require(len(c.Network.PluginDirs) > 0, &c.Network.PluginDirs, "must list at least one directory")

	v.logLimit(&c.Runtime)
	v.require(c.Image.PullConnections <= storage.MaxPullConnections, &c.Image.PullConnections,
		"must be at most %d, got %d", storage.MaxPullConnections, c.Image.PullConnections)
	v.require(c.Image.UnpackParallel <= storage.MaxUnpackParallel, &c.Image.UnpackParallel,
		"must be at most %d, got %d", storage.MaxUnpackParallel, c.Image.UnpackParallel)
	v.require(c.Image.WritableSize == 0 || c.Image.WritableSize >= 1<<20, &c.Image.WritableSize,
		"must be 0, for no limit, or at least %d, so that containers can start, got %d", 1<<20, c.Image.WritableSize)
	v.require(c.Image.WritableInodes == 0 || c.Image.WritableInodes >= 100, &c.Image.WritableInodes,
		"must be 0, for no limit, or at least 100, so that containers can start, got %d", c.Image.WritableInodes)
	v.parsed(c)
	v.workloads(c.Runtime.Workloads)

	// A RuntimeClass handler is a DNS label (RFC 1123).
	label := regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)
	handlers := names(reflect.ValueOf(c.Runtime.Handlers))
	for _, name := range handlers {
		v.require(label.MatchString(name), join("runtime.handlers", name),
			"not a valid RuntimeClass handler: use at most 63 lowercase letters, digits and dashes")
	}
	name := c.Runtime.DefaultHandler
	v.require(slices.Contains(handlers, name), &c.Runtime.DefaultHandler,
		"unknown handler %s: add [%s] or choose one of %s", quote(name), join("runtime.handlers", name), strings.Join(handlers, ", "))
}

// logLimit checks that a monitor can compute with the limits. A burst without a rate has no
// effect.
func (v *validator) logLimit(c *oci.Config) {
	const least, most int64 = conmon.LeastLogBytes, conmon.MostLogBytes
	v.require(c.LogRate <= most, &c.LogRate, "must be at most %d, got %d", most, c.LogRate)
	v.require(c.LogRate == 0 || c.LogBurst >= least && c.LogBurst <= most, &c.LogBurst,
		"must be from %d, so that a long line fits, to %d, got %d", least, most, c.LogBurst)
	v.require(c.LogMaxSize == 0 || c.LogMaxSize >= least && c.LogMaxSize <= most, &c.LogMaxSize,
		"must be 0, for no limit, or from %d, so that a long line fits, to %d, got %d", least, most, c.LogMaxSize)
	v.require(c.AttachWait <= time.Hour, &c.AttachWait, "must be at most 1h, so that a client that has gone does not stop a container for longer")
}

// workloads checks the tables of workloads. An annotation must not activate two, since a
// pod can be in only one.
func (v *validator) workloads(workloads map[string]annotation.Workload) {
	activates := map[string]string{}
	for _, name := range names(reflect.ValueOf(workloads)) {
		w, table := workloads[name], join("runtime.workloads", name)
		if w.Activation == "" {
			empty := w.Prefix == "" && len(w.Allowed) == 0 && w.Resources == annotation.CPU{}
			v.require(empty, table, "activation_annotation is missing: without it no pod is in the workload")
			continue
		}
		other, taken := activates[w.Activation]
		v.require(!taken, table+".activation_annotation", "is that of workload %s as well: a pod can be in one workload only", quote(other))
		activates[w.Activation] = name
		v.readable(table+".resources", w.Resources.Check())
	}
}

// readable notes the error of parsing an option.
func (v *validator) readable(option any, err error) {
	v.require(err == nil, option, "%s", strings.TrimSuffix(fmt.Sprint(err), ": "+fault.Invalid.Error()))
}

// parsed checks values that have a grammar with the parsers of their packages.
func (v *validator) parsed(c *Config) {
	_, err := spec.ParseCapabilities(c.Pod.DefaultCapabilities)
	v.readable(&c.Pod.DefaultCapabilities, err)
	_, err = spec.ParseSysctls(c.Pod.DefaultSysctls)
	v.readable(&c.Pod.DefaultSysctls, err)
	v.readable(&c.API.TLSCipherSuites, c.API.TLS().Check())
	v.readable(&c.Image.PullCgroup, pullcgroup.Config{Driver: c.Runtime.CgroupDriver, Parent: c.Image.PullCgroup}.Check())
	_, err = tuning.ParseSet(c.Tuning.SharedCPUs)
	v.readable(&c.Tuning.SharedCPUs, err)
	_, err = tuning.ParseSet(c.Pod.InfraCPUs)
	v.readable(&c.Pod.InfraCPUs, err)
	for _, text := range c.Pod.DefaultUlimits {
		_, err = spec.ParseUlimit(text)
		v.readable(&c.Pod.DefaultUlimits, err)
	}
	for _, text := range c.Pod.AllowedUlimits {
		_, err = spec.ParseUlimit(text)
		v.readable(&c.Pod.AllowedUlimits, err)
	}
	for _, text := range c.Pod.AdditionalDevices {
		_, err = spec.ParseDevice(text)
		v.readable(&c.Pod.AdditionalDevices, err)
	}
}

// apart keeps images and other lasting files out of the directories of pods, containers and
// runtimes: crius treats unknown names there as leftovers, and a wipe removes these
// directories as a whole.
func (v *validator) apart(c *Config) {
	type place struct {
		option *string
		dir    string
	}
	imagestore := c.Image.ImageStore
	if roots, err := c.Image.Roots(); err == nil { // otherwise opening the store reports the error
		imagestore = roots.Images // may come from storage.conf
	}
	for _, p := range []place{
		{&c.Image.Root, c.Image.Root}, {&c.Image.RunRoot, c.Image.RunRoot}, {&c.Image.ImageStore, imagestore},
		{&c.Image.TemporaryDir, c.Image.TemporaryDir}, {&c.Pod.NamespacesDir, c.Pod.NamespacesDir},
	} {
		for _, root := range []*string{&c.Root, &c.RunRoot} {
			for _, taken := range []string{"pods", "containers", "runtime"} {
				taken = filepath.Join(*root, taken)
				v.require(!strings.HasPrefix(filepath.Clean(p.dir)+"/", taken+"/"), p.option,
					"must be outside %s, which crius manages below %s and empties as pods and containers are removed, got %s", taken, v.path(root), quote(p.dir))
			}
		}
	}
}

// require notes a problem with an option or a table unless its condition holds.
func (v *validator) require(ok bool, option any, message string, args ...any) {
	path := v.path(option)
	if !ok {
		v.problems = append(v.problems, &Problem{Where: v.origin[path].place, Key: path, Text: fmt.Sprintf(message, args...)})
	}
}

// path returns the path of an option to which it is given a pointer. It returns a string,
// such as the path of a table in a map, unchanged.
func (v *validator) path(option any) string {
	if path, ok := option.(string); ok {
		return path
	}
	path, ok := v.paths[option]
	if !ok {
		panic(fmt.Sprintf("config: a rule is for a %T that is no option", option))
	}
	return path
}
