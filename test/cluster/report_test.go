package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/crius-run/crius/test/kit/image"
)

const report = `<?xml version="1.0" encoding="UTF-8"?>
<testsuites>
 <testsuite name="Kubernetes e2e suite">
  <testcase name="[SynchronizedBeforeSuite]" status="passed"></testcase>
  <testcase name="[It] [sig-node] Pods should run" status="passed"></testcase>
  <testcase name="[It] [sig-node] Pods should not be asked for" status="skipped"><skipped message="skipped"></skipped></testcase>
  <testcase name="[It] [sig-node] Pods need AppArmor" status="skipped"><skipped message="skipped - only for nodes with AppArmor&#xA;more"></skipped></testcase>
  <testcase name="[It] [sig-node] Pods should stop" status="failed">
   <failure message="&#xA;  expected 0, got 1&#xA;more" type="failed">[FAILED] expected 0, got 1</failure>
  </testcase>
  <testcase name="[It] [sig-node] Pods should know perl" status="timedout">
   <failure message="timed out" type="timedout">timed out</failure>
   <system-err>Failed to pull image &#34;registry.k8s.io/perl:5.26&#34;: not found</system-err>
  </testcase>
  <testcase name="[It] [sig-node] Pods should pull agnhost" status="panicked">
   <error message="nil pointer" type="panicked"></error>
   <system-err>Failed to pull image &#34;registry.k8s.io/agnhost:2&#34;: not found</system-err>
  </testcase>
  <testcase name="[AfterSuite]" status="failed"><failure message="no end"></failure></testcase>
 </testsuite>
</testsuites>`

func TestReadReportTellsWhatBecameOfEachSpec(t *testing.T) {
	r, err := readReport(strings.NewReader(report), []string{"registry.k8s.io/perl:5.26"})
	if err != nil {
		t.Fatal(err)
	}
	for what, c := range map[string]struct{ got, want []spec }{
		"passed": {r.passed, []spec{{name: "[sig-node] Pods should run"}}},
		"failed": {r.failed, []spec{
			{"[AfterSuite]", "no end", "no end"},
			{"[sig-node] Pods should pull agnhost", "nil pointer", "nil pointer"},
			{"[sig-node] Pods should stop", "expected 0, got 1", "\n  expected 0, got 1\nmore[FAILED] expected 0, got 1"},
		}},
		"not run": {r.notRun, []spec{
			{"[sig-node] Pods need AppArmor", "only for nodes with AppArmor", ""},
			{"[sig-node] Pods should know perl", "there is no image registry.k8s.io/perl:5.26", "timed outtimed out"},
		}},
	} {
		if !slices.Equal(c.got, c.want) {
			t.Errorf("%s: %q, want %q", what, c.got, c.want)
		}
	}
}

func TestReadReportRefusesWhatIsNoReport(t *testing.T) {
	if r, err := readReport(strings.NewReader("<testsuites><testsuite>"), nil); err == nil {
		t.Errorf("read %+v", r)
	}
}

func TestOnlyUnknownFailuresFailARun(t *testing.T) {
	before := knownFailures
	defer func() { knownFailures = before }()
	knownFailures = []knownFailure{{spec: "should stop", why: "no kill"}, {spec: "should mount", why: "no disk", peer: true},
		{spec: "should sleep", says: "awake", why: "they wake"}}
	for _, c := range []struct {
		runtime string
		r       result
		unknown bool
		lines   []string
	}{
		{withCrius, result{failed: []spec{{"Pods should stop", "x", "x: busy"}, {name: "Pods should mount"}}}, false, []string{
			"crius: 0 passed, 2 failed, 0 not run", "failed:  Pods should stop", "known: no kill", "known: no disk"}},
		{withCrius, result{failed: []spec{{"Pods should mount", "x", "x: busy"}, {"Nodes should sleep", "x", "x: awake"}}}, false, []string{"known: they wake"}},
		{withCrius, result{failed: []spec{{"Nodes should sleep", "x", "x: dead"}}}, true, []string{"FAILED:  Nodes should sleep"}},
		{withContainerd, result{failed: []spec{{"Pods should stop", "x", "x: busy"}}}, true, []string{"FAILED:  Pods should stop"}},
		{withContainerd, result{failed: []spec{{name: "Pods should mount"}}}, false, []string{"known: no disk"}},
		{withCrius, result{passed: []spec{{name: "Pods should stop"}}, notRun: []spec{{"Pods should fly", "no wings", ""}}}, false, []string{
			"crius: 1 passed, 0 failed, 1 not run", "not run: Pods should fly (no wings)", "passed:  Pods should stop, which is known to fail: no kill"}},
	} {
		var out strings.Builder
		if unknown := c.r.print(&out, c.runtime); unknown != c.unknown {
			t.Errorf("%s %+v: unknown failures: %v", c.runtime, c.r, unknown)
		}
		for _, line := range c.lines {
			if !strings.Contains(out.String(), line) {
				t.Errorf("%q is not in\n%s", line, out.String())
			}
		}
	}
}

func TestImageNamesAreTakenApart(t *testing.T) {
	for name, want := range map[string][2]string{
		"registry.k8s.io/e2e-test-images/agnhost:2.66.1": {"registry.k8s.io", "e2e-test-images/agnhost"},
		"registry.k8s.io/pause:3.10.2":                   {"registry.k8s.io", "pause"},
	} {
		if got := [2]string{host(name), repository(name)}; got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
}

func TestLibrariesAreThoseThatLddNames(t *testing.T) {
	const ldd = "\tlinux-vdso.so.1 (0x00007efe3ce43000)\n\tlibz.so.1 => /lib/x86_64-linux-gnu/libz.so.1 (0x00007efe3cd1f000)\n\t/lib64/ld-linux-x86-64.so.2 (0x00007efe3ce45000)\n"
	if got, want := libraries(ldd), []string{"/lib/x86_64-linux-gnu/libz.so.1", "/lib64/ld-linux-x86-64.so.2"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestDistinctFilesAreTheFirstOfTheirNames(t *testing.T) {
	files := distinct([]image.File{image.Text("a", "1"), image.Text("b", "2"), image.Text("a", "3")})
	if len(files) != 2 || string(files[0].Data) != "1" || files[1].Name != "b" {
		t.Errorf("%+v", files)
	}
}

func TestChooseTakesASuiteAndItsChanges(t *testing.T) {
	conformance := selections["conformance"]
	for _, c := range []struct {
		runtime, suite, focus, skip string
		want                        selection
		err                         string
	}{
		{withCrius, "conformance", "", "", conformance, ""},
		{withContainerd, "conformance", "Probing", "", selection{focus: "Probing", skip: conformance.skip}, ""},
		{withCrius, "conformance", "", "Serial", selection{focus: conformance.focus, skip: "Serial"}, ""},
		{withCrius, "everything", "", "", selection{}, `no suite "everything"`},
		{withCrius, "disk", "", "", selection{disk: true}, ""},
		{withContainerd, "disk", "", "", selection{}, `suite "disk"`},
		{withCrius, "disk", "Probing", "", selection{}, `suite "disk"`},
		{"docker", "conformance", "", "", selection{}, `runtime "docker"`},
	} {
		o := options{runtime: c.runtime}
		err := o.choose(c.suite, c.focus, c.skip)
		if c.err == "" && err != nil || c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)) {
			t.Errorf("%+v: %v", c, err)
		}
		if o.selection != c.want {
			t.Errorf("%+v: chose %+v", c, o.selection)
		}
	}
}
