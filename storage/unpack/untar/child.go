// Package untar unpacks one layer, in the process that containers/storage starts for it with the
// layer's directory as its root. It takes the place of the unpacker of containers/storage, which
// would let links and extended attributes of the layer do more than an image needs.
package untar

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"go.podman.io/storage/pkg/archive"
	"go.podman.io/storage/pkg/unshare"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/storage/unpack/headers"
)

// What the package chrootarchive of containers/storage gives the process in which it unpacks a
// layer.
const (
	childName  = "storage-untar" // argument 0; argument 1 is the directory in the new root
	optionsFD  = 3               // archive.TarOptions as JSON
	rootFD     = 4               // directory, the new root
	statusFull = 2               // exit code when the disk is full
)

// Child unpacks a layer, in place of containers/storage, and ends the process, if
// containers/storage has started the process for that. Otherwise it returns false. Call it before
// reexec.Init.
//
// The layer comes from standard input. Extended attributes that Unwanted reports are left out.
// containers/storage has recorded them before, so it can still rebuild the layer bit by bit.
func Child() bool {
	if os.Args[0] != childName {
		return false
	}
	runtime.LockOSThread()
	if err := unpackChild(); errors.Is(err, unix.ENOSPC) {
		os.Exit(statusFull)
	} else if err != nil {
		fmt.Fprint(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
	return true
}

func unpackChild() error {
	var options archive.TarOptions
	if err := json.NewDecoder(os.NewFile(optionsFD, "options")).Decode(&options); err != nil {
		return err
	}
	if len(os.Args) < 2 {
		return errors.New("no directory to unpack into")
	}
	_ = unshare.IsRootless() // reads /proc, and caches the answer
	if err := os.NewSyscallError("fchdir", unix.Fchdir(rootFD)); err != nil {
		return err
	}
	if err := unix.Chroot("."); err != nil {
		return os.NewSyscallError("chroot", err)
	}
	if err := unix.Close(rootFD); err != nil {
		return os.NewSyscallError("close", err)
	}
	above := parents{root: filepath.Clean(os.Args[1])}
	layer := headers.NewReader(bufio.NewReaderSize(os.Stdin, 64<<10), above.check, Unwanted)
	if err := archive.Unpack(layer, os.Args[1], &options); err != nil {
		return err
	}
	_, err := io.Copy(io.Discard, layer) // the padding, which containers/storage records
	return err
}

// Unwanted reports whether an entry of a layer, of type kind, must not get the extended attribute.
// With trusted.* overlayfs makes a directory show another, or a file the content of another,
// anywhere in the layers. The kernel accepts user.* only for files and directories. A hard link may
// lead to something else, and a file to which it leads has attributes of its own.
func Unwanted(kind byte, name string) bool {
	const link, last, directory = '1', '6', '5' // links, devices and pipes
	if strings.HasPrefix(name, "user.") && kind >= link && kind <= last && kind != directory {
		return true
	}
	return strings.HasPrefix(name, "trusted.")
}
