//go:build budgets

package integration

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	spdyframes "github.com/moby/spdystream/spdy"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/node"
)

// A client whose input is not read is stopped, not buffered: the server and the
// monitor keep a fraction of what the clients would send.
func TestBudgetEndlessInput(t *testing.T) {
	w := private(t, node.Options{})
	c := w.run(t, "crun").start(t, "sleep", stdin)
	endsWith(t, c.session(t, w.spdy(), "exit 3"), 3)
	server, monitor := w.load(t).RSSKiB, monitorLoad(t, c).RSSKiB
	const each = 300 << 10 // KiB
	var lines []*kubelet.Line
	for _, address := range []string{
		w.execURL(t, c.execRequest("sleep 4s", withInput)), w.attachURL(t, c.attachRequest(attachInput)),
		w.execURL(t, c.execRequest("sleep 4s", withInput)), w.attachURL(t, c.attachRequest(attachInput)),
	} {
		streams, line := w.streamsOf(t, address, "stdin", "stdout", "stderr")
		lines = append(lines, line)
		go io.Copy(streams["stdin"], noise(each<<10))
	}
	mostOfServer, mostOfMonitor := server, monitor
	look := time.NewTicker(20 * time.Millisecond)
	defer look.Stop()
	for range 100 {
		<-look.C
		mostOfServer, mostOfMonitor = max(mostOfServer, w.load(t).RSSKiB), max(mostOfMonitor, monitorLoad(t, c).RSSKiB)
	}
	for _, line := range lines {
		line.Cut()
	}
	within(t, "the server", server, mostOfServer, len(lines)*each/50)
	within(t, "the monitor", monitor, mostOfMonitor, len(lines)*each/200)
}

// within checks by how much a process has grown, in KiB.
func within(t *testing.T, who string, before, most, budget int) {
	t.Helper()
	t.Logf("%s: resident memory went from %d to at most %d KiB, its budget is %d more", who, before, most, budget)
	if most > before+budget {
		t.Errorf("%s has grown by %d KiB, its budget is %d", who, most-before, budget)
	}
}

// CVE-2026-35469: frames that announce or decompress to more than any client
// needs cost a fraction of their decompressed size.
func TestBudgetOversizeSPDYFrames_CVE_2026_35469(t *testing.T) {
	w := private(t, node.Options{})
	p := w.run(t, "crun")
	c := p.start(t, "sleep")
	endsWith(t, c.session(t, w.spdy(), "exit 3"), 3)
	before, pid := w.load(t).RSSKiB, w.PID()
	const unpacked = 128 << 20
	settings := []byte{0x80, 3, 0, 4, 0, 0, 0, 12, 0x7f, 0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 0}
	largest := []byte{0x80, 3, 0, 1, 0, 0xff, 0xff, 0xff}
	most := before
	for name, send := range map[string]func(line *kubelet.Line) error{
		"settings without end": func(line *kubelet.Line) error { _, err := line.Write(settings); return err },
		"the largest control frame": func(line *kubelet.Line) error {
			line.Write(largest)
			_, err := io.Copy(line.TCPConn, noise(16<<20))
			return err
		},
		"headers that unpack to much": func(line *kubelet.Line) error {
			f, err := spdyframes.NewFramer(line.TCPConn, line.TCPConn)
			if err != nil {
				return err
			}
			return f.WriteFrame(&spdyframes.SynStreamFrame{StreamId: 1, Headers: http.Header{"Streamtype": {strings.Repeat("a", unpacked)}}})
		},
		"many streams": func(line *kubelet.Line) error {
			f, err := spdyframes.NewFramer(line.TCPConn, line.TCPConn)
			for i := 0; i < 20_000 && err == nil; i++ {
				err = f.WriteFrame(&spdyframes.SynStreamFrame{StreamId: spdyframes.StreamId(2*i + 1), Headers: http.Header{"Streamtype": {"error"}, "Port": {"80"}}})
			}
			return err
		},
	} {
		for _, address := range []string{w.execURL(t, c.execRequest("cat", withInput)), p.forwardURL(t)} {
			line, err := w.spdy().Dial(t.Context(), address)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(line.Cut)
			if _, err := line.Upgrade(address, "SPDY/3.1", http.Header{"X-Stream-Protocol-Version": {"v4.channel.k8s.io", "portforward.k8s.io"}}); err != nil {
				t.Fatal(err)
			}
			line.SetDeadline(time.Now().Add(2 * time.Second))
			if err := send(line); err != nil {
				t.Logf("%s: the server took not all: %v", name, err)
			}
			most = max(most, w.load(t).RSSKiB)
		}
	}
	endsWith(t, c.session(t, w.spdy(), "exit 3"), 3)
	most = max(most, w.load(t).RSSKiB)
	equal(t, "process id of the server", w.PID(), pid)
	within(t, "the server", before, most, (unpacked>>10)/2)
}

