package tuning

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/crius-run/crius/internal/fault"
)

const (
	etcFile = "/etc/default/irqbalance"
	etcText = "# irqbalance\n#IRQBALANCE_BANNED_CPULIST=\nIRQBALANCE_ARGS=-j\n"
)

// machine is an imitated node with eight CPUs in a directory.
type machine struct {
	*testing.T
	root    string
	state   string
	boot    string
	cgroups map[string]string // files, by path
	fail    map[string]error  // by the beginning of a command, or the path of a cgroup's file
	ran     []string
	running func(line string) // called for each command
	later   map[string]func(context.Context) error
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	m := &machine{T: t, root: t.TempDir(), state: t.TempDir(), boot: "one", cgroups: map[string]string{}, fail: map[string]error{}, running: func(string) {}}
	m.set(defaultMask, "ff\n")
	m.set("/sys/devices/system/cpu/online", "0-7\n")
	for cpu := range 8 {
		m.set(cpuFile(cpu, "power/pm_qos_resume_latency_us"), "0\n")
		m.set(cpuFile(cpu, "cpufreq/scaling_governor"), "powersave\n")
		m.set(cpuFile(cpu, "cpufreq/scaling_available_governors"), "performance powersave\n")
		m.set(cpuFile(cpu, "topology/thread_siblings_list"), fmt.Sprintf("%d,%d\n", cpu%4, cpu%4+4))
	}
	m.set(etcFile, etcText)
	return m
}

func (m *machine) set(path, text string) {
	m.Helper()
	path = filepath.Join(m.root, path)
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o600)); err != nil {
		m.Fatal(err)
	}
}

func (m *machine) holds(path, want string) {
	m.Helper()
	text, err := os.ReadFile(filepath.Join(m.root, path))
	if err != nil || strings.TrimSpace(string(text)) != strings.TrimSpace(want) {
		m.Errorf("%s holds %q, %v; want %q", path, text, err, want)
	}
}

// server returns a Tuner of the machine that has recovered.
func (m *machine) server() *Tuner {
	m.Helper()
	m.later = map[string]func(context.Context) error{} // an earlier one is dead
	later := func(name string, work func(context.Context) error) { m.later[name] = work }
	t, err := New(Options{Config: DefaultConfig(), StateDir: m.state, Boot: m.boot, Later: later, Node: Node{
		Root: m.root,
		ReadCgroup: func(cgroup, name string) (string, error) {
			text, found := m.cgroups[cgroup+"/"+name]
			if !found {
				return "", fault.NotFound
			}
			return text, nil
		},
		WriteCgroup: func(cgroup, name, value string) error {
			if _, found := m.cgroups[cgroup+"/"+name]; !found {
				return fault.NotFound
			}
			if err := m.fail[cgroup+"/"+name]; err != nil {
				return err
			}
			m.cgroups[cgroup+"/"+name] = value
			return nil
		},
		Run: func(_ context.Context, env []string, name string, args ...string) error {
			line := strings.Join(slices.Concat(env, []string{name}, args), " ")
			m.ran = append(m.ran, line)
			m.running(line)
			for begin, err := range m.fail {
				if strings.HasPrefix(line, begin) {
					return err
				}
			}
			return nil
		},
	}})
	if err != nil {
		m.Fatal(err)
	}
	if _, err := t.Recover(m.Context()); err != nil {
		m.Fatal(err)
	}
	return t
}

// work does the deferred work; what fails stays.
func (m *machine) work() {
	m.Helper()
	for name, work := range maps.Clone(m.later) {
		delete(m.later, name)
		if err := work(m.Context()); err != nil {
			m.later[name] = work
		}
	}
}

func (m *machine) apply(t *Tuner, id string, p Plan) {
	m.Helper()
	if err := t.Apply(m.Context(), id, "/kubepods/pod1/"+id, &p); err != nil {
		m.Fatal(err)
	}
}

func (m *machine) release(t *Tuner, ids ...string) {
	m.Helper()
	for _, id := range ids {
		if err := t.Release(m.Context(), id); err != nil {
			m.Fatal(err)
		}
	}
}

