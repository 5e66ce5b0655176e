package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/crius-run/crius/test/kit/tools"
	"github.com/crius-run/crius/test/kit/wait"
)

// cutting is a number of power cuts, spread over a few machines that each keep
// their disk from cut to cut.
type cutting struct {
	count    int
	seed     uint64
	machines int
	work     time.Duration // how long a machine works at most before a cut, unless it is slow

	uml   uml
	dir   string // of everything that is kept
	base  string // root file system, never written
	input string // file system with the guest's files
	cache string // makes a disk lose what was not flushed; for LD_PRELOAD

	mu   sync.Mutex
	sum  tally
	left int // cuts still to be made
}

// tally is the result of all cuts.
type tally struct {
	cuts, boots, whole int // whole: boots after which everything was verified
	lost, undone       int // cuts at which a disk lost writes, and how many
	answered           []int
	pulled             int // pulls that were complete before a cut
	images, aside      int
	pods, containers   int
	failures           []string
}

// cutPatience is how long a machine may take until it works: longer than its guest waits for anything, which then
// says what it has waited for.
const cutPatience = 3 * wait.Limit

// run makes the cuts and prints the results. Failures are an error.
func (c *cutting) run(ctx context.Context) error {
	if err := c.prepare(ctx); err != nil {
		return err
	}
	fmt.Printf("%d power cuts, seed %d; disks and consoles are in %s\n", c.count, c.seed, c.dir)
	c.left = c.count
	var all sync.WaitGroup
	errs := make([]error, c.machines)
	for i := range c.machines {
		all.Go(func() { errs[i] = c.series(ctx, i) })
	}
	all.Wait()
	fmt.Println(c.sum.line())
	for _, f := range c.sum.failures {
		fmt.Println("FAILED:", f)
	}
	if len(c.sum.failures) > 0 {
		errs = append(errs, fmt.Errorf("%d of %d boots went wrong", len(c.sum.failures), c.sum.boots))
	}
	return errors.Join(errs...)
}

func (t *tally) line() string {
	slices.Sort(t.answered)
	longest, median := 0, 0
	if n := len(t.answered); n > 0 {
		longest, median = t.answered[n-1], t.answered[n/2]
	}
	return fmt.Sprintf("powercut: %d cuts (%d with %d writes lost by the disk), %d boots, %d wholly verified, crius answered after %d ms (median; longest %d ms), "+
		"%d pulls done, %d images verified and run, %d things set aside, %d pods and %d containers of dead boots removed, %d failures",
		t.cuts, t.lost, t.undone, t.boots, t.whole, median, longest, t.pulled, t.images, t.aside, t.pods, t.containers, len(t.failures))
}

