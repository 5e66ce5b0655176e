package spec

import (
	_ "embed"
	"strings"
	"sync"
)

// syscallList has the names of the system calls of Linux, of all architectures, one a line.
//
//go:embed syscalls.txt
var syscallList string

// isSyscall reports whether Linux has a system call of that name on any architecture.
func isSyscall(name string) bool { return syscalls()[name] }

var syscalls = sync.OnceValue(func() map[string]bool {
	names := map[string]bool{}
	for name := range strings.FieldsSeq(syscallList) {
		names[name] = true
	}
	return names
})
