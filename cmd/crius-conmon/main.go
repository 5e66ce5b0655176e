// Command crius-conmon monitors one container. crius starts it; it is not for use by
// hand. Package conmon documents it. As PID 1 it is the first process of a pod's infra
// container (see pause), where it also forwards ports.
package main

import (
	"syscall"

	"github.com/crius-run/crius/conmon/monitor"
)

func main() {
	syscall.Umask(0o022)
	if syscall.Getpid() == 1 {
		pause()
	}
	syscall.Exit(monitor.Run())
}