// asBefore requires the machine to be as newMachine made it, and an empty
// record.
func (m *machine) asBefore() {
	m.Helper()
	m.work()
	m.holds(defaultMask, "ff")
	m.holds(etcFile, etcText)
	for cpu := range 8 {
		m.holds(cpuFile(cpu, "power/pm_qos_resume_latency_us"), "0")
		m.holds(cpuFile(cpu, "cpufreq/scaling_governor"), "powersave")
	}
	if _, err := os.Stat(m.record()); !errors.Is(err, fs.ErrNotExist) {
		m.Errorf("the record is still there: %v", err)
	}
}

// wantRestarts does the deferred work, and requires that many restarts of
// irqbalance in total.
func (m *machine) wantRestarts(want int) {
	m.Helper()
	m.work()
	got := 0
	for _, line := range m.ran {
		if line == "systemctl restart irqbalance.service" {
			got++
		}
	}
	if got != want {
		m.Errorf("irqbalance was restarted %d times, want %d: %q", got, want, m.ran)
	}
}

func (m *machine) record() string { return filepath.Join(m.state, "tuning", only, "tuning.json") }

var everything = Plan{CPUs: Set{2, 3}, Quiet: Set{2, 3}, Latency: "n/a", Governor: "performance"}

func TestApplyAndRelease(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	s := m.server()
	m.apply(s, "a", everything)
	m.holds(defaultMask, "f3")
	m.holds(etcFile, etcText+"IRQBALANCE_BANNED_CPUS=\"c\"\nIRQBALANCE_BANNED_CPULIST=\"2-3\"\n")
	for cpu := range 8 {
		latency, governor := "0", "powersave"
		if cpu == 2 || cpu == 3 {
			latency, governor = "n/a", "performance"
		}
		m.holds(cpuFile(cpu, "power/pm_qos_resume_latency_us"), latency)
		m.holds(cpuFile(cpu, "cpufreq/scaling_governor"), governor)
	}
	m.wantRestarts(1)
	m.release(s, "a", "a", "of another")
	m.asBefore()
}

// A container's CPUs may be given to another one before the end of the first is
// known, and what one of the two no longer needs the other may still need.
func TestCPUsOfTwoContainers(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	s := m.server()
	m.apply(s, "a", everything)
	m.apply(s, "b", everything)
	m.apply(s, "c", Plan{CPUs: Set{4, 5}, Quiet: Set{5}})
	m.release(s, "a")
	m.holds(defaultMask, "d3")
	m.holds(cpuFile(2, "cpufreq/scaling_governor"), "performance")
	m.release(s, "b")
	m.holds(defaultMask, "df")
	m.holds(etcFile, etcText+"IRQBALANCE_BANNED_CPUS=\"20\"\nIRQBALANCE_BANNED_CPULIST=\"5\"\n")
	m.holds(cpuFile(2, "cpufreq/scaling_governor"), "powersave")
	m.release(s, "c")
	m.asBefore()
}

// The operator's settings stay: a CPU that got no interrupts gets none later,
// and irqbalance's configuration is as before.
func TestSettingsOfTheOperatorStay(t *testing.T) {
	t.Parallel()
	const own = "A=1\nIRQBALANCE_BANNED_CPULIST=7\nB=2"
	m := newMachine(t)
	m.set(defaultMask, "7b") // without 2 and 7
	m.set(etcFile, own)
	m.set(cpuFile(3, "cpufreq/scaling_governor"), "performance")
	s := m.server()
	m.apply(s, "a", everything)
	m.holds(defaultMask, "73")
	m.holds(etcFile, "A=1\nIRQBALANCE_BANNED_CPUS=\"8c\"\nIRQBALANCE_BANNED_CPULIST=\"2-3,7\"\nB=2")
	m.release(s, "a")
	m.holds(defaultMask, "7b")
	m.holds(etcFile, own)
	m.holds(cpuFile(2, "cpufreq/scaling_governor"), "powersave")
	m.holds(cpuFile(3, "cpufreq/scaling_governor"), "performance")
}

// A dead server leaves the record, by which the next one knows what to undo.
func TestNextServerKnows(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	s := m.server()
	m.apply(s, "a", everything)
	m.apply(s, "b", Plan{CPUs: Set{6}, Latency: "10"})

	s = m.server()
	tuned, err := s.Recover(t.Context())
	if err != nil || !slices.Equal(tuned, []string{"a", "b"}) {
		t.Errorf("on record: %q, %v", tuned, err)
	}
	m.release(s, "a")
	m.holds(defaultMask, "ff")
	m.holds(cpuFile(6, "power/pm_qos_resume_latency_us"), "10")
	m.release(m.server(), "b")
	m.asBefore()
}

