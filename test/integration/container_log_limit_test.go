package integration

import (
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/node"
)

// A container that writes more than its log may grow by runs as it would, its log and the
// metrics say how much is missing, and the log of its neighbour is complete.
func TestLogOfContainerIsLimited(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{Config: "[runtime]\ncontainer_log_rate = 1000\ncontainer_log_burst = 65536\n"})
	for _, handler := range handlers {
		p := w.run(t, handler)
		before := w.metric(t, "crius_container_log_discarded_bytes_total")
		loud, quiet := p.start(t, "bytes 1000000 100 ; exit 3"), p.start(t, "lines 100")
		loud.wait(t)
		quiet.wait(t)
		equal(t, "exit code", loud.status(t).ExitCode, 3)
		told := 0.0
		for _, found := range regexp.MustCompile(`(?m)^\[crius: (\d+) bytes of this log were discarded, `).FindAllStringSubmatch(kubelet.Text(loud.log(t), "stderr"), -1) {
			n, err := strconv.ParseFloat(found[1], 64)
			must(t, err)
			told += n
		}
		if told < 1_000_000 || told > 1_500_000 {
			t.Errorf("%s: the log says that %v bytes are missing", handler, told)
		}
		equal(t, "discarded bytes in the metrics", w.metric(t, "crius_container_log_discarded_bytes_total")-before, told)
		equal(t, "lines of the other container", strings.Count(quiet.output(t), "\n"), 100)
	}
}
