// Command crius-unpack is the pull worker: it unpacks the layers of one image, confined by
// the server that starts it. It is not for use by hand. Package storage/unpack documents the protocol.
package main

import (
	"fmt"
	"os"
	"syscall"

	"github.com/crius-run/crius/internal/inherit"
	"github.com/crius-run/crius/storage/unpack/wire"
	"github.com/crius-run/crius/storage/unpack/worker"
)

func main() {
	syscall.Umask(inherit.Umask)
	if worker.Main() {
		return
	}
	if len(os.Args) == 2 && os.Args[1] == wire.VersionFlag {
		fmt.Println(wire.Version())
		return
	}
	fmt.Fprintln(os.Stderr, "usage: crius-unpack ["+wire.VersionFlag+"]\n"+
		"Internal helper of crius, which starts it once for each image that is pulled; do not run it by hand")
	os.Exit(2)
}
