// Command probe runs in the containers of the tests.
package main

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"
)

func main() {
	verbs := map[string]func(args []string){
		"exit":     exit,     // CODE MICROSECONDS
		"sleep":    sleep,    //
		"echo":     echo,     // WORDS...
		"number":   number,   // LINES STDERR-EVERY [stay]: numbered lines; stays until its input ends
		"bytes":    bytes,    // SIZE: no newline
		"copy":     copyIn,   // stdin to stdout
		"tty":      tty,      // reports what its terminal is, then echoes lines
		"fds":      fds,      // lists open descriptors
		"eat":      eat,      // MIBIBYTES of memory
		"feed":     feed,     // the same in a child
		"orphan":   orphan,   // ends with its input, outlived by a child that writes later
		"brood":    brood,    // KINDS...: starts children of these kinds, then ends with its input
		"deaf":     deaf,     // ignores signals
		"daemon":   daemon,   // leaves a deaf child in its own session
		"headless": headless, // ends its main thread, and ignores signals in others
		"bomb":     bomb,     // starts itself again and again
		"stat":     stat,     // FILE: in a child
		"litter":   litter,   // COUNT: leaves that many orphans, then sleeps
		"trap":     trap,     // exits with 42 on SIGTERM
		"tick":     tick,     // MILLISECONDS: a numbered line that often
		"prompt":   prompt,   // asks, without ending the line, until its input ends
		"flood":    flood,    // SIZE TOTAL: lines of one size
		"burst":    burst,    // TOTAL: writes that much when its input ends, then sleeps
		"letgo":    letgo,    // closes its terminal, opens it again on SIGUSR1
	}
	if len(os.Args) < 2 || verbs[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "usage: probe VERB ...")
		os.Exit(64)
	}
	verbs[os.Args[1]](os.Args[2:])
}

func arg(args []string, i int) int {
	n, err := strconv.Atoi(args[i])
	must(err)
	return n
}

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "probe:", err)
		os.Exit(70)
	}
}

func exit(args []string) {
	time.Sleep(time.Duration(arg(args, 1)) * time.Microsecond)
	os.Exit(arg(args, 0))
}

func sleep([]string) {
	for {
		time.Sleep(time.Hour)
	}
}

func echo(args []string) { fmt.Println(strings.Join(args, " ")) }

func number(args []string) {
	lines, every := arg(args, 0), arg(args, 1)
	out, diag := bufio.NewWriterSize(os.Stdout, 8<<10), bufio.NewWriterSize(os.Stderr, 8<<10)
	for i := range lines {
		w := out
		if every > 0 && i%every == 0 {
			w = diag
		}
		// Lengths from nothing to beyond a record.
		fill := strings.Repeat("x", (i%97)*(i%97)%97)
		if i%1000 == 999 {
			fill = strings.Repeat("y", 40_000+i%7)
		}
		fmt.Fprintf(w, "%d:%s\n", i, fill)
	}
	must(out.Flush())
	must(diag.Flush())
	if len(args) > 2 {
		_, err := io.ReadAll(os.Stdin)
		must(err)
	}
}

func bytes(args []string) {
	text := strings.Repeat("0123456789abcde\x00", 1+arg(args, 0)/16)[:arg(args, 0)]
	_, err := io.WriteString(os.Stdout, text)
	must(err)
}

func copyIn([]string) {
	_, err := io.Copy(os.Stdout, os.Stdin)
	must(err)
	fmt.Println("end of input")
}

func tty([]string) {
	size := func() (width, height uint16) {
		var s [4]uint16
		_, _, errno := syscall.Syscall(syscall.SYS_IOCTL, 0, syscall.TIOCGWINSZ, uintptr(unsafe.Pointer(&s)))
		if errno != 0 {
			must(errno)
		}
		return s[1], s[0]
	}
	changed := make(chan os.Signal, 1)
	signal.Notify(changed, syscall.SIGWINCH)
	target, _ := os.Readlink("/proc/self/fd/0")
	fmt.Println("terminal", filepath.Dir(target))
	<-changed
	w, h := size()
	fmt.Println("size", w, h)
}

func fds([]string) {
	entries, err := os.ReadDir("/proc/self/fd")
	must(err)
	for _, e := range entries {
		target, err := os.Readlink("/proc/self/fd/" + e.Name())
		if err == nil && !strings.HasPrefix(target, "/proc/") && !strings.HasPrefix(target, "anon_inode:") {
			fmt.Println("fd", e.Name(), target)
		}
	}
	fmt.Println("done")
}

func eat(args []string) {
	var kept [][]byte
	for range arg(args, 0) {
		b := make([]byte, 1<<20)
		for i := 0; i < len(b); i += 4096 {
			b[i] = 1
		}
		kept = append(kept, b)
	}
	fmt.Println("full", len(kept))
}

