package oci

import (
	"errors"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/oci/tuning"
)

func TestFitAffinity(t *testing.T) {
	t.Parallel()
	both := specs.CPUAffinity{Initial: "2", Final: "2"}
	for what, c := range map[string]struct {
		affinity           specs.CPUAffinity
		container, runtime tuning.Set
		want               specs.CPUAffinity
	}{
		"as it was":                           {both, tuning.Set{2, 3}, tuning.Set{0, 1, 2, 3}, both},
		"some of several CPUs":                {specs.CPUAffinity{Final: "2-3"}, tuning.Set{3, 4}, nil, specs.CPUAffinity{Final: "2-3"}},
		"the container has other CPUs":        {both, tuning.Set{3, 4}, tuning.Set{0, 1, 2, 3}, specs.CPUAffinity{Initial: "2", Final: "3-4"}},
		"the runtime has other CPUs":          {both, tuning.Set{2, 3}, tuning.Set{0, 1}, specs.CPUAffinity{Final: "2"}},
		"both have":                           {both, tuning.Set{4}, tuning.Set{0, 1}, specs.CPUAffinity{Final: "4"}},
		"nothing is left of a base spec's":    {specs.CPUAffinity{Initial: "2"}, tuning.Set{2}, tuning.Set{0}, specs.CPUAffinity{Final: "2"}},
		"a list that the runtime understands": {specs.CPUAffinity{Final: " 2, 3"}, tuning.Set{4}, nil, specs.CPUAffinity{Final: " 2, 3"}},
	} {
		if got := *fitAffinity(c.affinity, c.container, c.runtime); got != c.want {
			t.Errorf("%s: %+v, want %+v", what, got, c.want)
		}
	}
}

func TestPresentCPUs(t *testing.T) {
	t.Parallel()
	for what, c := range map[string]struct {
		files map[string]string
		want  string
	}{
		"v1":          {map[string]string{"/a/cpuset.cpus": "2-3"}, "2-3"},
		"v2":          {map[string]string{"/a/cpuset.cpus": "", "/a/cpuset.cpus.effective": "2"}, "2"},
		"v2 of crun":  {map[string]string{"/a/cpuset.cpus.effective": "0-1", "/a/container/cpuset.cpus.effective": "2"}, "2"},
		"no such CPU": {nil, ""},
	} {
		got, err := presentCPUs(func(cgroup, name string) (string, error) {
			text, found := c.files[cgroup+"/"+name]
			if !found {
				return "", fault.NotFound
			}
			return text, nil
		}, "/a")
		if got.String() != c.want || (err != nil) != (c.want == "") {
			t.Errorf("%s: %s, %v; want %s", what, got, err, c.want)
		}
	}
	injected := errors.New("injected")
	if _, err := presentCPUs(func(string, string) (string, error) { return "", injected }, "/a"); !errors.Is(err, injected) {
		t.Errorf("%v", err)
	}
}

func TestOwnCPUs(t *testing.T) {
	if len(ownCPUs()) == 0 {
		t.Error("there are none")
	}
}