// The record is written before anything changes, even if the change then fails.
func TestRecordComesFirst(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	s := m.server()
	m.cgroups["/kubepods/pod1/cpu.max"] = "100000 100000"
	m.fail["/kubepods/pod1/cpu.max"] = errors.New("no")
	p := everything
	p.PodQuota = true
	if err := s.Apply(t.Context(), "a", "/kubepods/pod1/a", &p); err == nil {
		t.Fatal("a quota that cannot be lifted is no error")
	}
	m.release(m.server(), "a")
	m.asBefore()

	// If nothing can be recorded nothing changes.
	m.set("/file", "")
	m.state = filepath.Join(m.root, "file")
	s, err := New(Options{Config: DefaultConfig(), StateDir: m.state, Boot: m.boot, Node: Node{Root: m.root}})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Apply(t.Context(), "a", "/kubepods/pod1/a", &everything); err == nil {
		t.Error("no record, and no error")
	}
	m.holds(defaultMask, "ff")
	m.holds(cpuFile(2, "cpufreq/scaling_governor"), "powersave")
}

// A reboot has undone everything except irqbalance's configuration, and may
// have come with other settings.
func TestReboot(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	m.apply(m.server(), "a", everything)
	m.set(defaultMask, "7f\n")
	m.set(cpuFile(2, "cpufreq/scaling_governor"), "performance\n")
	m.boot, m.ran = "two", nil
	s := m.server()
	m.holds(etcFile, etcText)
	m.holds(defaultMask, "7f")
	m.holds(cpuFile(2, "cpufreq/scaling_governor"), "performance")
	m.wantRestarts(1)
	if _, err := os.Stat(m.record()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the record is still there: %v", err)
	}
	m.release(s, "a")
	m.holds(defaultMask, "7f")
}

// What cannot be restored now stays on record.
func TestReleaseIsTriedAgain(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	s := m.server()
	m.apply(s, "a", everything)
	path := filepath.Join(m.root, defaultMask)
	if err := errors.Join(os.Remove(path), os.Mkdir(path, 0o700)); err != nil {
		t.Fatal(err)
	}
	if err := s.Release(t.Context(), "a"); err == nil {
		t.Error("a mask that cannot be written is no error")
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	m.set(defaultMask, "f3")
	m.release(s, "a")
	m.asBefore()
}

// A damaged record is reported with what it leaves behind: above all
// irqbalance's file, which a reboot does not restore.
func TestDamagedRecord(t *testing.T) {
	var log strings.Builder
	defer slog.SetDefault(slog.Default())
	slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))
	m := newMachine(t)
	m.apply(m.server(), "a", everything)
	if err := os.WriteFile(m.record(), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	s := m.server()
	if !strings.Contains(log.String(), "irqbalance_config="+etcFile) {
		t.Errorf("the log says: %s", &log)
	}
	m.apply(s, "b", Plan{CPUs: Set{6}, Latency: "10"})
	m.release(s, "b")
	m.holds(cpuFile(6, "power/pm_qos_resume_latency_us"), "0")
}

