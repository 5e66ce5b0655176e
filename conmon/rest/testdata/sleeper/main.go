// Command sleeper rests whenever it has read all of its standard input, and
// prints at each start: "LIVES VARIABLE ARGUMENT". The number of its lives is
// in the file FILE.
//
//	sleeper FILE ARGUMENT
package main

import (
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"strconv"
	"syscall"

	"github.com/crius-run/crius/conmon/rest"
)

// epoll is open in all lives.
const epoll = 9

var variable, initialized = 0, os.Getpid() // in bss, and in data

func init() { runtime.LockOSThread() }

func main() {
	signal.Ignore(syscall.SIGTERM) // the first time by Go, later also by inheritance
	text, err := os.ReadFile(os.Args[1])
	lives, _ := strconv.Atoi(string(text))
	if err != nil {
		must(begin())
	}
	if ended() {
		return
	}
	lives++
	variable++
	must(os.WriteFile(os.Args[1], []byte(strconv.Itoa(lives)), 0o600))
	fmt.Println(lives, variable, os.Args[2])
	busy()
	if initialized == os.Getpid() {
		must(rest.Until(epoll))
	}
}

// ended reads all available input, and reports whether it has ended.
func ended() bool {
	var input [64]byte
	for {
		n, err := syscall.Read(0, input[:])
		if err != nil {
			return false
		}
		if n == 0 {
			return true
		}
	}
}

func begin() error {
	fd, err := syscall.EpollCreate1(0)
	if err != nil {
		return err
	}
	if err := syscall.Dup3(fd, epoll, 0); err != nil {
		return err
	}
	if err := syscall.SetNonblock(0, true); err != nil {
		return err
	}
	const edge = 1 << 31
	return syscall.EpollCtl(epoll, syscall.EPOLL_CTL_ADD, 0, &syscall.EpollEvent{Events: syscall.EPOLLIN | edge})
}

// busy leaves threads, memory and garbage behind.
func busy() {
	done := make(chan []byte)
	for range 20 {
		go func() {
			runtime.LockOSThread() // so that the thread ends with the goroutine, or is new
			_ = syscall.Nanosleep(&syscall.Timespec{Nsec: 1000}, nil)
			done <- make([]byte, 1<<20)
		}()
	}
	for range 20 {
		clear(<-done)
	}
	runtime.GC()
	for range 4 {
		go func() { select {} }()
	}
}

func must(err error) {
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}
