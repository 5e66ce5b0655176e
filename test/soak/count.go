package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/crius-run/crius/test/kit/inventory"
)

const mib = 1 << 20

// noises are the growths that do not count, by the counter's name, in full or
// without its object. Exact counters have none. Go's runtime keeps a thread
// once it was needed, which may happen late in the life of each of the four
// permanent monitors.
var noises = map[string]float64{
	"heap goal, MiB": 2, "RSS, MiB": 6, "threads": 2, "goroutines": 3, "descriptors": 3, "monitors' threads": 4,
}

// measure adds a sample of everything, once the node is at rest.
func (h *soakNode) measure(ctx context.Context, at time.Duration) error {
	stock, err := h.Stock(ctx)
	if err != nil {
		return err
	}
	counts, err := h.count(ctx, stock)
	if err != nil {
		return err
	}
	for name, value := range counts {
		t := h.trends[name]
		if t == nil {
			_, kind, _ := strings.Cut(name, " ")
			t = &trend{name: name, noise: max(0.5, cmp.Or(noises[name], noises[kind]))}
			h.trends[name] = t
		}
		t.add(at, value)
	}
	return nil
}

// kinds are those of an inventory. All are counted even if there is none yet.
var kinds = []string{"process", "cgroup", "mount", "storage", "lease", "link", "rule", "abstract socket"}

func (h *soakNode) count(ctx context.Context, stock *inventory.Snapshot) (map[string]float64, error) {
	out := map[string]float64{}
	for _, kind := range kinds {
		out["node "+kind] = 0
	}
	for _, line := range stock.Lines() {
		kind, what, _ := strings.Cut(line, ": ")
		switch {
		case kind != "file":
			out["node "+kind]++
		case strings.HasPrefix(what, h.StateRoot()):
			out["node files below root"]++
		case strings.HasPrefix(what, h.RunRoot()):
			out["node files below run_root"]++
		default:
			out["node pinned namespaces"]++
		}
	}
	layers, err := filepath.Glob(h.Path("img", "overlay", "*"))
	if err != nil {
		return nil, err
	}
	temporary, err := os.ReadDir(h.Path("tmp"))
	if err != nil {
		return nil, err
	}
	out["node layers of images"], out["node temporary files"] = float64(len(layers)), float64(len(temporary))
	return out, errors.Join(h.countServer(ctx, out), h.countMonitors(out))
}

func (h *soakNode) countServer(ctx context.Context, out map[string]float64) error {
	load, err := inventory.Server(h.PID())
	if err != nil {
		return err
	}
	own, err := h.metrics(ctx)
	if err != nil {
		return err
	}
	out["server descriptors"] = float64(load.Total())
	out["server threads"] = float64(load.Threads)
	out["server RSS, MiB"] = float64(load.RSSKiB) / 1024
	// The goal follows from the live memory at the last collection, and varies
	// less than the allocated memory.
	out["server heap goal, MiB"] = own["go_memstats_next_gc_bytes"] / mib
	out["server goroutines"] = own["go_goroutines"]
	out["server pending cleanups"] = own["crius_pending_cleanups"]
	return nil
}

// countMonitors adds up what the monitors of the permanent pods hold.
func (h *soakNode) countMonitors(out map[string]float64) error {
	for _, pid := range inventory.Processes(inventory.Scope{Dir: h.Path()}) {
		name, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "comm"))
		if err != nil || strings.TrimSpace(string(name)) != "crius-conmon" {
			continue // it has ended, or is another process
		}
		load, err := inventory.Server(pid)
		if err != nil {
			return err
		}
		out["monitors' descriptors"] += float64(load.Total())
		out["monitors' threads"] += float64(load.Threads)
		out["monitors' RSS, MiB"] += float64(load.RSSKiB) / 1024
	}
	return nil
}

// metrics returns the server's metrics without labels.
func (h *soakNode) metrics(ctx context.Context) (map[string]float64, error) {
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(h.RunRoot(), "metrics.sock"))
	}}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://crius/metrics", nil)
	if err != nil {
		return nil, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, err
	}
	out := map[string]float64{}
	for line := range bytes.Lines(body) {
		f := strings.Fields(string(line))
		if len(f) != 2 || strings.ContainsAny(f[0], "#{") {
			continue
		}
		if out[f[0]], err = strconv.ParseFloat(f[1], 64); err != nil {
			return nil, fmt.Errorf("metric %s: %w", f[0], err)
		}
	}
	return out, nil
}

// report prints a row for each counter and fails for those that grow.
func (h *soakNode) report(out io.Writer) error {
	var rows []*trend
	for _, t := range h.trends {
		rows = append(rows, t)
	}
	slices.SortFunc(rows, func(a, b *trend) int { return strings.Compare(a.name, b.name) })
	fmt.Fprintf(out, "\n%s node: %v\n%-34s %10s %10s %13s\n", h.name, &h.tally, "counter", "first", "last", "slope")
	var errs []error
	for _, t := range rows {
		fmt.Fprintln(out, t)
		if t.grows() {
			errs = append(errs, fmt.Errorf("%s: %s grows", h.name, t.name))
		}
	}
	return errors.Join(errs...)
}