// A status costs about as much as an empty call, in objects and in time,
// however many pods there are: what it reports is determined in the background.
func TestBudgetStatus(t *testing.T) {
	w := private(t, node.Options{})
	w.modernNetwork(t)
	const calls, objects = 1000, 100
	there := 0
	for _, pods := range []int{0, 100, 250} {
		for ; there < pods; there++ {
			w.run(t, "crun", kubelet.HostNetwork, func(c *cri.PodSandboxConfig) { c.Metadata.Name += fmt.Sprint("-", there) })
		}
		cost := func(call func() error) (each time.Duration, allocated float64) {
			must(t, call())
			const mallocs = "go_memstats_mallocs_total"
			before := w.metric(t, mallocs)
			reading := w.metric(t, mallocs) - before // reading has a cost, too
			began := time.Now()
			for range calls {
				must(t, call())
			}
			each = time.Since(began) / calls
			return each, (w.metric(t, mallocs) - before - 2*reading) / calls
		}
		least := func(call func() error) (each time.Duration, allocated float64) { // without what else was going on
			each, allocated = cost(call)
			for range 4 {
				took, objects := cost(call)
				each, allocated = min(each, took), min(allocated, objects)
			}
			return each, allocated
		}
		empty, _ := least(func() error { _, err := w.Runtime().Version(t.Context(), &cri.VersionRequest{}); return err })
		each, allocated := least(func() error { _, err := w.Runtime().Status(t.Context(), &cri.StatusRequest{}); return err })
		t.Logf("%d pods: a status takes %v and %.1f objects, an empty call %v", pods, each, allocated, empty)
		if allocated > objects {
			t.Errorf("%d pods: a status allocates %.1f objects, its budget is %d", pods, allocated, objects)
		}
		if each > 2*empty {
			t.Errorf("%d pods: a status takes %v, its budget is twice an empty call, which takes %v", pods, each, empty)
		}
	}
}

// The stats of each further container cost the same few objects, whatever else runs.
func TestBudgetStats(t *testing.T) {
	w := private(t, node.Options{})
	p := w.run(t, "crun", kubelet.HostNetwork)
	const calls, few, many, objects = 50, 5, 30, 80
	there := 0
	allocated := func(containers int) float64 {
		for ; there < containers; there++ {
			p.start(t, "sleep")
		}
		cost := func() float64 {
			const mallocs = "go_memstats_mallocs_total"
			before := w.metric(t, mallocs)
			reading := w.metric(t, mallocs) - before // reading has a cost, too
			for range calls {
				got, err := w.Runtime().ListContainerStats(t.Context(), &cri.ListContainerStatsRequest{})
				must(t, err)
				equal(t, "containers with stats", len(got.Stats), containers)
			}
			return (w.metric(t, mallocs) - before - 2*reading) / calls
		}
		least := cost()
		for range 4 { // without what else was going on
			least = min(least, cost())
		}
		return least
	}
	first := allocated(few)
	each := (allocated(many) - first) / (many - few)
	t.Logf("the stats of %d containers take %.1f objects, those of each further one %.1f", few, first, each)
	if each > objects {
		t.Errorf("the stats of a container take %.1f objects, their budget is %d", each, objects)
	}
}
