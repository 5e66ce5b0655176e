package integration

import (
	"fmt"
	"strings"
	"testing"

	"github.com/crius-run/crius/test/kit/journald"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
)

// A container's output is in its log and in the journal, under the container's
// names, and the metrics count what a stuck journald has missed.
func TestOutputOfContainersGoesToTheJournal(t *testing.T) {
	t.Parallel()
	d := journald.New(t)
	w := private(t, node.Options{Config: fmt.Sprintf("runtime.container_log_journal = %q\n", d.Path)})
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		c := p.start(t, "echo to the journal ; echo -err an error")
		var entries []journald.Entry
		wait.For(t, "two entries", func() bool { entries = append(entries, d.Read()...); return len(entries) >= 2 })
		pod, name := p.config.Metadata, c.config.Metadata.Name
		full := fmt.Sprintf("k8s_%s_%s_%s_%s_0", name, pod.Name, pod.Namespace, pod.Uid)
		want := journald.Entry{
			"MESSAGE": "to the journal", "PRIORITY": "6",
			"CONTAINER_ID": c.id[:12], "CONTAINER_ID_FULL": c.id, "CONTAINER_NAME": full, "SYSLOG_IDENTIFIER": full,
			"K8S_NAMESPACE_NAME": pod.Namespace, "K8S_POD_NAME": pod.Name, "K8S_POD_UID": pod.Uid, "K8S_CONTAINER_NAME": name,
		}
		equal(t, "first entry", fmt.Sprint(entries[0]), fmt.Sprint(want))
		want["MESSAGE"], want["PRIORITY"] = "an error", "3"
		equal(t, "second entry", fmt.Sprint(entries[1]), fmt.Sprint(want))
		c.wait(t)
		equal(t, "log", c.output(t), "to the journal\n")
	})
	equal(t, "lost bytes", w.metric(t, "crius_container_journal_lost_bytes_total"), 0)

	c := w.run(t, "crun").start(t, "bytes 2000000 100 ; sleep")
	wait.For(t, "the log", func() bool { return strings.Count(c.output(t), "\n") >= 20_000 })
	wait.For(t, "the metric", func() bool { return w.metric(t, "crius_container_journal_lost_bytes_total") > 1_000_000 })
}
