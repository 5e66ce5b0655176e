package files

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
)

// Who asks for a log is to blame for its path, and not for the disk.
func TestLogDirectoryThatCannotBeMade(t *testing.T) {
	t.Parallel()
	all := t.TempDir()
	if err := unix.Mount("tmpfs", all, "tmpfs", 0, "nr_inodes=4,mode=755"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(all, unix.MNT_DETACH) })
	own := filepath.Join(all, "pod")
	if err := errors.Join(os.Mkdir(own, 0o755), os.Symlink("/tmp", filepath.Join(own, "link"))); err != nil {
		t.Fatal(err)
	}
	if err := MakeLogDir(own, "link/c/0.log"); !errors.Is(err, fault.Invalid) {
		t.Errorf("a link that leads out: %v", err)
	}
	for i := 0; ; i++ {
		if err := os.WriteFile(filepath.Join(own, fmt.Sprint(i)), nil, 0o600); err != nil {
			break
		}
	}
	if err := MakeLogDir(own, "0/0.log"); !errors.Is(err, fault.Invalid) {
		t.Errorf("a file is in the way: %v", err)
	}
	if err := MakeLogDir(own, "c/0.log"); !errors.Is(err, unix.ENOSPC) || errors.Is(err, fault.Invalid) {
		t.Errorf("a full disk: %v", err)
	}
	if err := unix.Mount("", all, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	if err := MakeLogDir(own, "c/0.log"); !errors.Is(err, unix.EROFS) || errors.Is(err, fault.Invalid) {
		t.Errorf("a read-only disk: %v", err)
	}
}
