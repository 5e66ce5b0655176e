// Package selinux knows the SELinux contexts of containers: the types that the
// node's policy has for them, and the levels that keep pods from each other's
// files.
//
// A context is user:role:type:level. The type determines what a container may
// do, and the categories of the level which files it may touch: a process may
// use a file only if it has all of the file's categories.
package selinux

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
)

// Contexts are those that the node's policy has for containers. Their levels
// are replaced by those of pods, see At.
type Contexts struct {
	Process    string // of a container
	Init       string // of a container whose program is an init system
	KVM        string // of a container in a virtual machine
	Privileged string // of an unconfined container; empty: the policy has none
	File       string // of files that a container may write
	ReadOnly   string // of files that every container may read and execute
	Categories int    // for levels: c0 and up
}

// names are the keys of lxc_contexts(5), the file in which a policy names the
// contexts of containers, and the defaults for policies that lack a key.
var names = []struct {
	key      string
	fallback string
	field    func(*Contexts) *string
}{
	{"process", "system_u:system_r:container_t:s0", func(c *Contexts) *string { return &c.Process }},
	{"file", "system_u:object_r:container_file_t:s0", func(c *Contexts) *string { return &c.File }},
	{"ro_file", "system_u:object_r:container_ro_file_t:s0", func(c *Contexts) *string { return &c.ReadOnly }},
	{"init_process", "system_u:system_r:container_init_t:s0", func(c *Contexts) *string { return &c.Init }},
	{"kvm_process", "system_u:system_r:container_kvm_t:s0", func(c *Contexts) *string { return &c.KVM }},
	{"", "system_u:system_r:spc_t:s0", func(c *Contexts) *string { return &c.Privileged }},
}

// Load reads the contexts of the policy in use. A policy without those of ordinary
// containers is fault.Precondition.
func Load() (*Contexts, error) { return load(os.DirFS("/"), Accepted) }

// maxContexts bounds files of the policy.
const maxContexts = 64 << 10

func load(root fs.FS, accepted func(context string) error) (*Contexts, error) {
	c := &Contexts{Categories: categories(root)}
	listed, file := policyNames(root)
	for _, n := range names {
		if *n.field(c) = n.fallback; listed[n.key] != "" {
			*n.field(c) = listed[n.key]
		}
	}
	for _, needed := range []string{c.Process, c.File} {
		if err := accepted(At(needed, "s0:c0")); err != nil {
			return nil, fmt.Errorf("SELinux policy has no context %s for containers (%s): %w; install container-selinux or the policy's container module, "+
				"or set pod.selinux = false: %w", needed, file, err, fault.Precondition)
		}
	}
	// Policies differ in the rest; a missing context has a substitute.
	for _, optional := range []struct {
		context *string
		instead string
	}{{&c.ReadOnly, c.File}, {&c.Init, c.Process}, {&c.KVM, c.Process}, {&c.Privileged, ""}} {
		if accepted(*optional.context) != nil {
			*optional.context = optional.instead
		}
	}
	return c, nil
}

// policyNames reads the lxc_contexts of the policy in use, and returns the path
// of that file.
func policyNames(root fs.FS) (contexts map[string]string, file string) {
	config := assignments(root, "etc/selinux/config")
	file = path.Join("etc/selinux", path.Base(path.Clean("/"+config["SELINUXTYPE"])), "contexts/lxc_contexts")
	return assignments(root, file), "/" + file
}

// assignments reads lines of the form name = "value". A missing or too large
// file has none.
func assignments(root fs.FS, file string) map[string]string {
	list := map[string]string{}
	if info, err := fs.Stat(root, file); err != nil || !info.Mode().IsRegular() || info.Size() > maxContexts {
		return list
	}
	text, err := fs.ReadFile(root, file)
	if err != nil {
		return list
	}
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		name, value, found := strings.Cut(line, "=")
		if found && !strings.HasPrefix(line, "#") {
			list[strings.TrimSpace(name)] = strings.Trim(strings.TrimSpace(value), `"`)
		}
	}
	return list
}

// defaultCategories is the number in policies that do not say otherwise.
const defaultCategories = 1024

// categories returns how many this process may assign: the range of its own
// level, s0-s0:c0.c1023, ends with the last.
func categories(root fs.FS) int {
	own, err := fs.ReadFile(root, "proc/self/attr/current")
	if err != nil {
		return defaultCategories
	}
	_, last, found := strings.Cut(strings.TrimRight(string(own), "\x00\n"), ":c0.c")
	if n, err := strconv.Atoi(last); found && err == nil && n > 0 && n < 1<<16 {
		return n + 1
	}
	return defaultCategories
}

// ErrRefused means that the policy in use does not have a context.
var ErrRefused = errors.New("rejected by the kernel")

// Accepted asks the kernel whether the policy has a context.
func Accepted(context string) error {
	f, err := os.OpenFile("/sys/fs/selinux/context", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(context + "\x00")
	if errors.Is(err, unix.EINVAL) {
		err = ErrRefused
	}
	return errors.Join(err, f.Close())
}

// At returns a context with another level. An empty context or level leaves it
// unchanged.
func At(context, level string) string {
	return With(context, "", "", "", level)
}

// With returns a context in which the non-empty arguments replace the parts.
func With(context, user, role, kind, level string) string {
	if context == "" {
		return ""
	}
	parts := strings.SplitN(context, ":", 4)
	for i, part := range []string{user, role, kind, level} {
		if part != "" && i < len(parts) {
			parts[i] = part
		}
	}
	return strings.Join(parts, ":")
}
