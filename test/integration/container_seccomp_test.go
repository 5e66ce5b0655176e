package integration

import (
	"testing"
)

// The default profile with all capabilities granted by name still keeps out
// what no container needs.
func TestDefaultSeccompProfileForbids(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "runc")
	c := p.start(t, "sleep")
	for call, want := range map[string]string{
		"keyctl": "EPERM", "reboot": "EPERM", "mount": "EPERM", "sethostname": "EPERM",
		"io-uring": "EPERM", "af-alg": "EPERM", "unshare-uts": "EPERM",
		"chmod": "ENOENT", "mkdir": "ok",
	} {
		got := c.exec(t, "try "+call)
		if got != want+"\n" && (want != "EPERM" || got != "ENOSYS\n") {
			t.Errorf("%s answers %q, want %s", call, got, want)
		}
	}
}
