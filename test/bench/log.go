package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// shapes of output: from short records to several records a line, from programs
// with and without buffering.
var shapes = []shape{
	{name: "80-byte lines", line: 80, each: 64 << 10},
	{name: "80-byte lines, a write each", line: 80, each: 80},
	{name: "1 KiB lines", line: 1 << 10, each: 64 << 10},
	{name: "16 KiB lines", line: 16<<10 + 1, each: 64 << 10},
	{name: "100 KiB lines", line: 100 << 10, each: 64 << 10},
	{name: "200-byte lines, both streams", line: 200, each: 4 << 10, both: true},
}

const (
	logRounds = 3
	// enoughCPU is the CPU time of a monitor in one measurement: much more than
	// the kernel's resolution of 10 ms.
	enoughCPU = 2100 * time.Millisecond
	idle      = 10 // monitors whose memory is measured
)

// logRow measures the cost of a monitor for logging a container's output, and
// beside a silent container. The logs are on a tmpfs.
func logRow(ctx context.Context) (_ []table, err error) {
	l, err := newLab(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, l.close(ctx)) }()
	memory, err := l.idleMemory(ctx)
	if err != nil {
		return nil, err
	}
	speed, err := l.logSpeed(ctx)
	if err != nil {
		return nil, err
	}
	return []table{speed, memory}, nil
}

func (l *lab) logSpeed(ctx context.Context) (table, error) {
	results := make([][2][]float64, len(shapes))
	for round := range logRounds {
		for i, s := range shapes {
			turns := []int{0, 1}
			if round%2 == 1 {
				slices.Reverse(turns)
			}
			for _, who := range turns {
				rate, err := l.logRate(ctx, peers[who], s)
				if err != nil {
					return table{}, fmt.Errorf("%s: %w", s.name, err)
				}
				results[i][who] = append(results[i][who], rate)
			}
		}
	}
	t := table{
		title: fmt.Sprintf("MB of container output logged per CPU second of the monitor (median of %d)", logRounds),
		head:  []string{"", peers[0].name, peers[1].name, "ratio"},
	}
	for i, s := range shapes {
		ours, theirs := median(results[i][0]), median(results[i][1])
		t.add(s.name, fmt.Sprintf("%.0f", ours), fmt.Sprintf("%.0f", theirs), fmt.Sprintf("%.2f", ours/theirs))
	}
	return t, nil
}

// logRate returns MB per CPU second.
func (l *lab) logRate(ctx context.Context, m monitor, s shape) (_ float64, err error) {
	c, err := l.run(ctx, m, s.args()...)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, c.remove(ctx)) }()
	if err := c.awaitLog(ctx, ready, 1); err != nil {
		return 0, err
	}
	before := time.Duration(-1)
	for passes := 0; ; passes++ {
		if err := c.pass(ctx); err != nil {
			return 0, err
		}
		now, err := cpu(c.monitor)
		switch {
		case err != nil:
			return 0, err
		case before < 0: // the first pass is for warming up
			before, passes = now, -1
		case now-before >= enoughCPU:
			return float64(passes+1) * passSize / 1e6 / (now - before).Seconds(), nil
		}
	}
}

// pass lets the container write once, and empties the log, to which both
// monitors append.
func (c *container) pass(ctx context.Context) error {
	if err := c.signal(unix.SIGUSR1); err != nil {
		return err
	}
	if err := c.awaitLog(ctx, done, 2); err != nil {
		return err
	}
	st, err := os.Stat(c.log)
	if err != nil {
		return err
	}
	if st.Size() < passSize {
		return fmt.Errorf("%d bytes are in the log of %d", st.Size(), passSize)
	}
	return os.Truncate(c.log, 0)
}

// awaitLog waits until the end of the log contains a word that many times.
func (c *container) awaitLog(ctx context.Context, word string, times int) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	look := time.NewTicker(2 * time.Millisecond)
	defer look.Stop()
	for {
		end, err := tail(c.log, 512<<10)
		if err != nil {
			return err
		}
		if bytes.Count(end, []byte(" F "+word+"\n")) >= times {
			return nil
		}
		select {
		case <-look.C:
		case <-ctx.Done():
			return fmt.Errorf("wait for %q in the log, which ends with %.200q: %w", word, end[max(0, len(end)-200):], context.Cause(ctx))
		}
	}
}

func tail(file string, n int64) ([]byte, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	return io.ReadAll(io.NewSectionReader(f, max(0, st.Size()-n), n))
}

// cpu returns the CPU time of a process, in user and kernel mode, without its
// children.
func cpu(pid int) (time.Duration, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	var ticks int
	for _, f := range fields[11:13] {
		n, err := strconv.Atoi(f)
		if err != nil {
			return 0, err
		}
		ticks += n
	}
	return time.Duration(ticks) * (time.Second / 100), nil
}

// idleMemory measures monitors of silent containers.
func (l *lab) idleMemory(ctx context.Context) (table, error) {
	t := table{
		title: fmt.Sprintf("KiB of memory (Pss) of an idle monitor (mean of %d)", idle),
		head:  []string{"", peers[0].name, peers[1].name, "ratio"},
	}
	var mean [2]float64
	for who, m := range peers {
		var err error
		if mean[who], err = l.idlePss(ctx, m); err != nil {
			return t, err
		}
	}
	t.add("Pss", fmt.Sprintf("%.0f", mean[0]), fmt.Sprintf("%.0f", mean[1]), fmt.Sprintf("%.2f", mean[0]/mean[1]))
	return t, nil
}

func (l *lab) idlePss(ctx context.Context, m monitor) (kib float64, err error) {
	var all []*container
	defer func() {
		for _, c := range all {
			err = errors.Join(err, c.remove(ctx))
		}
	}()
	for range idle {
		c, err := l.run(ctx, m, shapes[0].args()...)
		if err != nil {
			return 0, err
		}
		all = append(all, c)
		if err := c.awaitLog(ctx, ready, 1); err != nil {
			return 0, err
		}
	}
	select {
	case <-time.After(2 * time.Second): // unneeded memory is given back after a second of silence
	case <-ctx.Done():
		return 0, context.Cause(ctx)
	}
	for _, c := range all {
		n, err := pss(c.monitor)
		if err != nil {
			return 0, err
		}
		kib += n / idle
	}
	return kib, nil
}

// pss returns a process's memory in KiB, with a proportional share of shared
// memory.
func pss(pid int) (float64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(text), "\nPss:")
	words := strings.Fields(rest)
	if len(words) == 0 {
		return 0, fmt.Errorf("process %d tells no Pss", pid)
	}
	return strconv.ParseFloat(words[0], 64)
}
