// Bench measures crius and its peers in one run and with the same work for all:
//
//	go run ./test/bench [-out FILE.md] [-raw FILE.md] [-json FILE] [-containerd current|debian] [ROW...]
//	go run ./test/bench load -endpoint unix:///run/containerd/containerd.sock -image IMAGE -n 100 -parallel 8
//
// A row is one measurement; without an argument all rows are measured, except
// "big", which needs a disk with much room, "checkpoint", which needs criu, and
// "scale", which takes a quarter of an hour. It needs root and the peers' Debian packages, which `make bench`
// installs. It prints medians of rounds in which crius and its peers take turns,
// so that a temporarily busy machine affects all. A row fails unless what it
// measures has worked, and has left nothing behind.
//
// Load runs pods on one CRI server of any kind.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/crius-run/crius/test/kit/containerd"
	"github.com/crius-run/crius/test/kit/tools"
)

// A row is one measurement.
type row struct {
	name, about string
	measure     func(ctx context.Context) ([]table, error)
}

// rows are in the order for a reader.
var rows = []row{
	{"pods", "What a pod with one container costs from its start to its end, alone and 8 at once.", podsRow},
	{"plugins", "What NRI plugins add to a pod's life: none, one and ten that change nothing.", pluginsRow},
	{"exec", "What an exec probe costs.", execRow},
	{"sessions", "What people do with a running container by kubectl.", sessionsRow},
	{"node", "A node is filled with 100 pods and weighed, then filled and emptied some times.", nodeRow},
	{"flat", "Whether the 500th pod costs more than the first.", flatRow},
	{"lists", "What a kubelet asks all the time, of 100 and of 2000 containers.", listsRow},
	{"stats", "Stats of 100 pods, by crius alone.", statsRow},
	{"pull", "Images large, small and of many layers, from a registry to a tmpfs, and what is fetched again.", pullRow},
	{"disk", "Pods and pulls on the machine's disk, with all that a power cut must not lose.", diskRow},
	{"restart", "How long a server that is killed beside 1000 containers is away, and the memory before and after.", restartRow},
	{"allocs", "What servers allocate for a call.", allocsRow},
	{"log", "What container output costs the monitor; conmon is that of CRI-O and podman.", logRow},
	{"steps", "Where crius's time goes.", stepsRow},
}

// apart are rows that are measured only if named.
var apart = []row{
	{"big", "An image of 10 GB, on the disk: time, memory and room, what is fetched again, and what reading a little of one takes.", bigRow},
	{"checkpoint", "Containers and pods are checkpointed, and pods restored beside new ones; crius alone, with criu and Python.", checkpointRow},
	{"scale", "500 pods with 2000 containers, and a kubelet's calls at fixed rates for a minute.", scaleRow},
}

