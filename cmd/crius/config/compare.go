package config

import (
	"cmp"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"github.com/crius-run/crius/cmd/crius/config/foreign"
	"github.com/crius-run/crius/storage"
)

// Comparison lists how a configuration of crius differs from that of another runtime.
type Comparison struct {
	Import      *foreign.Import // what the other runtime's configuration means for crius
	Theirs      Config          // crius's configuration with Import
	Handlers    []string        // of the other runtime, sorted; includes its default handler
	Missing     []string        // handlers of the other runtime that crius does not have
	Differences []Difference
}

// Difference is an option with different effective values.
type Difference struct {
	Key          string
	Theirs       string // in the syntax of crius.toml; empty: the other runtime uses its default
	TheirsOrigin string
	Ours         string
	OursOrigin   string
}

// Compare compares the configuration now with the one that imp means for this node. Values
// with the same effect, such as two names of one file, are not different.
func Compare(imp *foreign.Import, now *Loaded) (*Comparison, error) {
	accepted, err := accept(imp)
	if err != nil {
		return nil, err
	}
	theirs := accepted.loaded
	c := &Comparison{Import: accepted.Import, Theirs: theirs.Config, Handlers: theirs.handlersSet()}
	for _, name := range c.Handlers {
		if _, has := now.Config.Runtime.Handlers[name]; !has {
			c.Missing = append(c.Missing, name)
		}
	}
	values := theirs.effective()
	for key := range now.Config.keys() {
		if !slices.Contains(imp.Targets, key.model) || !c.has(key) {
			continue
		}
		d := Difference{Key: key.Path, Ours: key.TOML(), OursOrigin: now.Origin(key.Path)}
		their := values[key.Path]
		if from, set := theirs.origin[key.Path]; set {
			d.Theirs, d.TheirsOrigin = their.key.TOML(), from.place
		}
		// If neither side sets a key, the defaults are treated as equal; imp.Differ lists
		// those that are not.
		if key.effective(&now.Config) != their.text {
			c.Differences = append(c.Differences, d)
		}
	}
	return c, nil
}

// has reports whether a key concerns the other runtime: a key of a handler does if the
// runtime has that handler. Handlers that only crius has change nothing.
func (c *Comparison) has(key Key) bool {
	if key.Path == key.model {
		return true
	}
	return slices.ContainsFunc(c.Handlers, func(name string) bool {
		return strings.HasPrefix(key.Path, join("runtime.handlers", name)+".")
	})
}

// handlersSet returns the configured handlers and the default handler.
func (l *Loaded) handlersSet() []string {
	var set []string
	for _, name := range names(reflect.ValueOf(l.Config.Runtime.Handlers)) {
		table := join("runtime.handlers", name) + "."
		configured := false
		for key := range l.origin {
			configured = configured || strings.HasPrefix(key, table)
		}
		if configured || name == l.Config.Runtime.DefaultHandler {
			set = append(set, name)
		}
	}
	return set
}

// HandlerSet reports whether a handler has been configured, or is the default one.
func (l *Loaded) HandlerSet(name string) bool { return slices.Contains(l.handlersSet(), name) }

// effect is a key with its effective value.
type effect struct {
	key  Key
	text string
}

func (l *Loaded) effective() map[string]effect {
	all := map[string]effect{}
	for key := range l.Config.keys() {
		all[key.Path] = effect{key, key.effective(&l.Config)}
	}
	return all
}

// effective returns the effective value of k, an option of c, on this node, in a form that
// can be compared.
func (k Key) effective(c *Config) string {
	switch option := k.value.Addr().Interface(); option {
	case &c.Image.Root, &c.Image.RunRoot, &c.Image.ImageStore:
		roots, err := c.Image.Roots()
		if err != nil {
			return k.TOML()
		}
		return realPath(map[any]string{&c.Image.Root: roots.Graph, &c.Image.RunRoot: roots.Run, &c.Image.ImageStore: roots.ForImages()}[option])
	case &c.Image.SignaturePolicy:
		return realPath(cmp.Or(c.Image.SignaturePolicy, storage.DefaultPolicy))
	case &c.Image.NamespacedAuthDir, &c.Image.SignaturePolicyDir, &c.Image.DecryptionKeysPath:
		return strings.Join(present(k.value.String()), "") // a missing directory is as good as none
	case &c.Pod.SELinux:
		if len(present("/sys/fs/selinux/enforce")) == 0 { // SELinux is not enabled
			return ""
		}
	}
	switch value := k.value.Interface().(type) {
	case string:
		if k.formName() == programForm {
			if found, err := exec.LookPath(value); err == nil {
				value = found
			}
		}
		if filepath.IsAbs(value) {
			return realPath(value)
		}
	case []string:
		if k.formName() == pathForm { // directories in search order
			return format(present(value...))
		}
		return format(slices.Sorted(slices.Values(value)))
	}
	return k.TOML()
}

// realPath resolves symbolic links in the existing part of a path.
func realPath(path string) string {
	path = filepath.Clean(path)
	real, err := filepath.EvalSymlinks(path)
	switch {
	case err == nil:
		return real
	case filepath.Dir(path) == path:
		return path
	}
	return filepath.Join(realPath(filepath.Dir(path)), filepath.Base(path))
}

// present returns the paths that exist, without links.
func present(paths ...string) []string {
	found := []string{}
	for _, path := range paths {
		if _, err := os.Stat(path); err == nil {
			found = append(found, realPath(path))
		}
	}
	return found
}

// Inputs lists the files and directories that crius is configured to read. A list yields a
// setting for each of its items.
func (l *Loaded) Inputs() []Setting {
	var all []Setting
	for key := range l.Config.keys() {
		if _, chosen := l.origin[key.Path]; !chosen || !key.isInput() {
			continue
		}
		paths, isList := key.value.Interface().([]string)
		if !isList {
			paths = []string{key.value.String()}
		}
		for _, path := range paths {
			if path != "" {
				all = append(all, Setting{Key: key.Path, Value: path, Origin: l.Origin(key.Path)})
			}
		}
	}
	return all
}
