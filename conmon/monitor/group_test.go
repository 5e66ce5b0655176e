package monitor

import "testing"

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