func main() {
	if len(os.Args) > 1 && os.Args[1] == floodRole {
		flood(os.Args[2:])
		return
	}
	if len(os.Args) == 3 && os.Args[1] == floorRole {
		if err := serveFloor(os.Args[2]); err != nil {
			fmt.Fprintln(os.Stderr, "floor:", err)
			os.Exit(1)
		}
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	run := measure
	args := os.Args[1:]
	if len(args) > 0 && args[0] == loadRole {
		run, args = load, args[1:]
	}
	if err := run(ctx, args); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func measure(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	page := flags.String("out", "", "write a short page in Markdown, with plots in a directory of the same name")
	raw := flags.String("raw", "", "write all tables in Markdown, and what they were measured on")
	file := flags.String("json", "", "write the same as JSON")
	kind := flags.String("containerd", "current", "the peer: current, which is built once, or debian")
	if err := flags.Parse(args); err != nil {
		return err
	}
	wanted, err := pick(flags.Args())
	if err != nil {
		return err
	}
	if *page != "" {
		if err := canShow(wanted); err != nil {
			return err
		}
	}
	var known bool
	if peer, known = containerd.Kinds[*kind]; !known {
		return fmt.Errorf("-containerd is current or debian, not %q", *kind)
	}
	r, err := newReport(ctx, command(flags.Args(), *kind, *page, *raw))
	if err != nil {
		return err
	}
	dir, err := tools.Programs(ctx, false) // while the prerequisites of a build are available
	if err == nil {
		err = r.addVersion(ctx, crius, filepath.Join(dir, "crius"), "--version")
	}
	if err != nil {
		return err
	}
	program, err := peer.Program(ctx)
	if err == nil {
		err = r.addVersion(ctx, "containerd", program, "--version")
	}
	if err == nil {
		program, err = containerd.Kinds["debian"].Program(ctx)
	}
	if err == nil {
		err = r.addVersion(ctx, "containerd"+ofDebian, program, "--version")
	}
	if err != nil {
		return err
	}
	dropEnviron()
	var failed []error
	for _, w := range wanted {
		began := time.Now()
		tables, err := w.measure(ctx)
		if err != nil {
			fmt.Fprintf(os.Stderr, "bench: %s: %v\n", w.name, err)
			failed = append(failed, fmt.Errorf("%s failed", w.name))
			if ctx.Err() != nil {
				break
			}
			continue
		}
		done := &result{Name: w.name, About: w.about}
		for _, t := range tables {
			t.print(os.Stdout)
			t.plot(os.Stdout)
			done.Tables = append(done.Tables, &t)
		}
		fmt.Printf("\n(row %s: %.0f s)\n", w.name, time.Since(began).Seconds())
		r.Rows = append(r.Rows, done)
	}
	if err := r.addLoad("load after"); err != nil {
		return err
	}
	// A reader would not notice a row that is missing on the page.
	if err := errors.Join(failed...); err != nil {
		return err
	}
	return r.write(*page, *raw, *file)
}

// write writes the requested files. The page comes last: if a table is missing
// for it, the other files must still be written.
func (r *report) write(page, raw, file string) error {
	var err error
	if raw != "" {
		var text bytes.Buffer
		r.markdown(&text)
		err = os.WriteFile(raw, text.Bytes(), 0o644)
	}
	if file != "" {
		err = errors.Join(err, writeJSON(file, r))
	}
	if page != "" {
		err = errors.Join(err, r.page(page, raw))
	}
	return err
}

// dropEnviron reduces the environment to a service's: monitors and shims
// inherit it, and their memory is measured.
func dropEnviron() {
	for _, variable := range os.Environ() {
		name, _, _ := strings.Cut(variable, "=")
		if !strings.HasPrefix(name, "GO") && !slices.Contains([]string{"PATH", "HOME", "LANG", "CRIUS_BIN", tools.PrebuiltVariable, "PODS", "CONTAINERS", "SIZE"}, name) {
			_ = os.Unsetenv(name)
		}
	}
}

// command returns the command that makes the same files again.
func command(names []string, containerd, page, raw string) string {
	words := []string{"make bench"}
	if containerd != "current" {
		words = append(words, "CONTAINERD="+containerd)
	}
	if len(names) > 0 {
		words = append(words, "ROW='"+strings.Join(names, " ")+"'")
	}
	for _, variable := range []string{"PODS", "CONTAINERS", "SIZE"} {
		if v := os.Getenv(variable); v != "" {
			words = append(words, variable+"="+v)
		}
	}
	if page != "" {
		words = append(words, "OUT="+page)
	}
	if raw != "" {
		words = append(words, "RAW="+raw)
	}
	return strings.Join(words, " ")
}

// pick finds rows by name.
func pick(names []string) ([]row, error) {
	if len(names) == 0 {
		return rows, nil
	}
	var wanted []row
	known := slices.Concat(rows, apart)
	for _, name := range names {
		i := slices.IndexFunc(known, func(r row) bool { return r.name == name })
		if i < 0 {
			var all []string
			for _, r := range known {
				all = append(all, r.name)
			}
			return nil, fmt.Errorf("there is no row %s; there are %s", name, strings.Join(all, ", "))
		}
		wanted = append(wanted, known[i])
	}
	return wanted, nil
}