// A record that cannot be read now is not overwritten.
func TestRecordThatCannotBeRead(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	m.apply(m.server(), "a", everything)
	s := m.server()
	dir := filepath.Join(m.state, "tuning")
	if err := errors.Join(os.Rename(dir, dir+".away"), os.WriteFile(dir, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Recover(t.Context()); err == nil {
		t.Error("what cannot be read is no error")
	}
	if err := errors.Join(os.Remove(dir), os.Rename(dir+".away", dir)); err != nil {
		t.Fatal(err)
	}
	if err := s.Apply(t.Context(), "b", "/kubepods/pod1/b", &Plan{CPUs: Set{6}, Latency: "10"}); !errors.Is(err, fault.Unavailable) {
		t.Errorf("a container was tuned: %v", err)
	}
	if err := s.Release(t.Context(), "a"); !errors.Is(err, fault.Unavailable) {
		t.Errorf("release: %v", err)
	}
	if tuned, err := s.Recover(t.Context()); err != nil || !slices.Equal(tuned, []string{"a"}) {
		t.Errorf("on record: %q, %v", tuned, err)
	}
	m.release(s, "a")
	m.asBefore()
}

// If irqbalance's configuration cannot be restored after a reboot, the attempt
// is repeated, whatever is tuned meanwhile.
func TestRebootIsTriedAgain(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	m.apply(m.server(), "a", everything)
	path := filepath.Join(m.root, etcFile)
	if err := errors.Join(os.Rename(path, path+".away"), os.Symlink(filepath.Base(path), path)); err != nil {
		t.Fatal(err)
	}
	m.boot = "two"
	m.set(defaultMask, "ff")
	s := m.server()
	m.apply(s, "b", Plan{CPUs: Set{6}, Latency: "10"})
	if err := errors.Join(os.Remove(path), os.Rename(path+".away", path)); err != nil {
		t.Fatal(err)
	}
	m.work()
	m.holds(etcFile, etcText)
	m.holds(cpuFile(6, "power/pm_qos_resume_latency_us"), "10")
}

// An irqbalance that does not run as a service balances once; without it
// nothing does.
func TestIrqbalance(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		what  string
		files []string
		fail  map[string]error
		want  []string
	}{
		{"no service", []string{etcFile}, map[string]error{"systemctl": errors.New("inactive")}, []string{
			"systemctl is-active --quiet irqbalance.service", "IRQBALANCE_BANNED_CPUS=4 IRQBALANCE_BANNED_CPULIST=2 irqbalance --oneshot",
		}},
		{"a service without a file", []string{"/etc/nothing"}, nil, []string{
			"systemctl is-active --quiet irqbalance.service", "systemctl reset-failed irqbalance.service", "systemctl restart irqbalance.service",
		}},
		{"switched off", nil, nil, nil},
	} {
		m := newMachine(t)
		s := m.server()
		s.IrqbalanceFiles, m.fail = c.files, c.fail
		m.apply(s, "a", Plan{CPUs: Set{2}, Quiet: Set{2}})
		m.work()
		if !slices.Equal(m.ran, c.want) {
			t.Errorf("%s: ran %q, want %q", c.what, m.ran, c.want)
		}
		m.release(s, "a")
		m.asBefore()
	}
}

// Containers do not wait for irqbalance, and all that come or go meanwhile need
// only one restart.
func TestIrqbalanceRestartedOnceForAll(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	s := m.server()
	quiet := func(cpu int) Plan { return Plan{CPUs: Set{cpu}, Quiet: Set{cpu}} }
	for cpu, id := range []string{"a", "b", "c"} {
		m.apply(s, id, quiet(cpu))
	}
	m.release(s, "a", "b")
	if len(m.ran) > 0 {
		t.Errorf("on the way %q ran", m.ran)
	}
	m.wantRestarts(1)
	m.wantRestarts(1)

	// A change during a restart of irqbalance needs another restart.
	m.running = func(string) {
		m.running = func(string) {}
		m.release(s, "c")
	}
	m.apply(s, "d", quiet(3))
	m.wantRestarts(2)
	m.wantRestarts(3)
	m.release(s, "d")
	m.wantRestarts(4)
	m.asBefore()
}

// What cannot be restored is tried again and again, without a restart each
// time.
func TestIrqbalanceNotRestartedForNothing(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	s := m.server()
	m.apply(s, "a", everything)
	m.wantRestarts(1)
	governor := filepath.Join(m.root, cpuFile(2, "cpufreq/scaling_governor"))
	if err := errors.Join(os.Remove(governor), os.Mkdir(governor, 0o700)); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if err := s.Release(t.Context(), "a"); err == nil {
			t.Error("a governor that cannot be restored is no error")
		}
		m.wantRestarts(2)
	}
}

// A failed restart is tried again, by the next server too.
func TestIrqbalanceRestartIsTriedAgain(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	s := m.server()
	m.fail["systemctl restart"] = errors.New("no")
	m.apply(s, "a", everything)
	m.release(s, "a")
	m.wantRestarts(1)
	m.wantRestarts(2)
	m.server()
	m.wantRestarts(3)
	m.fail = nil
	m.wantRestarts(4)
	m.asBefore()
	m.wantRestarts(4)
	m.server()
	m.wantRestarts(4)
}

// A server that dies before irqbalance was restarted leaves that to the next
// one, even after the last container is gone.
func TestNextServerRestartsIrqbalance(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	s := m.server()
	m.apply(s, "a", everything)
	s = m.server()
	m.wantRestarts(1)
	m.release(s, "a")
	m.server()
	m.wantRestarts(2)
	m.asBefore()
}

