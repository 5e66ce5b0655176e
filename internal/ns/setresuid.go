//go:build !386 && !arm

package ns

import "golang.org/x/sys/unix"

const sysSetresuid = unix.SYS_SETRESUID
