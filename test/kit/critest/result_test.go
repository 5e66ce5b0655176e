package critest

import (
	"strings"
	"testing"
)

// A ginkgo report, reduced to what is read.
const report = `[{"SpecReports": [
	{"LeafNodeType": "BeforeSuite", "State": "passed"},
	{"ContainerHierarchyTexts": ["[k8s.io] Pod"], "LeafNodeType": "It", "LeafNodeText": "runs", "State": "passed"},
	{"ContainerHierarchyTexts": ["[k8s.io] Pod"], "LeafNodeType": "It", "LeafNodeText": "confines", "State": "skipped", "Failure": {"Message": "no AppArmor"}},
	{"ContainerHierarchyTexts": ["[k8s.io] benchmark"], "LeafNodeType": "It", "LeafNodeText": "races", "State": "skipped"},
	{"ContainerHierarchyTexts": ["[k8s.io] Pod", "net"], "LeafNodeType": "It", "LeafNodeText": "answers", "State": "timedout",
	 "Failure": {"Message": "no\nanswer", "Location": {"FileName": "/x/pod.go", "LineNumber": 7}}},
	{"LeafNodeType": "AfterSuite", "State": "panicked", "Failure": {"Message": "oh"}}
]}]`

func TestReportIsCounted(t *testing.T) {
	r, err := Read([]byte(report))
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	r.Print(&out, "runc")
	const want = `
runc: 1 passed, 2 failed, 2 skipped
  skipped: Pod confines (no AppArmor)
  skipped: benchmark races (not selected)
  FAILED:  AfterSuite
           .:0: oh
  FAILED:  Pod net answers
           pod.go:7: no
           answer
`
	if out.String() != want {
		t.Errorf("printed %s\nwant %s", out.String(), want)
	}
}

// A spec that is known to fail does not fail the run, unless it passes or there is
// none of that name. One that was not run does neither.
func TestKnownFailures(t *testing.T) {
	for name, c := range map[string]struct {
		known  []string
		failed bool
		said   string
	}{
		"all":       {[]string{"Pod net answers", "AfterSuite"}, false, "runc: 1 passed, 0 failed, 2 skipped, 2 known to fail\n"},
		"one":       {[]string{"Pod net answers"}, true, "  failed:  Pod net answers\n           known: reason of Pod net answers\n  FAILED:  AfterSuite\n"},
		"passed":    {[]string{"Pod net answers", "AfterSuite", "Pod runs"}, true, "  FAILED:  Pod runs\n           it has passed, and is said to fail: reason of Pod runs\n"},
		"not run":   {[]string{"Pod net answers", "AfterSuite", "Pod confines"}, false, ", 2 known to fail\n"},
		"a part":    {[]string{"Pod net", "AfterSuite"}, true, "  FAILED:  Pod net answers\n"},
		"not there": {[]string{"Pod net answers", "AfterSuite", "Pod flies"}, true, "  FAILED:  Pod flies\n           there is no such spec, which is said to fail: reason of Pod flies\n"},
	} {
		r, err := Read([]byte(report))
		if err != nil {
			t.Fatal(err)
		}
		reasons := map[string]string{}
		for _, spec := range c.known {
			reasons[spec] = "reason of " + spec
		}
		r.Excuse(reasons)
		var out strings.Builder
		r.Print(&out, "runc")
		if r.Failed() != c.failed || !strings.Contains(out.String(), c.said) {
			t.Errorf("%s: failed %v, want %v and %q, got\n%s", name, r.Failed(), c.failed, c.said, out.String())
		}
	}
}

// A suite that ran nothing has not passed.
func TestEmptyReportIsAnError(t *testing.T) {
	for _, data := range []string{"", "[]", `[{"SpecReports": []}]`, `[{"SpecReports": [{"LeafNodeType": "It", "State": "skipped"}]}]`} {
		if r, err := Read([]byte(data)); err == nil {
			t.Errorf("%q: %+v", data, r)
		}
	}
}
