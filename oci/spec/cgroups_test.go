package spec

import (
	"errors"
	"path"
	"regexp"
	"strings"
	"testing"

	"github.com/crius-run/crius/internal/fault"
)

func TestCgroupsPath(t *testing.T) {
	for _, c := range []struct{ driver, parent, path, dir string }{
		{"cgroupfs", "/kubepods/burstable/pod1", "/kubepods/burstable/pod1/crius-c", "/kubepods/burstable/pod1/crius-c"},
		{"cgroupfs", "kubepods/pod1/", "/kubepods/pod1/crius-c", "/kubepods/pod1/crius-c"},
		{"cgroupfs", "/", "/crius-c", "/crius-c"},
		{"cgroupfs", "/a.slice/b", "/a.slice/b/crius-c", "/a.slice/b/crius-c"},
		{"systemd", "kubepods-burstable-pod1.slice", "kubepods-burstable-pod1.slice:crius:c",
			"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice/crius-c.scope"},
		{"systemd", "/kubepods.slice/kubepods-burstable.slice", "kubepods-burstable.slice:crius:c", "/kubepods.slice/kubepods-burstable.slice/crius-c.scope"},
		{"systemd", "/kubepods.slice", "kubepods.slice:crius:c", "/kubepods.slice/crius-c.scope"},
		{"systemd", "system.slice", "system.slice:crius:c", "/system.slice/crius-c.scope"},
		{"systemd", "-.slice", "-.slice:crius:c", "/crius-c.scope"},
		{"systemd", `kubepods-pod6f7c\x2dx_1.slice`, `kubepods-pod6f7c\x2dx_1.slice:crius:c`, `/kubepods.slice/kubepods-pod6f7c\x2dx_1.slice/crius-c.scope`},
	} {
		path, err := CgroupsPath(c.driver, CgroupPrefix, c.parent, "c")
		if err != nil || path != c.path {
			t.Errorf("%s, %s: %s, %v", c.driver, c.parent, path, err)
		}
		dir, err := CgroupfsPath(c.driver, path)
		if err != nil || dir != c.dir {
			t.Errorf("%s, %s: lies at %s, %v", c.driver, path, dir, err)
		}
	}
}

// cAdvisor knows CRI-O's containers by these names (container/crio/factory.go).
func TestCgroupsPathOfCrio(t *testing.T) {
	for driver, want := range map[string][3]string{
		Cgroupfs: {"/kubepods/pod1", "/kubepods/pod1/crio-c", "/kubepods/pod1/crio-c"},
		Systemd:  {"kubepods.slice", "kubepods.slice:crio:c", "/kubepods.slice/crio-c.scope"},
	} {
		path, err := CgroupsPath(driver, CrioPrefix, want[0], "c")
		if err != nil || path != want[1] {
			t.Errorf("%s: %s, %v", driver, path, err)
		}
		if dir, err := CgroupfsPath(driver, path); err != nil || dir != want[2] {
			t.Errorf("%s: lies at %s, %v", driver, dir, err)
		}
	}
}

// How agents get the id of a container from the path of its cgroup, as their code says.
var agents = map[string]func(cgroup string) (id string){
	// Falco: what stands between a prefix and a suffix of its list, at the end, if it has 64 digits.
	"Falco": func(cgroup string) string {
		for _, form := range [][2]string{{"/", ""}, {"/crio-", ""}, {"/cri-containerd-", ".scope"}, {"/crio-", ".scope"}, {":cri-containerd:", ""}, {"/docker-", ".scope"}} {
			at := strings.LastIndex(cgroup, form[0])
			id, is := strings.CutSuffix(cgroup[max(at, 0):], form[1])
			if id = strings.TrimPrefix(id, form[0]); at >= 0 && is && len(id) == 64 {
				return id
			}
		}
		return ""
	},
	// Datadog's agent: 64 digits anywhere in the last name.
	"Datadog": func(cgroup string) string { return regexp.MustCompile("[0-9a-f]{64}").FindString(path.Base(cgroup)) },
}

