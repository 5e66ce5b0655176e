// Failing stands in for a CNI plugin or an OCI runtime and misbehaves on
// demand. It is installed under the name of the program that it replaces, with
// the real program beside it as "real" and a directory "faults": the file
// faults/VERB, if it exists, says what to do at that verb:
//
//	fail TEXT      refuse with this text, without having done anything
//	after TEXT     do the work, then refuse with this text
//	hang           never return, not even on SIGTERM
//	hangafter      do the work, then never return
//	slow DURATION  wait, then do the work
//	wait           wait until the file is gone, then do the work
//	garbage        print what no parser accepts and report success
//	die            end by SIGKILL
//	dieafter       do the work, then end by SIGKILL
//	cut DURATION   begin the work, then end it and itself by SIGKILL
//
// With "once" before the words the file is removed first; with "at N" only the
// Nth call after the file was written misbehaves. The verb is CNI_COMMAND, or
// the subcommand of the runtime's command line. Each call adds a line "VERB ID
// outcome" to the file journal.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"
)

func main() {
	exe, err := os.Executable()
	if err != nil {
		panic(err)
	}
	p := program{dir: filepath.Dir(exe), args: os.Args[1:]}
	p.verb, p.id = p.subject()
	os.Exit(p.run())
}

type program struct {
	dir, verb, id string
	args          []string
	silent        bool // the real program's output is not shown
}

// subject returns the verb and the object of this call.
func (p program) subject() (verb, id string) {
	if command := os.Getenv("CNI_COMMAND"); command != "" {
		return command, os.Getenv("CNI_CONTAINERID")
	}
	if slices.Contains(p.args, "--help") { // whether the runtime has a verb
		return "help", ""
	}
	verbs := []string{
		"create", "start", "state", "kill", "delete", "exec", "update", "features", "ps", "pause", "resume", "events", "run",
		"checkpoint", "restore",
	}
	for i, arg := range p.args {
		if slices.Contains(verbs, arg) {
			for _, later := range p.args[i:] {
				if len(later) == 64 {
					id = later
				}
			}
			return arg, id
		}
	}
	return "other", ""
}

func (p program) run() int {
	action, rest := p.fault()
	switch action {
	case "fail":
		return p.refuse(rest)
	case "after":
		p.silent = true
		p.work()
		return p.refuse(rest)
	case "hang":
		p.hang()
	case "hangafter":
		p.work()
		p.hang()
	case "slow":
		d, err := time.ParseDuration(rest)
		if err != nil {
			return p.refuse(err.Error())
		}
		time.Sleep(d)
	case "wait":
		p.wait()
	case "garbage":
		p.note("garbage")
		fmt.Print("\x00\xff{]garbage\n")
		return 0
	case "die":
		p.die()
	case "dieafter":
		p.work()
		p.die()
	case "cut":
		d, err := time.ParseDuration(rest)
		if err != nil {
			return p.refuse(err.Error())
		}
		time.AfterFunc(d, p.die)
		p.work() // which ends earlier, too
		p.die()
	}
	return p.work()
}

func (p program) fault() (action, rest string) {
	file := filepath.Join(p.dir, "faults", p.verb)
	data, err := os.ReadFile(file)
	if err != nil {
		return "", ""
	}
	words, once := strings.CutPrefix(strings.TrimSpace(string(data)), "once ")
	if once {
		_ = os.Remove(file)
	}
	if at, later := strings.CutPrefix(words, "at "); later {
		number, rest, _ := strings.Cut(at, " ")
		if words = rest; !p.isCall(number, file+".calls") {
			return "", ""
		}
	}
	action, rest, _ = strings.Cut(words, " ")
	return action, rest
}

// isCall counts this call, one byte each, and reports whether it is the one.
func (p program) isCall(number, counter string) bool {
	f, err := os.OpenFile(counter, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return false
	}
	defer f.Close()
	if _, err := f.Write([]byte{'.'}); err != nil {
		return false
	}
	info, err := f.Stat()
	return err == nil && fmt.Sprint(info.Size()) == number
}

// refuse reports an error as the replaced program does.
func (p program) refuse(text string) int {
	p.note("refused")
	if os.Getenv("CNI_COMMAND") != "" {
		_ = json.NewEncoder(os.Stdout).Encode(map[string]any{"cniVersion": "1.0.0", "code": 100, "msg": text})
		return 1
	}
	fmt.Fprintln(os.Stderr, text)
	return 1
}

func (p program) die() {
	p.note("died")
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
}

func (p program) hang() {
	p.note("hangs")
	signal.Ignore(syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	for {
		time.Sleep(time.Hour)
	}
}

// wait returns when somebody has removed the file that said so.
func (p program) wait() {
	p.note("waits")
	for {
		if _, err := os.Stat(filepath.Join(p.dir, "faults", p.verb)); os.IsNotExist(err) {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// work runs the real program with everything that this one was given.
func (p program) work() int {
	cmd := exec.Command(filepath.Join(p.dir, "real"), p.args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	if p.silent {
		cmd.Stdout, cmd.Stderr = nil, nil
	}
	cmd.ExtraFiles = inherited()
	// It must not outlive this process, which may be killed.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	runtime.LockOSThread()
	err := cmd.Run()
	if err != nil {
		p.note("failed")
		return max(1, cmd.ProcessState.ExitCode())
	}
	p.note("done")
	return 0
}

// inherited returns the descriptors from 3 on, because runtimes may be given
// some.
func inherited() []*os.File {
	var out []*os.File
	for fd := 3; fd < 3+16; fd++ {
		flags, _, errno := syscall.Syscall(syscall.SYS_FCNTL, uintptr(fd), syscall.F_GETFD, 0)
		if errno != 0 || flags&syscall.FD_CLOEXEC != 0 {
			break
		}
		out = append(out, os.NewFile(uintptr(fd), "inherited"))
	}
	return out
}

func (p program) note(outcome string) {
	f, err := os.OpenFile(filepath.Join(p.dir, "journal"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return
	}
	defer f.Close()
	fmt.Fprintln(f, p.verb, p.id, outcome)
}
