package rest

import "syscall"

const supported = true

//nolint:unused // they are, by the assembly
const (
	sysFstat      = 5
	sysMmap       = 9
	sysMunmap     = 11
	sysNanosleep  = 35
	sysClone      = 56
	sysExit       = 60
	sysKill       = 62
	sysEpollPwait = 281
)

// What the start of the Go runtime requests: threads with these flags, and less
// memory than this.
//
//nolint:unused // they are, by the assembly
const (
	threadFlags = syscall.CLONE_VM | syscall.CLONE_FS | syscall.CLONE_FILES | syscall.CLONE_SIGHAND | syscall.CLONE_SYSVSEM | syscall.CLONE_THREAD
	memory      = 72 << 20
	mapFlags    = syscall.MAP_ANON | syscall.MAP_PRIVATE
	mapAccess   = syscall.PROT_READ | syscall.PROT_WRITE
)

// enter carries out the plan, waits, and jumps to the program's entry point.
//
//go:noescape
func enter(p *plan)
