package conmon

import (
	"fmt"
	"strings"
	"testing"
)

// Monitors of earlier versions exit at options that they do not know.
func TestOptionsWithoutALogLimit(t *testing.T) {
	t.Parallel()
	opt, err := Spec{ID: "id", Monitor: "/m", Dir: "/d", PidFile: "/p", ExitFile: "/e", Runtime: []string{"true"}, LogBurst: 16 << 20}.options()
	if err != nil {
		t.Fatal(err)
	}
	if opt.LogRate != 0 || opt.LogBurst != 0 || opt.LogMost != 0 {
		t.Errorf("a log without a limit has %+v", opt)
	}
}

func TestOptionsOfJournal(t *testing.T) {
	t.Parallel()
	s := Spec{ID: "id", Monitor: "/m", Dir: "/d", PidFile: "/p", ExitFile: "/e", LogFile: "/l", Runtime: []string{"true"},
		JournalFields: []string{"CONTAINER_NAME=a\nFORGED=1", "K8S_POD_NAME=p"}}
	for _, c := range []struct{ journal, log, want string }{
		{"", "/l", " []"},
		{"/j", "", " []"},
		{"/j", "/l", "/j [CONTAINER_NAME=a?FORGED=1 K8S_POD_NAME=p]"},
	} {
		s.Journal, s.LogFile = c.journal, c.log
		opt, err := s.options()
		if err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprint(opt.Journal, " ", opt.JournalFields); got != c.want {
			t.Errorf("journal %q, log %q: %s, want %s", c.journal, c.log, got, c.want)
		}
		if args := strings.Join(opt.Args(), " "); c.want == " []" && strings.Contains(args, "journal") {
			t.Errorf("journal %q, log %q: %s", c.journal, c.log, args)
		}
	}
}
