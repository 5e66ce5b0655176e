// Node runs critest, the conformance suite of CRI, against crius on a systemd
// machine with cgroup v2, whatever this machine is like:
//
//	go run ./test/node [-machine uml|qemu|arm64|selinux] [-driver systemd|cgroupfs] [-handler runc|crun|runc-current] [-focus REGEXP]
//
// The machine consists of Debian's packages and needs no virtualisation: with
// uml its kernel is user-mode Linux, which runs as an ordinary process; selinux
// is the same with SELinux enforcing, in place of AppArmor; with qemu it is
// Debian's usual kernel on an emulated processor, slow, but with cpuset and
// hugetlb; arm64 is that with the other processor, and shows the demo, too. In
// it crius is installed from its own package and runs as its service, with
// Debian's runc and crun or, on request and if the processor is this machine's,
// a current runc (runc-current).
//
// Each combination of cgroup driver and runtime handler gets its own machine,
// and prints one plain line, the specs that were skipped and those that failed,
// and what was left behind:
//
//	systemd/runc: 102 passed, 0 failed, 20 skipped
//
// With -previous DIR (make node-upgrade) critest is not run. The machine gets
// the DEB in DIR, pods and sessions, and then the current DEB: what the package
// promises about upgrades is checked one by one.
//
// With -bench ROWS (make node-bench) these rows of test/bench are measured
// instead, on cgroup v2.
//
// With -checkpoint REGEXP (make node-checkpoint) the service makes checkpoints
// and restores them instead, with a current criu, and then the tests of
// test/integration run whose names match, with the programs of the package and
// the handler as their runc.
//
// With -install as well (make node-install) the machine is set up as by an
// operator who follows docs/install.md, with a real kubelet. Faults that
// operators meet are injected and fixed, the configuration of CRI-O is
// imported, the package is downgraded to the DEB in DIR, upgraded again, and
// removed. Each step is printed with its result.
//
// With -cuts N (make powercut) the power of machines is cut N times instead
// while crius pulls, creates and removes, and after each boot everything that
// it reports is compared with what it should have. See
// docs/decisions/0009-power-cuts.md.
//
// The exit code is 1 if any failed. All output and logs of a run are kept in
// .cache/node/DRIVER-HANDLER, or qemu-DRIVER-HANDLER.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/crius-run/crius/test/kit/containerd"
	"github.com/crius-run/crius/test/kit/critest"
	"github.com/crius-run/crius/test/kit/tools"
)

// options are the settings of one run; the guest reads them as JSON.
type options struct {
	Driver, Handler, Focus string
	Mode                   string `json:",omitempty"` // upgrade, install, bench or checkpoint, instead of critest
	Rows                   string `json:",omitempty"` // of test/bench
	Tests                  string `json:",omitempty"` // of test/integration, a regular expression: for checkpoint
}

func main() {
	kinds := strings.Join(slices.Sorted(maps.Keys(machines)), ", ")
	kind := flag.String("machine", "uml", "kind of the machine, of "+kinds)
	driver := flag.String("driver", "systemd,cgroupfs", "cgroup drivers")
	handler := flag.String("handler", "runc,crun", "runtime handlers, of runc, crun and runc-current")
	focus := flag.String("focus", "", "run only specs whose names match this regular expression")
	suite := flag.String("suite", "trixie", "Debian's release in the machine")
	parallel := flag.Int("parallel", 0, "machines that run at the same time; 0: as many as two processors can bear")
	packages := flag.String("packages", "bin/packages", "directory with crius's DEB")
	previous := flag.String("previous", "", "directory with the DEB to upgrade from, instead of running critest")
	install := flag.Bool("install", false, "install the package as an operator does, with the one in -previous to go back to, instead of running critest")
	rows := flag.String("bench", "", "measure these rows of test/bench instead of running critest")
	tests := flag.String("checkpoint", "", "make and restore checkpoints, and run the tests of test/integration that match this regular expression, instead of running critest")
	cuts := flag.Int("cuts", 0, "cut the power of machines so many times instead, and look what becomes of crius")
	work := flag.Duration("work", 5*time.Second, "the longest time that a machine works before its power is cut")
	seed := flag.Uint64("seed", uint64(time.Now().UnixNano()), "of the moments of the cuts")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var mode string
	switch {
	case *rows != "":
		mode = "bench"
	case *tests != "":
		mode = "checkpoint"
	case *install:
		mode = "install"
	case *previous != "":
		mode = "upgrade"
	}
	var runs []options
	for d := range strings.SplitSeq(*driver, ",") {
		for h := range strings.SplitSeq(*handler, ",") {
			runs = append(runs, options{d, h, *focus, mode, *rows, *tests})
		}
	}
	if *cuts > 0 {
		c := cutting{count: *cuts, seed: *seed, work: *work, machines: cmp.Or(*parallel, min(2, runtime.NumCPU()))}
		if err := c.run(ctx); err != nil {
			fmt.Fprintln(os.Stderr, "\nnode:", err)
			os.Exit(1)
		}
		return
	}
	b := bench{kind: *kind, machine: machines[*kind], suite: *suite, packages: *packages, previous: *previous, mode: mode, atOnce: *parallel}
	if b.machine == nil {
		fmt.Fprintf(os.Stderr, "node: -machine %q: want one of %s\n", *kind, kinds)
		os.Exit(2)
	}
	if b.atOnce < 1 {
		b.atOnce = max(1, min(2, runtime.NumCPU())/b.machine.processors())
	}
	if err := b.run(ctx, runs); err != nil {
		fmt.Fprintln(os.Stderr, "\nnode:", err)
		os.Exit(1)
	}
}

