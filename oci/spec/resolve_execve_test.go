package spec

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
)

// filled returns arguments and variables of a program that take size bytes of
// execve's space.
func filled(size int) *specs.Process {
	p := &specs.Process{Args: []string{"true"}}
	size -= ExecSize(1, len("true"))
	for size > 0 {
		n := min(size, ExecSize(1, 100_000))
		p.Env = append(p.Env, "A="+strings.Repeat("x", max(0, n-ExecSize(1, 2))))
		size -= n
	}
	return p
}

// Also asks the kernel.
func TestExecRefusesWhatTheKernelDoes(t *testing.T) {
	t.Parallel()
	var stack unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_STACK, &stack); err != nil {
		t.Fatal(err)
	}
	space := execSpace(max(stack.Cur, defaultStack))
	for name, c := range map[string]struct {
		process *specs.Process
		ok      bool
	}{
		"longest argument":     {&specs.Process{Args: []string{"true", strings.Repeat("x", MaxExecString())}}, true},
		"an argument too long": {&specs.Process{Args: []string{"true", strings.Repeat("x", MaxExecString()+1)}}, false},
		"longest variable":     {&specs.Process{Args: []string{"true"}, Env: []string{"A=" + strings.Repeat("x", MaxExecString()-2)}}, true},
		"a variable too long":  {&specs.Process{Args: []string{"true"}, Env: []string{"A=" + strings.Repeat("x", MaxExecString()-1)}}, false},
		"as much as fits":      {filled(space - 200), true}, // and the program's path
		"more than fits":       {filled(space + 1), false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if err := CheckExec(c.process, stack.Cur); (err == nil) != c.ok || err != nil && !errors.Is(err, fault.Invalid) {
				t.Errorf("got %v", err)
			}
			program, err := exec.LookPath("true")
			if err != nil {
				t.Fatal(err)
			}
			err = run(program, c.process)
			if (err == nil) != c.ok || err != nil && !errors.Is(err, unix.E2BIG) {
				t.Errorf("the kernel says %v", err)
			}
		})
	}
}

// run passes every variable on; os/exec would drop repeated names.
func run(program string, process *specs.Process) error {
	p, err := os.StartProcess(program, process.Args, &os.ProcAttr{Env: append([]string{}, process.Env...)})
	if err != nil {
		return err
	}
	_, err = p.Wait()
	return err
}

func TestExecRefused(t *testing.T) {
	t.Parallel()
	limited := func(size int, stack uint64) *specs.Process {
		p := filled(size)
		p.Rlimits = []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Soft: 1}, {Type: "RLIMIT_STACK", Soft: stack, Hard: ^uint64(0)}}
		return p
	}
	for name, c := range map[string]struct {
		process *specs.Process
		words   string // empty: accepted
	}{
		"NUL in an argument":           {&specs.Process{Args: []string{"a\x00b"}}, "argument 0"},
		"NUL in a variable":            {&specs.Process{Env: []string{"A=1", "SECRET=\x00"}}, `"SECRET"`},
		"variable without a name":      {&specs.Process{Env: []string{"=1"}}, "without a name"},
		"nothing as a variable":        {&specs.Process{Env: []string{""}}, "without a name"},
		"a long one by name":           {&specs.Process{Env: []string{"BIG=" + strings.Repeat("x", 1<<20)}}, `"BIG" has 1048580 bytes`},
		"more than 6 MiB":              {limited(MaxExec+1, ^uint64(0)), "6291456"},
		"6 MiB":                        {limited(MaxExec, ^uint64(0)), ""},
		"a quarter of a small stack":   {limited(256<<10, 1<<20), ""},
		"more than that":               {limited(256<<10+1, 1<<20), "262144"},
		"never less than 128 KiB":      {limited(128<<10, 8192), ""},
		"more than that, and no stack": {limited(128<<10+1, 8192), "131072"},
	} {
		err := CheckExec(c.process, defaultStack)
		if c.words == "" && err != nil || c.words != "" && (!errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), c.words)) {
			t.Errorf("%s: %v", name, err)
		}
		if err != nil && len(err.Error()) > 300 {
			t.Errorf("%s: message of %d bytes", name, len(err.Error()))
		}
	}
}
