package cgroup

import (
	"slices"
	"testing"

	"github.com/crius-run/crius/internal/mount"
)

func TestOptions(t *testing.T) {
	t.Parallel()
	root := mount.Info{Point: "/", Type: "ext4", Options: "rw,nsdelegate"}
	v1 := mount.Info{Point: "/sys/fs/cgroup/memory", Type: "cgroup", Options: "rw,memory"}
	v2 := func(options string) mount.Info {
		return mount.Info{Point: "/sys/fs/cgroup", Type: "cgroup2", Options: options}
	}
	for name, c := range map[string]struct {
		table []mount.Info
		want  []string
	}{
		"systemd":        {[]mount.Info{root, v2("rw,seclabel,nsdelegate,memory_recursiveprot")}, []string{"nsdelegate", "memory_recursiveprot"}},
		"none":           {[]mount.Info{root, v2("rw")}, nil},
		"v1":             {[]mount.Info{root, v1}, nil},
		"similar option": {[]mount.Info{v2("rw,nsdelegate2")}, nil},
	} {
		looked := 0
		got, err := options(func(f func(mount.Info) bool) error {
			for _, m := range append(c.table, mount.Info{Type: "tmpfs"}) {
				looked++
				if !f(m) {
					break
				}
			}
			return nil
		})
		if err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, %v; want %q", name, got, err, c.want)
		}
		if last := c.table[len(c.table)-1]; last.Type == "cgroup2" && looked != len(c.table) {
			t.Errorf("%s: looked at %d mounts of a long table", name, looked)
		}
	}
}