// bench is what all runs share.
type bench struct {
	kind     string // of the machine, as in machines
	machine  machine
	suite    string // Debian's release
	packages string // directory of the DEB
	previous string // directory of the DEB to upgrade from, if any
	mode     string // of the runs
	atOnce   int    // machines that may run at the same time

	cache string            // directory of everything that is kept
	base  string            // image of the root file system
	files map[string]string // files of every guest: name to path here
}

func (b *bench) run(ctx context.Context, runs []options) error {
	if err := b.prepare(ctx); err != nil {
		return err
	}
	results := make([]outcome, len(runs))
	var all sync.WaitGroup
	free := make(chan struct{}, b.atOnce)
	for i, o := range runs {
		all.Go(func() {
			free <- struct{}{}
			defer func() { <-free }()
			started := time.Now()
			results[i].result, results[i].err = b.one(ctx, o)
			results[i].took = time.Since(started)
		})
	}
	all.Wait()
	var errs []error
	for i, r := range results {
		name := b.name(runs[i])
		if r.err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", name, r.err))
			continue
		}
		r.result.Print(os.Stdout, name)
		fmt.Printf("  took %v\n", r.took.Round(time.Second))
		if r.result.Failed() {
			errs = append(errs, fmt.Errorf("%s: there were failures; logs are in %s", name, b.dir(runs[i])))
		}
	}
	return errors.Join(errs...)
}

// outcome is the result of one run.
type outcome struct {
	result *critest.Result
	err    error
	took   time.Duration
}

// name returns the name of a run: driver/handler, with the kind of machine as a
// prefix unless it is the usual one.
func (b *bench) name(o options) string {
	name := o.Driver + "/" + o.Handler
	if o.Mode != "" {
		name = o.Mode + "/" + name
	}
	if b.kind != "uml" {
		name = b.kind + "/" + name
	}
	return name
}

// dir returns the directory in which everything of a run is kept.
func (b *bench) dir(o options) string {
	return filepath.Join(b.cache, strings.ReplaceAll(b.name(o), "/", "-"))
}

// prepare builds everything that is missing.
func (b *bench) prepare(ctx context.Context) error {
	repo, err := tools.Repository()
	if err != nil {
		return err
	}
	b.cache = filepath.Join(repo, ".cache", "node")
	if err := os.MkdirAll(b.cache, 0o755); err != nil {
		return err
	}
	if b.files, err = b.collect(ctx, repo); err != nil {
		return err
	}
	if err := b.machine.prepare(ctx, repo, b.cache); err != nil {
		return err
	}
	b.base, err = baseImage(ctx, b.cache, b.recipe())
	return err
}

// one boots a machine for one run and evaluates what it wrote.
func (b *bench) one(ctx context.Context, o options) (*critest.Result, error) {
	dir := b.dir(o)
	if err := errors.Join(os.RemoveAll(dir), os.MkdirAll(dir, 0o755)); err != nil {
		return nil, err
	}
	d := disks{base: b.base, input: filepath.Join(dir, "input.tar"), output: filepath.Join(dir, "output.tar")}
	if err := writeInput(d.input, o, b.files); err != nil {
		return nil, err
	}
	if err := errors.Join(os.WriteFile(d.output, nil, 0o644), os.Truncate(d.output, outputSize)); err != nil {
		return nil, err
	}
	defer func() { _ = os.Remove(d.input); _ = os.Remove(filepath.Join(dir, overlay)) }()
	fmt.Printf("%s: boots %s, its console is %s\n", b.name(o), b.machine.name(), filepath.Join(dir, "console.log"))
	if err := boot(ctx, b.machine, dir, d); err != nil {
		return nil, err
	}
	if err := unpack(d.output, dir); err != nil {
		return nil, fmt.Errorf("%w; see the console's log in %s", err, dir)
	}
	// Only a machine with SELinux has the first, only one without critest the
	// second, and only one with another processor the third.
	for _, file := range []string{"denials", "steps", "demo"} {
		if text, err := os.ReadFile(filepath.Join(dir, file)); err == nil {
			fmt.Printf("%s: %s", b.name(o), text)
		}
	}
	return judge(dir)
}

