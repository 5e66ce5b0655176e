package rundir

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

func write(t *testing.T, path string, size int) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, make([]byte, size), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestSize(t *testing.T) {
	t.Parallel()
	const mib = 1 << 20
	dir := t.TempDir()
	write(t, filepath.Join(dir, "a"), mib)
	write(t, filepath.Join(dir, "deep/er/b"), 2*mib)
	write(t, filepath.Join(dir, "other"), 4*mib)
	if err := os.Symlink(filepath.Join(dir, "other"), filepath.Join(dir, "deep/link")); err != nil {
		t.Fatal(err)
	}
	mounted := filepath.Join(dir, "deep/mounted")
	if err := os.Mkdir(mounted, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", mounted, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(mounted, 0); err != nil {
			t.Error(err)
		}
	})
	write(t, filepath.Join(mounted, "c"), mib)
	got := Size(filepath.Join(dir, "a"), filepath.Join(dir, "deep"), filepath.Join(dir, "gone"))
	if got < 3*mib || got > 3*mib+mib/2 {
		t.Errorf("%d bytes, want 3 MiB and a few directories", got)
	}
}