// prepare builds what is missing.
func (c *cutting) prepare(ctx context.Context) error {
	repo, err := tools.Repository()
	if err != nil {
		return err
	}
	cache := filepath.Join(repo, ".cache", "node")
	c.dir = filepath.Join(cache, "powercut")
	files := filepath.Join(c.dir, "files")
	if err := errors.Join(os.RemoveAll(files), os.MkdirAll(files, 0o755)); err != nil {
		return err
	}
	if err := c.uml.prepare(ctx, repo, cache); err != nil {
		return err
	}
	c.cache = filepath.Join(c.dir, "cache.so")
	b := bench{machine: &c.uml, suite: "trixie"}
	if c.base, err = baseImage(ctx, cache, b.recipe()); err != nil {
		return err
	}
	if err := writeImages(ctx, repo, filepath.Join(files, "images")); err != nil {
		return err
	}
	for name, text := range map[string]string{
		"crius.toml": cutConfig, "registries.conf": "[[registry]]\nlocation = \"127.0.0.1:5000\"\ninsecure = true\n",
	} {
		if err := os.WriteFile(filepath.Join(files, name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	c.input = filepath.Join(c.dir, "input.img")
	for _, argv := range [][]string{
		{"gcc", "-O2", "-Wall", "-shared", "-fPIC", "-o", c.cache, "test/node/cache/cache.c"},
		{"go", "build", "-tags", tools.BuildTags, "-o", filepath.Join(files, "guest"), "./test/node/powercut"},
		{"go", "build", "-tags", tools.BuildTags, "-o", files, "./cmd/..."},
		{"install", "-D", "-t", filepath.Join(files, "net.d"), "-m", "644", "contrib/cni/10-crius-bridge.conflist"},
		{"install", "-m", "644", "contrib/policy.json", files},
		{"rm", "-f", c.input},
		{"mkfs.ext4", "-q", "-F", "-d", files, c.input, "256M"},
	} {
		if err := command(ctx, repo, argv...); err != nil {
			return err
		}
	}
	return nil
}

// cutConfig is crius's configuration in the machine: settings of the node
// itself keep their defaults.
const cutConfig = `[image]
registries_conf = "/bench/registries.conf"
signature_policy = "/bench/policy.json"
[network]
conf_dir = "/bench/net.d"
[runtime]
cgroup_driver = "cgroupfs"
monitor = "/bench/crius-conmon"
`

// umlName is the directory in which user-mode Linux records its process.
const umlName = "uml"

// victim is a machine with its disk.
type victim struct {
	*cutting
	name    string
	dir     string
	random  *rand.Rand
	options string          // mount options of the disk
	present map[string]bool // images that the node has promised to keep
	toLoad  time.Duration   // time that the last boot took until it worked
}

func (v *victim) disk() string { return filepath.Join(v.dir, "disk.img") }
func (v *victim) undo() string { return filepath.Join(v.dir, "undo") }

// series cuts the power of one machine until no cuts are left. After a failure
// the disk is kept, and the machine continues with a new one.
func (c *cutting) series(ctx context.Context, number int) error {
	for disk := 0; ; disk++ {
		v := &victim{
			cutting: c, name: fmt.Sprintf("%d.%d", number, disk), random: rand.New(rand.NewPCG(c.seed, uint64(number<<16+disk))),
			present: map[string]bool{}, toLoad: 10 * time.Second,
		}
		// Some file systems do not flush at a rename without a sync.
		v.options = []string{"", "noauto_da_alloc"}[(number+disk)%2]
		v.dir = filepath.Join(c.dir, v.name)
		if err := errors.Join(os.RemoveAll(v.dir), os.MkdirAll(v.dir, 0o755)); err != nil {
			return err
		}
		if err := command(ctx, c.dir, "mkfs.ext4", "-q", "-F", "-J", "size=16", "-E", "lazy_itable_init=0,lazy_journal_init=0", v.disk(), "1G"); err != nil {
			return err
		}
		for {
			if !c.next() || ctx.Err() != nil {
				return errors.Join(ctx.Err(), os.RemoveAll(v.dir))
			}
			failure, err := v.cut(ctx)
			if err != nil {
				return err
			}
			if failure != "" {
				c.fail(fmt.Sprintf("machine %s: %s\n  its disk and console are in %s", v.name, failure, v.dir))
				break
			}
		}
	}
}

// next takes a cut.
func (c *cutting) next() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	const most = 10
	if c.left == 0 || len(c.sum.failures) >= most {
		return false
	}
	c.left--
	return true
}

func (c *cutting) fail(what string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	fmt.Println("FAILED:", what)
	c.sum.failures = append(c.sum.failures, what)
}

// cut boots the machine, cuts its power at some moment, and makes its disk
// forget unflushed writes.
func (v *victim) cut(ctx context.Context) (failure string, err error) {
	var after time.Duration // from the boot, or from the beginning of the work
	booting := v.random.IntN(4) == 0
	if booting {
		after = time.Duration(v.random.Int64N(int64(v.toLoad)))
	} else {
		// A busy machine needs time to do something, too.
		after = time.Duration(v.random.Int64N(int64(max(v.work, 2*v.toLoad))))
	}
	failure, err = v.live(ctx, booting, after)
	if failure != "" || err != nil {
		return failure, err
	}
	if flushed, err := os.Stat(v.undo() + ".flushed"); err != nil || !booting && flushed.Size() == 0 {
		return "", fmt.Errorf("the machine never flushed its disk: test/node/cache/cache.c does not know this user-mode Linux: %v", err)
	}
	undone, err := forget(v.disk(), v.undo(), v.random)
	v.mu.Lock()
	defer v.mu.Unlock()
	v.sum.cuts++
	v.sum.undone += undone
	if undone > 0 {
		v.sum.lost++
	}
	if v.sum.cuts%10 == 0 {
		fmt.Println(v.sum.line())
	}
	return "", err
}

// argv returns the machine's command line.
func (v *victim) argv() (argv, env []string) {
	argv = []string{
		"unshare", "--pid", "--fork", "--kill-child=KILL", "--mount-proc",
		umlProgram, "mem=1024M", "uml_dir=./", "umid=" + umlName, "ubd0r=" + v.base, "ubd1r=" + v.input, "ubd2=" + v.disk(),
		"root=/dev/ubda", "ro", "con=null", "con0=null,fd:1", "quiet", "init=/bin/sh",
		"POWERCUT_SEED=" + strconv.FormatUint(v.random.Uint64(), 10), "POWERCUT_MOUNT=" + v.options,
		"POWERCUT_WANT=" + strings.Join(slices.Sorted(maps.Keys(v.present)), ","),
		"--", "-c", `"mount -t ext4 -o ro /dev/ubdb /bench && exec /bench/guest"`,
	}
	env = []string{
		"LD_PRELOAD=" + v.uml.xstate + ":" + v.cache, "TMPDIR=/dev/shm",
		"CACHE_DISK=" + v.disk(), "CACHE_UNDO=" + v.undo(),
	}
	return argv, env
}

// live runs the machine until its power is cut: all its processes, and only
// those, are killed, because they have their own PID namespace.
func (v *victim) live(ctx context.Context, booting bool, after time.Duration) (failure string, err error) {
	if err := os.RemoveAll(filepath.Join(v.dir, umlName)); err != nil { // of the last boot
		return "", err
	}
	log, err := os.Create(filepath.Join(v.dir, "console.log"))
	if err != nil {
		return "", err
	}
	defer log.Close()
	argv, env := v.argv()
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Dir = v.dir
	cmd.Env = append(os.Environ(), env...)
	out, err := cmd.StdoutPipe()
	if err != nil {
		return "", err
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // this process passes on an interrupt
	if err := cmd.Start(); err != nil {
		return "", err
	}
	started := time.Now()
	lines := make(chan string)
	go func() {
		defer close(lines)
		s := bufio.NewScanner(io.TeeReader(out, log))
		s.Buffer(nil, 1<<20)
		for s.Scan() {
			lines <- s.Text()
		}
	}()
	v.note(func(t *tally) { t.boots++ })
	cut := time.NewTimer(cutPatience)
	if booting {
		cut.Reset(after)
	}
	due := booting
	for lines != nil && failure == "" {
		select {
		case line, ok := <-lines:
			if !ok {
				lines = nil
				failure = "the machine went down by itself: " + v.end()
				break
			}
			message, ours := strings.CutPrefix(strings.TrimRight(line, "\r"), "@ ")
			if ours && message == "load" {
				v.toLoad = time.Since(started)
				if !booting {
					due = true
					cut.Reset(after)
				}
			} else if ours {
				failure = v.hear(message)
			}
		case <-cut.C:
			if !due {
				failure = fmt.Sprintf("the machine did not work after %v", cutPatience)
			}
			goto off
		case <-ctx.Done():
			failure = ""
			err = ctx.Err()
			goto off
		}
	}
off:
	_ = cmd.Process.Kill()
	for lines != nil { // its last process is dead when the console is closed everywhere
		line, ok := <-lines
		if !ok {
			break
		}
		if message, ours := strings.CutPrefix(strings.TrimRight(line, "\r"), "@ "); ours && failure == "" {
			failure = v.hear(message)
		}
	}
	_ = cmd.Wait() // killed
	return failure, err
}

// end returns the machine's last output.
func (v *victim) end() string {
	text, _ := os.ReadFile(filepath.Join(v.dir, "console.log"))
	return tail(text, 5)
}

func (c *cutting) note(f func(*tally)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f(&c.sum)
}

// hear records the guest's messages. It returns a failure.
func (v *victim) hear(message string) (failure string) {
	word, rest, _ := strings.Cut(message, " ")
	switch word {
	case "failed":
		text, err := strconv.Unquote(rest)
		if err != nil {
			return rest
		}
		return text
	case "pulled":
		v.present[rest] = true
		v.note(func(t *tally) { t.pulled++ })
	case "removing":
		delete(v.present, rest)
	case "answered":
		ms, _ := strconv.Atoi(rest)
		v.note(func(t *tally) { t.answered = append(t.answered, ms) })
	case "verified":
		var images, aside, pods, containers int
		if _, err := fmt.Sscan(rest, &images, &aside, &pods, &containers); err != nil {
			return fmt.Sprintf("the guest said %q: %v", message, err)
		}
		v.note(func(t *tally) {
			t.whole++
			t.images += images
			t.aside += aside
			t.pods += pods
			t.containers += containers
		})
	}
	return ""
}