// collect names the files of a guest, and builds them.
func (b *bench) collect(ctx context.Context, repo string) (map[string]string, error) {
	arch := b.machine.arch()
	parts, err := tools.CritestPartsFor(ctx, arch)
	if err != nil {
		return nil, err
	}
	packaged := "crius_*_" + arch + ".deb"
	deb, err := newest(filepath.Join(b.packages, packaged))
	if err != nil {
		return nil, fmt.Errorf("%w: run make packages ARCH=%s", err, arch)
	}
	guest := filepath.Join(b.cache, "guest-"+arch)
	if err := command(ctx, repo, "env", "GOARCH="+arch, "go", "build", "-tags", tools.BuildTags, "-o", guest, "./test/node/guest"); err != nil {
		return nil, err
	}
	files := map[string]string{
		"guest": guest, "critest": parts.Suite, "busybox": parts.Busybox, "standin": parts.Standin, "crius.deb": deb,
	}
	if b.previous != "" {
		if files["previous.deb"], err = newest(filepath.Join(b.previous, packaged)); err != nil {
			return nil, err
		}
	}
	switch b.mode {
	case "install":
		err = collectInstall(ctx, repo, files)
	case "bench":
		err = collectBench(ctx, repo, files)
	case "checkpoint":
		err = collectCheckpoint(ctx, repo, files)
	}
	if err != nil {
		return nil, err
	}
	if arch != runtime.GOARCH {
		return files, collectDemo(ctx, repo, arch, files)
	}
	files["runc-current"], err = tools.Runc(ctx) // it needs C libraries
	return files, err
}

// collectBench adds test/bench and what it measures, in a tree like the one
// that it expects.
func collectBench(ctx context.Context, repo string, files map[string]string) error {
	_, err := tools.Programs(ctx, false)
	if err == nil {
		_, err = tools.Probe(ctx)
	}
	var peer, pause string
	if err == nil {
		peer, err = tools.Containerd(ctx)
	}
	if err == nil {
		pause, err = containerd.PauseProgram(ctx)
	}
	program := filepath.Join(repo, ".cache", "node", "bench")
	if err == nil {
		err = command(ctx, repo, "go", "build", "-tags", tools.BuildTags, "-o", program, "./test/bench")
	}
	if err != nil {
		return err
	}
	for _, path := range []string{
		filepath.Join(repo, "go.mod"), program, peer, filepath.Join(filepath.Dir(peer), "containerd-shim-runc-v2"),
		filepath.Join(repo, ".cache/testkit/crius"), filepath.Join(repo, ".cache/testkit/crius-unpack"),
		filepath.Join(repo, ".cache/testkit/crius-conmon"), filepath.Join(repo, ".cache/testkit/crius-conmon-shim"),
		filepath.Join(repo, ".cache/testkit/probe"), pause,
	} {
		name, err := filepath.Rel(repo, path)
		if err != nil {
			return err
		}
		files["tree/"+name] = path
	}
	return nil
}

// collectDemo adds the demo, which make demo cannot show with another
// processor, and the parts of the source tree that it reads.
func collectDemo(ctx context.Context, repo, arch string, files map[string]string) (err error) {
	if files["demo"], err = tools.DemoFor(ctx, arch); err != nil {
		return err
	}
	files["go.mod"] = filepath.Join(repo, "go.mod")
	files[".cache/testkit/probe"], err = tools.ProbeFor(ctx, arch)
	return err
}

// collectInstall adds what an operator has: a kubelet, crictl, the page to
// follow, and a configuration of CRI-O with the additions of installers.
func collectInstall(ctx context.Context, repo string, files map[string]string) (err error) {
	if files["kubelet"], err = tools.Kubelet(ctx, tools.KubeletVersions()[0]); err != nil {
		return err
	}
	if files["crictl"], err = tools.Crictl(ctx); err != nil {
		return err
	}
	files["install.md"] = filepath.Join(repo, "docs", "install.md")
	crio := filepath.Join(repo, "cmd", "crius", "config", "testdata")
	files["crio.conf"] = filepath.Join(crio, "crio-defaults", "crio.conf")
	for _, name := range []string{"10-crio.conf", "99-kata-deploy", "99-nvidia.conf"} {
		files[name] = filepath.Join(crio, "crio-installers", "crio.conf.d", name)
	}
	return nil
}
