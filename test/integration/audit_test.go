package integration

import (
	"os"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/wait"
)

// Who has run what in a container is in the server's log, or in the journal: once for each
// command, with its end, and in words that an auditor knows, namespace and names.
func TestExecIsRecorded_containerd_10418(t *testing.T) {
	t.Parallel()
	w := shared(t)
	c := w.run(t, handlers[1]).start(t, "sleep")
	s := c.session(t, w.spdy(), "echo out ; exit 3")
	endsWith(t, s, 3)
	if _, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: c.id, Cmd: []string{"/probe", "exit", "4"}}); err != nil {
		t.Fatal(err)
	}
	var records []string
	wait.For(t, "the records", func() bool {
		text, err := os.ReadFile(w.LogFile())
		if err != nil {
			t.Fatal(err)
		}
		records = nil
		for line := range strings.Lines(string(text)) {
			if strings.Contains(line, " msg=audit ") && strings.Contains(line, c.id) {
				records = append(records, line)
			}
		}
		return len(records) >= 2
	})
	for i, parts := range [][]string{
		{" verb=exec ", " pod=" + c.pod.id, " exit_code=3", " remote=", " bytes_out=4 ", " client=", " client_uid=0 "},
		{" verb=exec-sync ", ` command="/probe exit 4"`, " exit_code=4"},
	} {
		for _, part := range parts {
			if !strings.Contains(records[i], part) {
				t.Errorf("record %d lacks %q: %s", i, part, records[i])
			}
		}
	}
	if len(records) != 2 {
		t.Errorf("%d records: %q", len(records), records)
	}
}
