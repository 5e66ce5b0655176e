package integration

import (
	"strings"
	"testing"

	"github.com/crius-run/crius/test/kit/node"
)

// The page shows pods, and which of their containers do not run, and why; by
// default there is no page.
func TestStatusPage(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{Config: "[metrics]\nstatus_page = true\n"})
	p := w.run(t, handlers[0])
	c := p.start(t, "exit 3")
	c.wait(t)
	code, page := w.request(t, "", "/status")
	pod := p.config.Metadata.Namespace + "/" + p.config.Metadata.Name
	for _, want := range []string{pod, c.config.Metadata.Name, c.id[:13], "exited: Error, code 3", handlers[0], "<td>RuntimeReady</td><td>yes</td>"} {
		if code != 200 || !strings.Contains(page, want) {
			t.Errorf("code %d, without %q:\n%s", code, want, page)
		}
	}
	if code, page := shared(t).request(t, "", "/status"); code != 404 || strings.Contains(page, "crius") {
		t.Errorf("by default: code %d, %q", code, page)
	}
}