func feed(args []string) {
	err := exec.Command("/proc/self/exe", "eat", args[0]).Run()
	fmt.Println("child:", err)
}

func start(args ...string) *exec.Cmd {
	c := exec.Command("/proc/self/exe", args...)
	c.Stdout, c.Stderr = os.Stdout, os.Stderr
	must(c.Start())
	return c
}

func orphan(args []string) {
	if len(args) > 0 { // the child, which writes when it is told to
		told := make(chan os.Signal, 1)
		signal.Notify(told, syscall.SIGUSR1)
		must(os.NewFile(3, "deaf").Close())
		<-told
		fmt.Println("late words")
		return
	}
	deaf, childs, err := os.Pipe()
	must(err)
	c := exec.Command("/proc/self/exe", "orphan", "child")
	c.Stdout, c.Stderr, c.ExtraFiles = os.Stdout, os.Stderr, []*os.File{childs}
	must(c.Start())
	must(childs.Close())
	_, _ = deaf.Read(make([]byte, 1)) // until the child ignores signals
	fmt.Println("early words")
	_, _ = io.ReadAll(os.Stdin)
	os.Exit(7)
}

func brood(kinds []string) {
	for _, kind := range kinds {
		start(strings.Split(kind, ",")...)
	}
	fmt.Println("brooding")
	_, _ = io.ReadAll(os.Stdin)
	os.Exit(7)
}

func deaf([]string) {
	signal.Ignore(syscall.SIGTERM, syscall.SIGHUP, syscall.SIGINT)
	fmt.Println("deaf")
	sleep(nil)
}

func daemon([]string) {
	c := exec.Command("/proc/self/exe", "deaf")
	c.Stdout, c.Stderr, c.SysProcAttr = os.Stdout, os.Stderr, &syscall.SysProcAttr{Setsid: true}
	must(c.Start())
}

// Only the main thread can end itself, and only in init is the program certain
// to run on it.
func init() { //nolint:gochecknoinits // see above
	if len(os.Args) > 1 && os.Args[1] == "headless" {
		runtime.LockOSThread()
	}
}

func headless([]string) {
	signal.Ignore(syscall.SIGTERM, syscall.SIGHUP, syscall.SIGINT)
	up := make(chan struct{})
	go func() {
		runtime.LockOSThread()
		close(up)
		sleep(nil)
	}()
	<-up
	_, _, _ = syscall.Syscall(syscall.SYS_EXIT, 0, 0, 0)
}

func bomb([]string) {
	for {
		c := exec.Command("/proc/self/exe", "bomb")
		if c.Start() != nil {
			time.Sleep(time.Millisecond)
		}
	}
}

func stat(args []string) {
	_, err := os.Stat(args[0])
	must(err)
}

func litter(args []string) {
	switch {
	case len(args) > 1: // grandchild
		return
	case args[0] == "0": // child: its own child outlives it
		start("litter", "0", "grandchild")
		return
	}
	for range arg(args, 0) {
		must(start("litter", "0").Wait())
	}
	fmt.Println("littered")
	sleep(nil)
}

func trap([]string) {
	caught := make(chan os.Signal, 1)
	signal.Notify(caught, syscall.SIGTERM)
	fmt.Println("armed")
	<-caught
	os.Exit(42)
}

func tick(args []string) {
	for i := 0; ; i++ {
		fmt.Println("tick", i)
		time.Sleep(time.Duration(arg(args, 0)) * time.Millisecond)
	}
}

func letgo([]string) {
	again := make(chan os.Signal, 1)
	signal.Notify(again, syscall.SIGUSR1)
	name, err := os.Readlink("/proc/self/fd/1")
	must(err)
	fmt.Println("before")
	for fd := range 3 {
		must(syscall.Close(fd))
	}
	<-again
	terminal, err := os.OpenFile(name, os.O_RDWR, 0)
	must(err)
	fmt.Fprintln(terminal, "after")
	sleep(nil)
}

func prompt([]string) {
	fmt.Print("password: ")
	_, err := io.ReadAll(os.Stdin)
	must(err)
	fmt.Println("none")
}

func flood(args []string) {
	line := strings.Repeat("l", arg(args, 0)-1) + "\n"
	block := []byte(strings.Repeat(line, 1+(64<<10)/len(line)))
	for left := arg(args, 1); left > 0; left -= len(block) {
		_, err := os.Stdout.Write(block[:min(left, len(block))])
		must(err)
	}
}

func burst(args []string) {
	_, err := io.ReadAll(os.Stdin)
	must(err)
	flood([]string{"1000", args[0]})
	fmt.Println("end of burst")
	sleep(nil)
}
