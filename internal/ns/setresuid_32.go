//go:build 386 || arm

package ns

import "golang.org/x/sys/unix"

// The call without a number in its name takes user ids of 16 bits here.
const sysSetresuid = unix.SYS_SETRESUID32
