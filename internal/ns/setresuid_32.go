//go:build 386 || arm

package ns

import "golang.org/x/sys/unix"

// The call without a number in its name takes 16-bit user ids here.
const sysSetresuid = unix.SYS_SETRESUID32
