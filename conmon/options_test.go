package conmon

import "testing"

// Monitors of earlier versions end at options that they do not know.
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
