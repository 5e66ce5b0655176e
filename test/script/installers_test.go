package script

import (
	"os"
	"strings"
	"testing"
)

// node-problem-detector's health checker lists the latest pod by crictl, and repairs by
// systemctl kill --kill-who=main, after which only systemd can start the runtime again.
func TestNodeProblemDetectorChecksAndRepairs(t *testing.T) {
	s := open(t)
	s.files(t)
	s.run(t, "pods --latest") // healthy without pods
	s.run(t, "runp @pod.json")
	s.run(t, "pods --latest")
	s.run(t, "rmp -f -a")
	if err := s.node.Stop(); err != nil {
		t.Fatal(err)
	}
	if _, err := s.try(t, "pods --latest"); err == nil {
		t.Error("a server that was stopped counts as healthy")
	}

	unit, err := os.ReadFile("../../contrib/systemd/crius.service")
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{"Restart=always", "KillMode=process", "StartLimitIntervalSec=0"} {
		if !strings.Contains(string(unit), "\n"+line+"\n") {
			t.Errorf("the unit has no line %s", line)
		}
	}
}
