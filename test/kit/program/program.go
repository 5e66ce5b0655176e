// Package program writes programs that can be run at once.
package program

import (
	"os"
	"syscall"
)

// Write writes an executable file while no other goroutine forks: a child would
// hold the file open for writing until its execve, and meanwhile the file could
// not be executed (ETXTBSY).
func Write(file string, content []byte) error {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	return os.WriteFile(file, content, 0o755)
}
