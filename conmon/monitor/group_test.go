package monitor

import (
	"errors"
	"os"
	"slices"
	"testing"
)

// Only a cgroup that has the container's whole id is the container's.
func TestCgroupsWithTheNameOfTheContainer(t *testing.T) {
	t.Parallel()
	for path, want := range map[string]string{
		"":                                  "",
		"/":                                 "",
		"/pod/c1":                           "/pod/c1",
		"/pod/crius-c1":                     "/pod/crius-c1",
		"/pod/crius-c1/below/c1":            "/pod/crius-c1",
		"/pod.slice/crius-c1.scope":         "/pod.slice/crius-c1.scope",
		"/a.slice/crius-c1.scope/container": "/a.slice/crius-c1.scope",
		"/pod/crius-c10":                    "",
		"/pod/crius-xc1":                    "",
		"/pod/c12/crius-c1":                 "/pod/c12/crius-c1",
		"4:memory:/a\n0::/pod/c1\n":         "4:memory:/a\n0::/pod/c1",
		"c1":                                "",
	} {
		if got := path[:upTo([]byte(path), "c1")]; got != want {
			t.Errorf("%q: %q, want %q", path, got, want)
		}
	}
}

// A container that is in the cgroup of its monitor has none of its own.
func TestNothingIsKilledInTheMonitorsOwnCgroup(t *testing.T) {
	t.Parallel()
	for table, id := range map[string]string{"0::/\n": "c1", "": "c1", "0::/pod/other\n3:memory:/\n": "c1"} {
		var g group
		if g.watch(id, 1, []byte(table), true); g.table != "" {
			t.Errorf("%q is taken for the cgroup of %s", g.table, id)
		}
		if g.begin(); g.emptying || !g.empty(false) || g.left() != "" {
			t.Errorf("%+v", g)
		}
	}
}

// A kernel before 5.14 cannot kill a cgroup v2 as a whole: it is frozen while its processes are
// killed, or they could fork faster than that. Those below may have been frozen before.
func TestFreezeWhereTheCgroupCannotBeKilledAsAWhole(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		h                   hierarchy
		file                string
		was, frozen, thawed string
	}{
		"v2":                       {hierarchy{v2: true}, "/cgroup.freeze", "0", "1", "0"},
		"v2 that kills as a whole": {hierarchy{v2: true, path: "/kills"}, "/cgroup.freeze", "0", "0", "0"},
		"v1 freezer":               {hierarchy{v1Freezer: true}, "/freezer.state", "THAWED", "FROZEN", "THAWED"},
		"v1":                       {hierarchy{}, "/freezer.state", "THAWED", "THAWED", "THAWED"},
	} {
		c.h.root = t.TempDir()
		top := c.h.root + c.h.path
		err := errors.Join(os.MkdirAll(top+"/below", 0o755),
			os.WriteFile(top+c.file, []byte(c.was), 0o644), os.WriteFile(top+"/below"+c.file, []byte(c.frozen), 0o644))
		if c.h.path != "" {
			err = errors.Join(err, os.WriteFile(top+"/cgroup.kill", nil, 0o644))
		}
		if err != nil {
			t.Fatal(err)
		}
		content := func(file, want string) {
			if got, err := os.ReadFile(file); err != nil || string(got) != want {
				t.Errorf("%s: %s: %q, %v, want %q", name, file, got, err, want)
			}
		}
		c.h.freeze()
		content(top+c.file, c.frozen)
		c.h.thaw()
		content(top+c.file, c.thawed)
		content(top+"/below"+c.file, c.thawed)
	}
}

// The processes of a container are in its cgroup and in those below, wherever it has any.
func TestMembersOfACgroupTree(t *testing.T) {
	t.Parallel()
	h := hierarchy{root: t.TempDir(), path: "/c1"}
	deep := h.root + h.path + "/" + "a"
	for range 30 {
		deep += "/b"
	}
	err := errors.Join(os.MkdirAll(deep, 0o755), os.Mkdir(h.root+h.path+"/z", 0o755),
		os.WriteFile(h.root+h.path+"/cgroup.procs", nil, 0o644),
		os.WriteFile(h.root+h.path+"/z/cgroup.procs", []byte("12\n7\n"), 0o644),
		os.WriteFile(deep+"/cgroup.procs", []byte("3456789\n"), 0o644))
	if err != nil {
		t.Fatal(err)
	}
	var pids []int
	h.walk(func(dir int) { pids = appendNumbers(pids, dir, "cgroup.procs") })
	slices.Sort(pids)
	if !slices.Equal(pids, []int{7, 12, 3456789}) {
		t.Errorf("%v", pids)
	}
}
