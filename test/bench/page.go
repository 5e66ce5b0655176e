package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// report is the results of a run, with its environment.
type report struct {
	Date    string      `json:"date"`
	Command string      `json:"command"`
	Machine [][2]string `json:"machine"` // what, value
	Rows    []*result   `json:"rows"`
}

// result is what one row has measured.
type result struct {
	Name   string   `json:"name"`
	About  string   `json:"about"`
	Tables []*table `json:"tables"`
}

// programs are those whose version is reported, with the arguments that print
// it in the first line.
var programs = [][]string{
	{"runc", "runc", "--version"},
	{"crun", "crun", "--version"},
	{"conmon", "conmon", "--version"},
	{"CNI plugins", "dpkg-query", "--show", "--showformat=${Version}", "containernetworking-plugins"},
}

// newReport describes the machine.
func newReport(ctx context.Context, command string) (*report, error) {
	r := &report{Date: time.Now().UTC().Format("2006-01-02 15:04 UTC"), Command: command}
	add := func(what, value string) { r.Machine = append(r.Machine, [2]string{what, value}) }
	var kernel unix.Utsname
	if err := unix.Uname(&kernel); err != nil {
		return nil, err
	}
	var memory unix.Sysinfo_t
	if err := unix.Sysinfo(&memory); err != nil {
		return nil, err
	}
	cpus, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return nil, err
	}
	add("processor", fmt.Sprintf("%d × %s", runtime.NumCPU(), field(string(cpus), "model name")))
	add("memory", fmt.Sprintf("%.0f GiB", float64(memory.Totalram)*float64(memory.Unit)/(1<<30)))
	add("kernel", unix.ByteSliceToString(kernel.Sysname[:])+" "+unix.ByteSliceToString(kernel.Release[:]))
	if system, err := os.ReadFile("/etc/os-release"); err == nil {
		add("system", strings.Trim(field(strings.ReplaceAll(string(system), "=", ":"), "PRETTY_NAME"), `"`))
	}
	if err := r.addLoad("load before"); err != nil {
		return nil, err
	}
	for _, p := range programs {
		if err := r.addVersion(ctx, p[0], p[1:]...); err != nil {
			return nil, err
		}
	}
	add("Go", runtime.Version())
	return r, nil
}

// addVersion adds the version of a program, from the first line of a command's
// output.
func (r *report) addVersion(ctx context.Context, program string, command ...string) error {
	version, err := firstLine(ctx, command)
	version = strings.TrimPrefix(strings.TrimSpace(strings.TrimPrefix(version, program)), "version ")
	r.Machine = append(r.Machine, [2]string{program, version})
	return err
}

// addLoad adds the load of the machine.
func (r *report) addLoad(when string) error {
	load, err := os.ReadFile("/proc/loadavg")
	if err == nil {
		r.Machine = append(r.Machine, [2]string{when, strings.Join(strings.Fields(string(load))[:3], " ")})
	}
	return err
}

// field finds "name : value".
func field(text, name string) string {
	for line := range strings.Lines(text) {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == name {
			return strings.TrimSpace(value)
		}
	}
	return "unknown"
}

func firstLine(ctx context.Context, argv []string) (string, error) {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.WaitDelay = time.Second
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s: %w", strings.Join(argv, " "), err)
	}
	line, _, _ := strings.Cut(string(bytes.TrimSpace(out)), "\n")
	return line, nil
}

// markdown writes the report with all its tables.
func (r *report) markdown(w io.Writer) {
	fmt.Fprintf(w, "# A run of the benchmarks\n\n"+
		"Measured on %s by\n\n```\n%s\n```\n\n"+
		"which makes this file. docs/testing.md says how; what each part measures stands above its\n"+
		"tables. The floor is what nobody can avoid: CNI plugins and OCI runtime, run as raw\n"+
		"commands on a bundle that is ready. crius, containerd and the floor take turns\n"+
		"in one run, on nodes that are alike. Of times there are the median and beside it a\n"+
		"percentile; bars compare medians within one line.\n\n", r.Date, r.Command)
	fmt.Fprintf(w, "| | |\n|---|---|\n")
	for _, fact := range r.Machine {
		fmt.Fprintf(w, "| %s | %s |\n", fact[0], fact[1])
	}
	for _, row := range r.Rows {
		fmt.Fprintf(w, "\n## %s\n\n%s `make bench ROW=%s`\n", row.Name, row.About, row.Name)
		for _, t := range row.Tables {
			t.markdown(w)
			if len(t.bars) > 1 {
				fmt.Fprintf(w, "\n```\n")
				t.plot(w)
				fmt.Fprintf(w, "```\n")
			}
		}
	}
}

func writeJSON(file string, v any) error {
	text, err := json.MarshalIndent(v, "", "\t")
	if err != nil {
		return err
	}
	return os.WriteFile(file, append(text, '\n'), 0o644)
}
