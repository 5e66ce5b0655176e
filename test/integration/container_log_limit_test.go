package integration

import (
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
)

// A container that exceeds its log's limit runs on unaffected, its log and the
// metrics say how much is missing, and the log of its neighbour is complete.
func TestLogOfContainerIsLimited(t *testing.T) {
	t.Parallel()
	for limit, config := range map[string]string{
		"runtime.container_log_rate = 10":        "container_log_rate = 10\ncontainer_log_burst = 65536\n",
		"runtime.container_log_max_size = 65536": "container_log_max_size = 65536\n",
	} {
		w := private(t, node.Options{Config: "[runtime]\n" + config})
		for _, handler := range handlers {
			p := w.run(t, handler)
			before := w.metric(t, "crius_container_log_discarded_bytes_total")
			loud, quiet := p.start(t, "bytes 1000000 100 ; exit 3"), p.start(t, "lines 100")
			loud.wait(t)
			quiet.wait(t)
			equal(t, "exit code", loud.status(t).ExitCode, 3)
			told := 0.0
			notice := regexp.MustCompile(`(?m)^\[crius: (\d+) bytes of this log were discarded for ` + regexp.QuoteMeta(limit) + `\]$`)
			for _, found := range notice.FindAllStringSubmatch(kubelet.Text(loud.log(t), "stderr"), -1) {
				n, err := strconv.ParseFloat(found[1], 64)
				must(t, err)
				told += n
			}
			if told < 1_000_000 || told > 1_500_000 {
				t.Errorf("%s, %s: the log says that %v bytes are missing", limit, handler, told)
			}
			wait.For(t, fmt.Sprintf("the metrics to count %v discarded bytes", told), func() bool {
				return w.metric(t, "crius_container_log_discarded_bytes_total")-before == told // a monitor may count late
			})
			st, err := os.Stat(loud.logFile())
			must(t, err)
			if st.Size() > 100_000 {
				t.Errorf("%s, %s: the log has %d bytes", limit, handler, st.Size())
			}
			equal(t, "lines of the other container", strings.Count(quiet.output(t), "\n"), 100)
		}
	}
}