func TestAgentsFindContainersByTheirCgroups(t *testing.T) {
	t.Parallel()
	id := strings.Repeat("0123456789abcdef", 4)
	for prefix, finds := range map[string]map[string]bool{
		CgroupPrefix: {"Falco": false, "Datadog": true}, // docs/installers.md says what Falco needs
		CrioPrefix:   {"Falco": true, "Datadog": true},
	} {
		for driver, parent := range map[string]string{Cgroupfs: "/kubepods/burstable/pod1", Systemd: "kubepods-burstable-pod1.slice"} {
			of, err := CgroupsPath(driver, prefix, parent, id)
			if err != nil {
				t.Fatal(err)
			}
			cgroup, err := CgroupfsPath(driver, of)
			if err != nil {
				t.Fatal(err)
			}
			for agent, find := range agents {
				if got := find(cgroup); finds[agent] != (got == id) {
					t.Errorf("%s finds %q in %s", agent, got, cgroup)
				}
			}
		}
	}
}

func TestCgroupsPathRefused_CVE_2025_47291(t *testing.T) {
	for _, c := range []struct{ driver, parent, id, hint string }{
		{"cgroupfs", "kubepods-burstable.slice", "c", "the kubelet seems to use systemd"},
		{"cgroupfs", "/kubepods.slice/kubepods-burstable.slice", "c", "the kubelet seems to use systemd"},
		{"systemd", "/kubepods/burstable/pod1", "c", "the kubelet seems to use cgroupfs"},
		{"systemd", "", "c", "the kubelet seems to use cgroupfs"},
		{"systemd", "/elsewhere/kubepods.slice", "c", "/kubepods.slice"},
		{"systemd", "/kubepods-burstable.slice", "c", "/kubepods.slice/kubepods-burstable.slice"},
		{"systemd", "a--b.slice", "c", "valid"},
		{"systemd", "-a.slice", "c", "valid"},
		{"systemd", "a-.slice", "c", "valid"},
		{"systemd", ".slice", "c", "valid"},
		{"systemd", "a:b.slice", "c", "valid"},
		{"systemd", "a b.slice", "c", "valid"},
		{"systemd", "../a.slice", "c", "not the path of systemd slice"},
		{"systemd", strings.Repeat("a", 300) + ".slice", "c", "valid"},
		{"cgroupfs", "", "c", "path"},
		{"cgroupfs", "/kubepods/../../system", "c", "must not contain"},
		{"cgroupfs", "..", "c", "must not contain"},
		{"cgroupfs", "/a/./b", "c", "must not contain"},
		{"cgroupfs", "/a\x00b", "c", "path"},
		{"cgroupfs", "/a", "", "name a cgroup"},
		{"cgroupfs", "/a", "../b", "name a cgroup"},
		{"systemd", "a.slice", "b:c", "name a cgroup"},
		{"docker", "/a", "c", "cgroup driver"},
		{"", "/a", "c", "cgroup driver"},
	} {
		path, err := CgroupsPath(c.driver, CgroupPrefix, c.parent, c.id)
		if !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), c.hint) {
			t.Errorf("%s, %q: %s, %v", c.driver, c.parent, path, err)
		}
	}
	for _, path := range []string{"", "a.slice", "a.slice:crius", "a.slice::c", "a.slice:crius:", "a:b:c", "x/a.slice:crius:c", "a.slice:crius:../c"} {
		if dir, err := CgroupfsPath("systemd", path); !errors.Is(err, fault.Invalid) {
			t.Errorf("%q: %s, %v", path, dir, err)
		}
	}
}

func FuzzCgroupsPath(f *testing.F) {
	f.Add(true, "kubepods-burstable-pod1.slice")
	f.Add(false, "/kubepods/pod1")
	f.Add(false, "/a/../..")
	f.Fuzz(func(t *testing.T, systemd bool, parent string) {
		driver := Cgroupfs
		if systemd {
			driver = Systemd
		}
		path, err := CgroupsPath(driver, CgroupPrefix, parent, "c")
		if err != nil {
			if !errors.Is(err, fault.Invalid) {
				t.Fatal(err)
			}
			return
		}
		dir, err := CgroupfsPath(driver, path)
		if err != nil {
			t.Fatalf("%q gives %q: %v", parent, path, err)
		}
		if !strings.HasPrefix(dir, "/") || strings.Contains(dir+"/", "/../") || !strings.Contains(dir, "crius-c") {
			t.Fatalf("%q lies at %q", parent, dir)
		}
	})
}