// A systemd that does not answer says nothing about irqbalance.
func TestSystemdThatDoesNotAnswer(t *testing.T) {
	t.Parallel()
	for code, oneshot := range map[int]bool{1: false, 3: true, 4: true} {
		m := newMachine(t)
		m.set("/run/systemd/system/x", "")
		m.fail["systemctl is-active"] = exec.Command("sh", "-c", fmt.Sprint("exit ", code)).Run()
		m.apply(m.server(), "a", everything)
		m.work()
		ran := slices.ContainsFunc(m.ran, func(line string) bool { return strings.HasSuffix(line, "--oneshot") })
		if pending := m.later["irqbalance"] != nil; ran != oneshot || pending == oneshot {
			t.Errorf("exit status %d: ran %q, pending: %v", code, m.ran, pending)
		}
	}
}

// Whatever is in the file, what crius adds to it is removed again.
func FuzzIrqbalanceFile(f *testing.F) {
	for _, text := range []string{etcText, "", "\n", "IRQBALANCE_BANNED_CPUS=ff", "A\nIRQBALANCE_BANNED_CPULIST=\"0-3,x\"\n\n", "IRQBALANCE_BANNED_CPUS=1\nX\nIRQBALANCE_BANNED_CPULIST=2\n"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		var before bannedLines
		before.Lines = slices.DeleteFunc(strings.Split(text, "\n"), func(line string) bool { return !isBanned(line) })
		banned := before.cpus().plus(Set{5})
		changed := withLines(text, assignments(banned, `"`))
		now := bannedLines{Lines: slices.DeleteFunc(strings.Split(changed, "\n"), func(line string) bool { return !isBanned(line) })}
		if !slices.Equal(now.cpus(), banned) || len(now.Lines) != 2 {
			t.Errorf("%q became %q, which bans %s and not %s", text, changed, now.cpus(), banned)
		}
		rest := func(text string) string {
			return strings.TrimRight(strings.Join(slices.DeleteFunc(strings.Split(text, "\n"), isBanned), "\n"), "\n")
		}
		back := withLines(changed, before.Lines)
		if len(before.Lines) == 0 && strings.TrimRight(back, "\n") != strings.TrimRight(text, "\n") || rest(back) != rest(text) {
			t.Errorf("%q became %q, and then %q", text, changed, back)
		}
	})
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		plan Plan
		kind error
		says string
	}{
		{Plan{CPUs: Set{2}, Governor: "turbo"}, fault.Invalid, "no frequency governor turbo, it has: performance powersave"},
		{Plan{CPUs: Set{0, 1, 2, 3, 4, 5, 6, 7}, Quiet: Set{0, 1, 2, 3, 4, 5, 6, 7}}, fault.Invalid, "no CPU would be left for interrupts"},
		{Plan{CPUs: Set{9}, Latency: "0"}, fs.ErrNotExist, "cpu9"},
		{Plan{CPUs: Set{2}, NoBalancing: true}, fault.Unimplemented, "Linux 6.7"},
	} {
		m := newMachine(t)
		s := m.server()
		if err := s.Apply(t.Context(), "a", "/kubepods/pod1/a", &c.plan); !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%+v: %v", c.plan, err)
		}
		m.asBefore()
	}
}

// v2 makes the cgroups of containers of a pod.
func (m *machine) v2(ids ...string) {
	paths := []string{"/kubepods", "/kubepods/pod1"}
	for _, id := range ids {
		paths = append(paths, "/kubepods/pod1/"+id)
	}
	for _, path := range paths {
		m.cgroups[path+"/cpu.max"] = "200000 100000"
		m.cgroups[path+"/"+exclusive] = ""
		m.cgroups[path+"/"+partition] = "member"
	}
}

