package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

func exit(args []string) error {
	if len(args) != 1 {
		return errUsage
	}
	code, err := strconv.Atoi(args[0])
	if err != nil {
		return errUsage
	}
	os.Exit(code)
	return nil
}

func sleep(args []string) error {
	if os.Getpid() == 1 {
		go reap()
	}
	if len(args) == 0 {
		for {
			time.Sleep(time.Hour)
		}
	}
	d, err := time.ParseDuration(args[0])
	time.Sleep(d)
	return err
}

// reap reaps orphans, as an init must.
func reap() {
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGCHLD)
	for {
		for {
			if pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); pid <= 0 || err != nil {
				break
			}
		}
		<-c
	}
}

// signals translates names such as TERM, SIGUSR1 and RTMIN+3.
func signals(names []string) ([]os.Signal, error) {
	if len(names) == 0 {
		return nil, errUsage
	}
	var out []os.Signal
	for _, name := range names {
		name = strings.TrimPrefix(name, "SIG")
		if n, ok := strings.CutPrefix(name, "RTMIN+"); ok {
			i, err := strconv.Atoi(n)
			if err != nil {
				return nil, errUsage
			}
			out = append(out, syscall.Signal(34+i))
			continue
		}
		s := unix.SignalNum("SIG" + name)
		if s == 0 {
			return nil, fmt.Errorf("no signal %q", name)
		}
		out = append(out, s)
	}
	return out, nil
}

func signalName(s os.Signal) string {
	if n := s.(syscall.Signal); n >= 34 {
		return fmt.Sprintf("SIGRTMIN+%d", n-34)
	}
	return unix.SignalName(s.(syscall.Signal))
}

func trap(args []string) error {
	wanted, err := signals(args)
	if err != nil {
		return err
	}
	c := make(chan os.Signal, 1)
	signal.Reset(wanted...)
	signal.Notify(c, wanted...)
	fmt.Println("ready")
	fmt.Println(signalName(<-c))
	return nil
}

func ignore(args []string) error {
	unwanted, err := signals(args)
	if err != nil {
		return err
	}
	c := make(chan os.Signal, 8)
	signal.Reset(unwanted...)
	signal.Notify(c, unwanted...)
	go func() {
		for s := range c {
			fmt.Println("ignored", signalName(s))
		}
	}()
	return nil
}

func suicide(args []string) error {
	s, err := signals(args)
	if err != nil {
		return err
	}
	n := s[0].(syscall.Signal)
	signal.Reset(n)
	if err := syscall.Kill(os.Getpid(), n); err != nil {
		return err
	}
	return sleep(nil)
}

func alloc(args []string) error {
	if len(args) != 1 {
		return errUsage
	}
	mib, err := strconv.Atoi(args[0])
	if err != nil {
		return errUsage
	}
	for range mib {
		// Not from the heap, which would be reclaimed some minutes later.
		page, err := unix.Mmap(-1, 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		if err != nil {
			return err
		}
		for i := 0; i < len(page); i += 4096 {
			page[i] = 1
		}
	}
	_, err = fmt.Println("allocated", mib, "MiB")
	return err
}

func burn(args []string) error {
	long := 100 * 365 * 24 * time.Hour
	if len(args) > 0 {
		var err error
		if long, err = time.ParseDuration(args[0]); err != nil {
			return errUsage
		}
	}
	for begun := time.Now(); time.Since(begun) < long; {
	}
	return nil
}

func fork(args []string) error {
	if len(args) < 2 {
		return errUsage
	}
	n, err := strconv.Atoi(args[0])
	if err != nil {
		return errUsage
	}
	for range n {
		if err := child(args[1:]).Start(); err != nil {
			return err
		}
	}
	return nil
}

// orphan starts a child that starts the step and ends at once.
func orphan(args []string) error {
	if len(args) == 0 {
		return errUsage
	}
	return child(append([]string{"fork", "1"}, args...)).Run()
}

// outlive continues when a child has ended, whatever its result.
func outlive(args []string) error {
	if len(args) == 0 {
		return errUsage
	}
	err := child(args).Run()
	if exit := new(exec.ExitError); errors.As(err, &exit) {
		return nil
	}
	return err
}

func child(step []string) *exec.Cmd {
	c := exec.Command("/proc/self/exe", step...)
	c.Stdin, c.Stdout, c.Stderr = os.Stdin, os.Stdout, os.Stderr
	return c
}
