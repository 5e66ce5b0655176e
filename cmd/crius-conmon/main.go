// Command crius-conmon watches over one container. It is started by crius, not
// by people; package conmon tells what it does. As PID 1 it is the infra
// container of a pod, see pause; there it also forwards ports.
package main

import (
	"syscall"

	"github.com/crius-run/crius/conmon/monitor"
)

func main() {
	if syscall.Getpid() == 1 {
		pause()
	}
	syscall.Exit(monitor.Run())
}
