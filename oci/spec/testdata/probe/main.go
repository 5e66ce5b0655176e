// Command probe is the program of the test containers. It reports its
// environment (report) or the system calls that it may make (calls), and then
// waits to be killed.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"
)

func main() {
	var answer any
	switch mode := os.Args[len(os.Args)-1]; mode {
	case "report":
		answer = report()
	case "calls":
		answer = calls()
	default:
		fmt.Fprintln(os.Stderr, "unknown mode", mode)
		os.Exit(2)
	}
	if answer != nil {
		json.NewEncoder(os.Stdout).Encode(answer)
	}
	for {
		time.Sleep(time.Hour)
	}
}

// Report describes the container as seen from inside.
type Report struct {
	Status     map[string]string // /proc/self/status
	Cwd        string
	Env, Args  []string
	Hostname   string
	Domainname string
	OOM        string
	Namespaces map[string]string
	Mounts     []string // mountinfo
	Limits     string
	Dev        []string
	PIDs       int // visible processes
	Errors     map[string]string
}

func report() Report {
	r := Report{Args: os.Args, Env: os.Environ(), Status: map[string]string{}, Namespaces: map[string]string{}}
	for _, line := range lines("/proc/self/status") {
		key, value, _ := strings.Cut(line, ":")
		r.Status[key] = strings.TrimSpace(value)
	}
	r.Cwd, _ = os.Getwd()
	r.Hostname, _ = os.Hostname()
	r.OOM = strings.Join(lines("/proc/self/oom_score_adj"), "")
	r.Mounts = lines("/proc/self/mountinfo")
	r.Limits = strings.Join(lines("/proc/self/limits"), "\n")
	for _, kind := range []string{"pid", "net", "ipc", "uts", "mnt", "cgroup", "user"} {
		r.Namespaces[kind], _ = os.Readlink("/proc/self/ns/" + kind)
	}
	dev, _ := os.ReadDir("/dev")
	for _, entry := range dev {
		r.Dev = append(r.Dev, entry.Name())
	}
	proc, _ := os.ReadDir("/proc")
	for _, entry := range proc {
		if strings.Trim(entry.Name(), "0123456789") == "" {
			r.PIDs++
		}
	}
	r.Errors = attempts()
	return r
}

// attempts are actions that a container may or may not be able to do.
func attempts() map[string]string {
	write := func(name string) error { return os.WriteFile(name, []byte("x"), 0o644) }
	open := func(name string) error {
		f, err := os.OpenFile(name, os.O_RDWR, 0)
		if err == nil {
			f.Close()
		}
		return err
	}
	out := map[string]string{}
	for name, err := range map[string]error{
		"write /new":             write("/new"),
		"write /tmp/new":         write("/tmp/new"),
		"write /data/new":        write("/data/new"),
		"write /frozen/sub/new":  write("/frozen/sub/new"),
		"write /etc/resolv.conf": write("/etc/resolv.conf"),
		"write sysrq":            write("/proc/sysrq-trigger-not"),
		"write domainname":       write("/proc/sys/kernel/domainname"),
		"read kcore":             readable("/proc/kcore"),
		"read timer_list":        readable("/proc/timer_list"),
		"list /sys/firmware":     listable("/sys/firmware"),
		"open /dev/null":         open("/dev/null"),
		"open /dev/kmsg":         open("/dev/kmsg"),
		"open own node of kmsg":  ownNode(),
		"read group file":        readable("/group-2000"),
		"run from noexec":        run("/scratch/probe"),
		"make a cgroup":          makeCgroup(),
	} {
		out[name] = "ok"
		if err != nil {
			out[name] = err.Error()
		}
	}
	return out
}

// makeCgroup makes a cgroup inside the container's own, on v1 or v2.
func makeCgroup() error {
	dir := "/sys/fs/cgroup"
	if _, err := os.Stat(dir + "/pids"); err == nil {
		dir += "/pids"
	}
	return os.Mkdir(dir+"/new", 0o755)
}

// ownNode makes a device node and opens it, which the device cgroup decides.
func ownNode() error {
	const kmsg = 1<<8 | 11
	if err := syscall.Mknod("/tmp/kmsg", syscall.S_IFCHR|0o666, kmsg); err != nil {
		return err
	}
	f, err := os.Open("/tmp/kmsg")
	if err == nil {
		f.Close()
	}
	return err
}

func readable(name string) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	if n, err := f.Read(make([]byte, 16)); n == 0 {
		return fmt.Errorf("empty: %v", err)
	}
	return nil
}

func listable(name string) error {
	entries, err := os.ReadDir(name)
	if err == nil && len(entries) == 0 {
		err = fmt.Errorf("empty")
	}
	return err
}

func run(name string) error {
	pid, err := syscall.ForkExec(name, []string{name, "unknown"}, &syscall.ProcAttr{})
	if err == nil {
		syscall.Wait4(pid, nil, 0, nil)
	}
	return err
}

func lines(name string) []string {
	data, err := os.ReadFile(name)
	if err != nil {
		return nil
	}
	return strings.Split(strings.TrimRight(string(data), "\n"), "\n")
}
