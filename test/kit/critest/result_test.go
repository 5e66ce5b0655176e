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

// A suite that ran nothing has not passed.
func TestEmptyReportIsAnError(t *testing.T) {
	for _, data := range []string{"", "[]", `[{"SpecReports": []}]`, `[{"SpecReports": [{"LeafNodeType": "It", "State": "skipped"}]}]`} {
		if r, err := Read([]byte(data)); err == nil {
			t.Errorf("%q: %+v", data, r)
		}
	}
}
