package main

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"
)

// effort is the processor time of a program's threads, in milliseconds.
type effort struct {
	ran    float64
	waited float64 // ready to run, while others ran
}

// threads are the efforts of the threads of a process since their start, by
// their files in /proc (Documentation/scheduler/sched-stats.rst,
// /proc/PID/schedstat).
type threads map[string]effort

func effortOf(pid int) (threads, error) {
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	if err != nil {
		return nil, err
	}
	all := threads{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) { // a thread that has ended
			continue
		}
		var ran, waited, times float64 // ns, ns, how often
		if err == nil {
			_, err = fmt.Sscan(string(text), &ran, &waited, &times)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		all[file] = effort{ran: ran / 1e6, waited: waited / 1e6}
	}
	return all, nil
}

// since returns the effort of the threads since before. It leaves out a thread
// that has ended meanwhile.
func (t threads) since(before threads) (sum effort) {
	for file, now := range t {
		sum.ran += now.ran - before[file].ran
		sum.waited += now.waited - before[file].waited
	}
	return sum
}

// sample is a call: how many milliseconds its answer took, and the effort of
// server and client meanwhile, for this call or others.
type sample struct {
	took           float64
	server, client effort
}

// slowest is how many of the calls make up their tail: more than p99, so that a
// single odd call does not dominate.
const slowest = listCalls / 20

// meanOfSlowest returns the mean of the slowest samples.
func meanOfSlowest(samples []sample) (mean sample) {
	sorted := slices.SortedFunc(slices.Values(samples), func(a, b sample) int { return cmp.Compare(b.took, a.took) })
	sorted = sorted[:min(len(sorted), slowest)]
	n := float64(len(sorted))
	for _, s := range sorted {
		mean.took += s.took / n
		for _, of := range []struct {
			sum *effort
			one effort
		}{{&mean.server, s.server}, {&mean.client, s.client}} {
			of.sum.ran += of.one.ran / n
			of.sum.waited += of.one.waited / n
		}
	}
	return mean
}

// efforts returns those of a server and of this program, its client.
func efforts(server int) (of, ours threads, err error) {
	of, err = effortOf(server)
	if err != nil {
		return of, ours, err
	}
	ours, err = effortOf(os.Getpid())
	return of, ours, err
}

// sampled times a call to a server.
func sampled(server int, call func() error) (one sample, err error) {
	before, ours, err := efforts(server)
	if err != nil {
		return one, err
	}
	began := time.Now()
	if err := call(); err != nil {
		return one, err
	}
	one.took = time.Since(began).Seconds() * 1e3
	after, oursNow, err := efforts(server)
	one.server, one.client = after.since(before), oursNow.since(ours)
	return one, err
}

// tails returns a table of where the time of the slowest calls to crius was
// spent.
func tails(what string, all []asked) table {
	t := table{
		title: fmt.Sprintf("%s, the slowest %d calls to crius, and the threads of both programs meanwhile: ms", what, slowest),
		head:  []string{"", "took", "server ran", "server waited", "client ran", "client waited"},
	}
	for _, a := range all {
		mean := meanOfSlowest(a.samples)
		t.add(a.call, number(mean.took), number(mean.server.ran), number(mean.server.waited), number(mean.client.ran), number(mean.client.waited))
	}
	return t
}
