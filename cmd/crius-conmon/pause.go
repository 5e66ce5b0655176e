package main

import (
	"syscall"
	"unsafe"
)

// pause is the other life of this program: as the first process of a PID
// namespace that the containers of a pod share. It does nothing but be there.
// Orphans become its children; with SIGCHLD ignored the kernel buries them by
// itself (wait(2), NOTES), at no cost to anyone.
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