func TestPartition(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	m.v2("a", "b")
	before := maps.Clone(m.cgroups)
	s := m.server()
	m.apply(s, "a", Plan{CPUs: Set{2, 3}, NoBalancing: true})
	m.apply(s, "b", Plan{CPUs: Set{4}, NoBalancing: true})
	for path, want := range map[string]string{"/kubepods": "2-4", "/kubepods/pod1": "2-4", "/kubepods/pod1/a": "2-3", "/kubepods/pod1/b": "4"} {
		if got := m.cgroups[path+"/"+exclusive]; got != want {
			t.Errorf("exclusive CPUs of %s are %q, want %q", path, got, want)
		}
	}
	if m.cgroups["/kubepods/pod1/a/"+partition] != "isolated" || m.cgroups["/kubepods/"+partition] != "member" {
		t.Errorf("partitions: %v", m.cgroups)
	}
	s = m.server()
	maps.DeleteFunc(m.cgroups, func(path, _ string) bool { return strings.HasPrefix(path, "/kubepods/pod1/a/") }) // the runtime was faster
	m.release(s, "a")
	if got := m.cgroups["/kubepods/"+exclusive]; got != "4" {
		t.Errorf("exclusive CPUs are still %q", got)
	}
	m.release(s, "b")
	maps.DeleteFunc(before, func(path, _ string) bool { return strings.HasPrefix(path, "/kubepods/pod1/a/") })
	if !maps.Equal(m.cgroups, before) {
		t.Errorf("cgroups were left as %v", m.cgroups)
	}
	m.asBefore()
}

// A kernel that accepts an impossible partition says so in its file.
func TestPartitionThatCannotBe(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	m.v2("a")
	s := m.server()
	read := s.ReadCgroup
	s.ReadCgroup = func(cgroup, name string) (string, error) {
		text, err := read(cgroup, name)
		if name == partition && text == "isolated" {
			text = "isolated invalid (Cpu list in cpuset.cpus not exclusive)"
		}
		return text, err
	}
	err := s.Apply(t.Context(), "a", "/kubepods/pod1/a", &Plan{CPUs: Set{2}, NoBalancing: true})
	if !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), "not exclusive") {
		t.Errorf("%v", err)
	}
	s.ReadCgroup = read
	m.release(s, "a")
	if m.cgroups["/kubepods/"+exclusive] != "" || m.cgroups["/kubepods/pod1/a/"+partition] != "member" {
		t.Errorf("left: %v", m.cgroups)
	}
}

func TestSharedCPUsInPartition(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	m.v2("a")
	err := m.server().Apply(t.Context(), "a", "/kubepods/pod1/a", &Plan{CPUs: Set{2}, Shared: Set{0}, NoBalancing: true})
	if !errors.Is(err, fault.Unimplemented) || !strings.Contains(err.Error(), "shared CPUs") {
		t.Errorf("%v", err)
	}
}

// On cgroup v1 there is a switch, also in the cgroup that crun adds.
func TestBalancingV1(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	for _, path := range []string{"/kubepods/pod1/a", "/kubepods/pod1/a/container"} {
		m.cgroups[path+"/"+balance], m.cgroups[path+"/cpuset.cpus"] = "1", "2"
	}
	s := m.server()
	m.apply(s, "a", Plan{CPUs: Set{2}, Shared: Set{0}, NoBalancing: true})
	if m.cgroups["/kubepods/pod1/a/"+balance] != "0" || m.cgroups["/kubepods/pod1/a/container/"+balance] != "0" {
		t.Errorf("%v", m.cgroups)
	}
	m.release(s, "a")
	m.asBefore()
}

func TestPodQuota(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ cgroup, file, want string }{
		"v1":           {"/kubepods/pod1", "cpu.cfs_quota_us", "-1"},
		"v2":           {"/kubepods/pod1", "cpu.max", "max"},
		"v2 of a unit": {"/kubepods.slice/kubepods-pod1.slice", "cpu.max", "max"},
	} {
		m := newMachine(t)
		m.cgroups[c.cgroup+"/"+c.file] = "200000"
		s := m.server()
		if err := s.Apply(t.Context(), "a", c.cgroup+"/a", &Plan{CPUs: Set{2}, PodQuota: true}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if got := m.cgroups[c.cgroup+"/"+c.file]; got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
		told := slices.Contains(m.ran, "systemctl set-property --runtime kubepods-pod1.slice CPUQuota=")
		if told != strings.HasSuffix(c.cgroup, ".slice") {
			t.Errorf("%s: ran %q", name, m.ran)
		}
		m.release(s, "a")
	}
}

// The error for a program that ran out of time says more than that it was
// killed.
func TestProgramThatHangs(t *testing.T) {
	t.Parallel()
	soon, cancel := context.WithTimeoutCause(t.Context(), 10*time.Millisecond, fault.Timeout)
	defer cancel()
	if err := run(soon, nil, "sleep", "1000"); !errors.Is(err, fault.Timeout) {
		t.Error(err)
	}
	if err := run(t.Context(), nil, "false"); err == nil || errors.Is(err, fault.Timeout) {
		t.Error(err)
	}
}
