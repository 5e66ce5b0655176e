package main

import (
	"syscall"
	"unsafe"
)

// pause is the program's second mode: the first process of a PID namespace that the
// containers of a pod share. It only exists. Orphans become its children; since SIGCHLD is
// ignored, the kernel reaps them itself (wait(2), NOTES).
func pause() {
	const ignore = 1             // SIG_IGN
	action := [5]uintptr{ignore} // handler, flags, restorer, and a mask of 64 bits
	_, _, errno := syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, uintptr(syscall.SIGCHLD),
		uintptr(unsafe.Pointer(&action)), 0, 8, 0, 0)
	if errno != 0 {
		syscall.Exit(1)
	}
	for {
		_ = syscall.Pause()
	}
}
