package overlay

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// stack makes so many layers, each with a file of its own and one in common.
func stack(t *testing.T, dir string, layers int) Mount {
	t.Helper()
	o := Mount{
		Upper:  filepath.Join(dir, "upper"),
		Work:   filepath.Join(dir, "work"),
		Target: filepath.Join(dir, "target"),
	}
	for i := range layers {
		o.Lower = append(o.Lower, filepath.Join(dir, fmt.Sprintf("layer%03d", i)))
	}
	for _, d := range append([]string{o.Upper, o.Work, o.Target}, o.Lower...) {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for i, d := range o.Lower {
		for _, name := range []string{"all", fmt.Sprintf("only%d", i)} {
			if err := os.WriteFile(filepath.Join(d, name), []byte(fmt.Sprint(i)), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	return o
}

// Both ways of mounting stack all layers in order, with short paths and long
// ones, few layers and many.
func TestMount(t *testing.T) {
	t.Parallel()
	ways := map[string]func(Mount) error{
		"by context": Mount.mountByContext,
		"by string":  Mount.mountByString,
		"either":     Mount.mount,
	}
	for name, mount := range ways {
		for _, layers := range []int{1, 2, 120, 400} {
			for _, depth := range []int{0, 280} {
				t.Run(fmt.Sprintf("%s/%d layers/path +%d", name, layers, depth), func(t *testing.T) {
					t.Parallel()
					dir := filepath.Join(t.TempDir(), `a:b,c\d`, strings.Repeat("long/", depth/5))
					o := stack(t, dir, layers)
					if err := mount(o); err != nil {
						t.Fatal(err)
					}
					defer func() {
						// Detached, for a program that reads the mount table may be looking at it.
						if err := unix.Unmount(o.Target, unix.MNT_DETACH); err != nil {
							t.Error(err)
						}
					}()
					for file, want := range map[string]string{"all": "0", fmt.Sprintf("only%d", layers-1): fmt.Sprint(layers - 1)} {
						if got, err := os.ReadFile(filepath.Join(o.Target, file)); err != nil || string(got) != want {
							t.Errorf("%s: %q, %v; want %q", file, got, err, want)
						}
					}
					if err := os.WriteFile(filepath.Join(o.Target, "new"), nil, 0o600); err != nil {
						t.Error(err)
					}
					if _, err := os.Stat(filepath.Join(o.Upper, "new")); err != nil {
						t.Errorf("a new file is not in the upper directory: %v", err)
					}
					if line := mountLine(t, o.Target); !strings.Contains(line, "volatile") || !strings.Contains(line, " "+Source+" ") {
						t.Errorf("mount table: %s", line)
					}
					if is, err := Mounted(o.Target); !is || err != nil {
						t.Errorf("mounted: %t, %v", is, err)
					}
				})
			}
		}
	}
}

func mountLine(t *testing.T, target string) string {
	t.Helper()
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	escaped := strings.NewReplacer(`\`, `\134`).Replace(target)
	for line := range strings.Lines(string(table)) {
		if strings.Contains(line, " "+escaped+" ") {
			return line
		}
	}
	return ""
}

// While layers are being mounted, another program unmounts the directory in which they are.
func TestMountOfLayersThatAreUnmounted(t *testing.T) {
	t.Parallel()
	for name, writable := range map[string]bool{"writable": true, "read-only": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			o := stack(t, filepath.Join(dir, "layers"), 3)
			o.Target = filepath.Join(dir, "target")
			if writable {
				o.Upper, o.Work = filepath.Join(dir, "upper"), filepath.Join(dir, "work")
			} else {
				o.Upper, o.Work = "", ""
			}
			if err := os.Mkdir(o.Target, 0o700); err != nil {
				t.Fatal(err)
			}
			layers := filepath.Join(dir, "layers")
			if err := unix.Mount(layers, layers, "", unix.MS_BIND, ""); err != nil {
				t.Fatal(err)
			}
			mounted := true
			defer func() {
				if mounted { // an older kernel looks up all directories at once
					_ = unix.Unmount(layers, unix.MNT_DETACH)
				}
			}()
			o.found = func() {
				if mounted {
					if err := unix.Unmount(layers, unix.MNT_DETACH); err != nil {
						t.Error(err)
					}
				}
				mounted = false
			}
			if err := o.Make(); err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := unix.Unmount(o.Target, unix.MNT_DETACH); err != nil {
					t.Error(err)
				}
			}()
			if got, err := os.ReadFile(filepath.Join(o.Target, "only2")); string(got) != "2" {
				t.Errorf("%q, %v", got, err)
			}
			if mounted && appends() {
				t.Error("the directory is still mounted")
			}
		})
	}
}

func TestMountErrors(t *testing.T) {
	t.Parallel()
	for name, mount := range map[string]func(Mount) error{"by context": Mount.mountByContext, "by string": Mount.mountByString, "either": Mount.mount} {
		o := stack(t, t.TempDir(), 2)
		missing := o
		missing.Lower = append([]string{"/none"}, o.Lower...)
		if err := mount(missing); !errors.Is(err, unix.ENOENT) {
			t.Errorf("%s, missing layer: %v", name, err)
		}
		nowhere := o
		nowhere.Target = "/none"
		if err := mount(nowhere); !errors.Is(err, unix.ENOENT) {
			t.Errorf("%s, missing target: %v", name, err)
		}
		odd := o
		odd.Options = []string{"no_such_option=1"}
		err := mount(odd)
		if !errors.Is(err, unix.EINVAL) {
			t.Errorf("%s, unknown option: %v", name, err)
		}
		if name == "either" && !strings.Contains(err.Error(), "no_such_option") {
			t.Errorf("the error does not name the option: %v", err)
		}
		checkMounts(t, filepath.Dir(o.Target), 0)
	}
	deep := stack(t, t.TempDir(), 501)
	if err := deep.mountByContext(); err == nil || !strings.Contains(err.Error(), "501 layers") && !strings.Contains(err.Error(), "lowerdir") {
		t.Errorf("501 layers: %v", err)
	}
}

// The way that appends chooses is the one that mounts, on any kernel.
func TestAppends(t *testing.T) {
	t.Parallel()
	o := stack(t, t.TempDir(), 2)
	err := o.mountByContext()
	if err == nil {
		t.Cleanup(func() { _ = unix.Unmount(o.Target, unix.MNT_DETACH) })
	}
	if works := err == nil; appends() != works {
		t.Errorf("appends() is %v, and a mount by context ends with %v", appends(), err)
	}
}

func TestMountFlags(t *testing.T) {
	flags, rest := mountFlags([]string{"nodev", "", "volatile", "metacopy=on", "redirect_dir=on", "nosuid", "userxattr"})
	if flags.ms != unix.MS_NODEV|unix.MS_NOSUID || flags.attr != unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOSUID {
		t.Errorf("flags %+v", flags)
	}
	if want := append([]parameter{{"userxattr", ""}}, obeyNothing...); !reflect.DeepEqual(rest, want) {
		t.Errorf("rest %+v", rest)
	}
}

func TestMounted(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, path := range []string{dir, filepath.Join(dir, "none"), filepath.Join(dir, "none/none")} {
		if is, err := Mounted(path); is || err != nil {
			t.Errorf("%s: %t, %v", path, is, err)
		}
	}
}

// A layer in the store may have attributes by which overlayfs shows files of other directories, if
// another tool has unpacked it. No mount obeys them, whatever the kernel's default and the options
// of storage.conf.
func TestAttributesOfLayersAreNotObeyed(t *testing.T) {
	t.Parallel()
	users := userNS(t, 300000)
	ways := map[string]func(Mount) error{"by context": Mount.mountByContext, "by string": Mount.mountByString, "mapped": func(o Mount) error {
		o.UserNS = users
		return o.Make()
	}}
	for name, mount := range ways {
		for _, options := range [][]string{nil, {"metacopy=on"}, {"redirect_dir=on", "metacopy=on"}} {
			for _, readOnly := range []bool{false, true} {
				o := lured(t)
				o.Options = options
				if readOnly {
					o.Upper, o.Work = "", ""
				}
				if err := mount(o); err != nil {
					t.Fatalf("%s, %q: %v", name, options, err)
				}
				for _, file := range []string{"d/key", "redirected", "copied"} {
					if got, err := os.ReadFile(filepath.Join(o.Target, file)); err == nil {
						t.Errorf("%s, %q, read-only %v: %s shows %q", name, options, readOnly, file, got)
					}
				}
				if err := unix.Unmount(o.Target, unix.MNT_DETACH); err != nil {
					t.Error(err)
				}
			}
		}
	}
}

// lured makes a layer whose files refer to files of the layer below.
func lured(t *testing.T) Mount {
	t.Helper()
	o := stack(t, t.TempDir(), 2)
	top, base := o.Lower[0], o.Lower[1]
	if err := errors.Join(os.Mkdir(filepath.Join(top, "d"), 0o755), os.Mkdir(filepath.Join(base, "secret"), 0o755)); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{filepath.Join(base, "secret/key"), filepath.Join(base, "copied"), filepath.Join(top, "redirected"), filepath.Join(top, "copied")} {
		if err := os.WriteFile(file, []byte(file), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, a := range [][3]string{
		{"d", "redirect", "/secret"}, {"redirected", "metacopy", ""}, {"redirected", "redirect", "/secret/key"}, {"copied", "metacopy", ""},
	} {
		if err := unix.Setxattr(filepath.Join(top, a[0]), "trusted.overlay."+a[1], []byte(a[2]), 0); err != nil {
			t.Fatal(err)
		}
	}
	return o
}
