package foreign

import (
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/BurntSushi/toml"
)

// The tables of containerd's runtimes.

// cgroupDriver is the cgroup driver that a runtime of runc's shim selects.
type cgroupDriver struct {
	systemd bool
	from    string
}

// runtimes writes a handler for each table. All handlers have one cgroup driver, that of
// the default runtime.
func (c containerdConversion) runtimes() {
	handlers := map[string]containerdRuntime{}
	for _, id := range []string{"io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri"} {
		at := []string{"plugins", id, "containerd", "runtimes"}
		tables := c.top.table(at...)
		if tables == nil {
			continue
		}
		for name, own := range tables.tables {
			if newer, both := handlers[name]; both { // a file of version 2 with a drop-in of version 3
				newer.own.fill(own)
			} else {
				handlers[name] = containerdRuntime{c, name, append(slices.Clone(at), name), own}
			}
		}
	}
	drivers := map[string]cgroupDriver{}
	for _, name := range slices.Sorted(maps.Keys(handlers)) {
		handlers[name].handler(drivers)
	}
	c.cgroups(drivers)
}

func (c containerdConversion) cgroups(drivers map[string]cgroupDriver) {
	name, _ := c.criText("containerd", "default_runtime_name")
	if name == "" {
		name = "runc"
	}
	chosen, known := drivers[name]
	if !known {
		for _, other := range slices.Sorted(maps.Keys(drivers)) {
			chosen, known = drivers[other], true
			break
		}
	}
	if old, at := c.criFlag(false, "systemd_cgroup"); old {
		chosen, known = cgroupDriver{true, c.from(at)}, true
	}
	if !known {
		chosen = cgroupDriver{false, "default of " + containerd}
	}
	value := "cgroupfs"
	if chosen.systemd {
		value = "systemd"
	}
	c.set("runtime.cgroup_driver", value, chosen.from, "must match the kubelet's cgroupDriver")
}

// containerdRuntime is the table of a runtime.
type containerdRuntime struct {
	containerdConversion
	name string
	at   []string
	own  *table
}

func (r containerdRuntime) path(keys ...string) []string { return append(slices.Clone(r.at), keys...) }

func (r containerdRuntime) put(key string, value any, from, note string) {
	r.set("runtime.handlers."+toml.Key{r.name}.String()+"."+key, value, from, note)
}

func (r containerdRuntime) handler(drivers map[string]cgroupDriver) {
	kind := r.text(r.path("runtime_type")...)
	from := r.from(r.path("runtime_type"))
	if kind == "" && r.name == "runc" { // containerd 2 reads the table over its default for runc
		kind, from = "io.containerd.runc.v2", "default of "+containerd
	}
	if engine, set := r.own.leaves["runtime_engine"]; set && !empty(engine.value) && kind != shimV1 {
		r.remark(keyOf(r.path("runtime_engine")), engine, "containerd reads this key only with the type "+shimV1+": use options.BinaryName")
	}
	switch {
	case kind == shimV1:
		r.v1(from, drivers)
	case kind == "":
		l := r.own.asLeaf()
		r.problem(l.place, keyOf(r.path("runtime_type")), "is missing: containerd refuses this runtime")
	case strings.HasPrefix(kind, "io.containerd.runc."):
		r.runc(from, drivers)
	case strings.HasPrefix(kind, "io.containerd.runsc."):
		r.put("type", "oci", from, "crius runs gVisor through the runsc command line instead of its shim: see docs/handlers.md for the options")
		r.put("path", "runsc", from, "")
		r.others("flags in this file must be set in the handler's options", "")
	default:
		r.shim(kind, from)
	}
}

// shimV1 is the type of runtimes with the first shim, which containerd had before 2.0.
const shimV1 = "io.containerd.runtime.v1.linux"

// v1 imports a runtime with the first shim, whose program is in its table or in that of the plugin. Its
// cgroup driver is the key systemd_cgroup of the CRI plugin.
func (r containerdRuntime) v1(from string, drivers map[string]cgroupDriver) {
	r.put("type", "oci", from, "")
	program := "runc"
	for _, where := range [][]string{{"plugins", shimV1, "runtime"}, r.path("runtime_engine")} {
		if name := r.text(where...); name != "" {
			program, from = name, r.from(where)
		}
	}
	r.put("path", program, from, "")
	drivers[r.name] = cgroupDriver{false, from}
}

// runc imports a runtime with containerd's shim for runc: crius runs the shim's binary
// directly.
func (r containerdRuntime) runc(from string, drivers map[string]cgroupDriver) {
	r.put("type", "oci", from, "")
	binary, where := r.text(r.path("options", "BinaryName")...), r.path("options", "BinaryName")
	if binary == "" {
		r.put("path", "runc", from, "")
	} else {
		r.put("path", binary, r.from(where), "")
	}
	systemd := r.path("options", "SystemdCgroup")
	drivers[r.name] = cgroupDriver{r.flag(systemd...), r.from(systemd)}
	if root := r.path("options", "Root"); r.text(root...) != "" {
		r.out.Builtin = append(r.out.Builtin, keyOf(root)+": crius keeps each runtime's state below run_root, separate from containers created by other tools")
	}
	r.others("no counterpart for OCI runtimes", "BinaryName", "SystemdCgroup", "Root", "IoUid", "IoGid", "CriuImagePath", "CriuPath", "CriuWorkPath")
}

// others remarks on all options that are set, except some.
func (r containerdRuntime) others(why string, except ...string) {
	options := r.own.table("options")
	if options == nil {
		return
	}
	for _, key := range slices.Sorted(maps.Keys(options.leaves)) {
		l := options.leaves[key]
		if !slices.Contains(except, key) && !(rule{}).isOff(l.value) {
			r.remark(keyOf(r.path("options", key)), l, why)
		}
	}
}

// shim imports a runtime with any other shim.
func (r containerdRuntime) shim(kind, from string) {
	program := r.text(r.path("runtime_path")...)
	if program == "" {
		program = kind
		if parts := strings.Split(kind, "."); !filepath.IsAbs(kind) && len(parts) > 1 {
			program = fmt.Sprintf("containerd-shim-%s-%s", parts[len(parts)-2], parts[len(parts)-1])
		}
	} else {
		from = r.from(r.path("runtime_path"))
	}
	r.put("type", "shim", r.from(r.path("runtime_type")), "")
	r.put("path", program, from, "")
	options := r.own.table("options")
	if options == nil {
		return
	}
	var list []string
	for _, key := range slices.Sorted(maps.Keys(options.leaves)) {
		l := options.leaves[key]
		switch value := l.value.(type) {
		case string:
			if value != "" {
				list = append(list, "--"+key+"="+value)
			}
		case bool, int64:
			if !(rule{}).isOff(value) {
				list = append(list, fmt.Sprintf("--%s=%v", key, value))
			}
		default:
			r.remark(keyOf(r.path("options", key)), l, "only strings, numbers and booleans are passed to a shim")
		}
	}
	if len(list) > 0 {
		r.put("options", list, options.asLeaf().place+" "+keyOf(r.path("options")), "")
	}
}
