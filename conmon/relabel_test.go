package conmon_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/mount"
)

const (
	label      = "system_u:object_r:container_file_t:s0:c1,c2"
	otherLabel = "system_u:object_r:etc_t:s0"
)

// labelOf returns the SELinux context of a file, or of a link itself.
func labelOf(t *testing.T, path string) string {
	t.Helper()
	var buf [256]byte
	n, err := unix.Lgetxattr(path, "security.selinux", buf[:])
	if errors.Is(err, unix.ENODATA) {
		return ""
	}
	if err != nil {
		t.Fatalf("label of %s: %v", path, err)
	}
	return strings.TrimRight(string(buf[:n]), "\x00")
}

func setLabel(t *testing.T, path, label string) {
	t.Helper()
	if err := unix.Lsetxattr(path, "security.selinux", []byte(label), 0); err != nil {
		t.Fatal(err)
	}
}

// volume makes a tree with all kinds of files, and a file outside to which a
// link leads.
func volume(t *testing.T) (dir, outside string) {
	t.Helper()
	dir, outside = filepath.Join(t.TempDir(), "volume"), filepath.Join(t.TempDir(), "outside")
	err := errors.Join(
		os.MkdirAll(filepath.Join(dir, "a/b"), 0o700), os.WriteFile(filepath.Join(dir, "a/b/file"), nil, 0),
		os.WriteFile(outside, nil, 0o600), os.Symlink(outside, filepath.Join(dir, "a/link")),
		os.Symlink(filepath.Dir(outside), filepath.Join(dir, "up")), unix.Mkfifo(filepath.Join(dir, "fifo"), 0o600),
	)
	if err != nil {
		t.Fatal(err)
	}
	setLabel(t, outside, otherLabel)
	setLabel(t, filepath.Dir(outside), otherLabel)
	return dir, outside
}

// A volume gets the label with everything in it, but not the targets of links
// in it, and no named pipe blocks the relabelling.
func TestRelabel(t *testing.T) {
	t.Parallel()
	dir, outside := volume(t)
	by := filepath.Join(t.TempDir(), "by")
	if err := os.Symlink(dir, by); err != nil { // a link on the way is the kubelet's
		t.Fatal(err)
	}
	if err := hostPaths(monitorPath).Relabel(t.Context(), label, []string{by}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"", "a", "a/b", "a/b/file", "a/link", "fifo", "up"} {
		if got := labelOf(t, filepath.Join(dir, name)); got != label {
			t.Errorf("%s has label %q", name, got)
		}
	}
	if got := []string{labelOf(t, outside), labelOf(t, filepath.Dir(outside))}; got[0] != otherLabel || got[1] != otherLabel {
		t.Errorf("outside the volume: %q", got)
	}
}

// A volume whose directory has the label has been relabelled completely.
func TestRelabelOnce(t *testing.T) {
	t.Parallel()
	dir, _ := volume(t)
	setLabel(t, filepath.Join(dir, "a"), label) // not the top: that run did not finish
	if err := hostPaths(monitorPath).Relabel(t.Context(), label, []string{dir}); err != nil {
		t.Fatal(err)
	}
	if got := labelOf(t, filepath.Join(dir, "a/b/file")); got != label {
		t.Errorf("after a run that had been interrupted the file has label %q", got)
	}
	setLabel(t, filepath.Join(dir, "a/b/file"), otherLabel)
	if err := hostPaths(monitorPath).Relabel(t.Context(), label, []string{dir}); err != nil {
		t.Fatal(err)
	}
	if got := labelOf(t, filepath.Join(dir, "a/b/file")); got != otherLabel {
		t.Errorf("a volume that had been relabelled was read again: %q", got)
	}
}

// The container also has what is mounted in a volume. If some of that cannot be
// relabelled the rest still is.
func TestRelabelWhatIsMounted(t *testing.T) {
	t.Parallel()
	dir, _ := volume(t)
	points := []string{filepath.Join(dir, "a/mounted"), filepath.Join(dir, "a/read-only")}
	for _, point := range points {
		if err := mount.Files(point, ""); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := mount.Unmount(point); err != nil {
				t.Error(err)
			}
		})
		setLabel(t, point, otherLabel)
	}
	if err := unix.Mount("", points[1], "", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	if err := hostPaths(monitorPath).Relabel(t.Context(), label, []string{dir}); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{points[0]: label, points[1]: otherLabel, dir: label} {
		if got := labelOf(t, path); got != want {
			t.Errorf("%s has label %q, want %q", path, got, want)
		}
	}
}

// System directories are refused, by whatever name, a file system without
// labels is left unchanged, and a missing path is named.
func TestRelabelRefuses_CVE_2021_43816(t *testing.T) {
	t.Parallel()
	by := filepath.Join(t.TempDir(), "by")
	if err := os.Symlink("/usr/lib", by); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"/", "/etc", "/etc/passwd", "/usr/../usr/bin", "/var/lib", "/var/log/", "/proc/self/root", by} {
		err := hostPaths(monitorPath).Relabel(t.Context(), label, []string{path})
		if !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v", path, err)
		}
	}
	absent := filepath.Join(t.TempDir(), "absent")
	if err := hostPaths(monitorPath).Relabel(t.Context(), label, []string{absent}); !errors.Is(err, syscall.ENOENT) || !strings.Contains(err.Error(), absent) {
		t.Errorf("a path that is not there: %v", err)
	}
}

// The depth of a volume is bounded.
func TestRelabelIsBounded(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	at, err := unix.Open(dir, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	for range 600 {
		if err := unix.Mkdirat(at, "deep", 0o700); err != nil {
			t.Fatal(err)
		}
		below, err := unix.Openat(at, "deep", unix.O_PATH|unix.O_CLOEXEC, 0)
		if err := errors.Join(err, unix.Close(at)); err != nil {
			t.Fatal(err)
		}
		at = below
	}
	unix.Close(at)
	if err := hostPaths(monitorPath).Relabel(t.Context(), label, []string{dir}); !errors.Is(err, syscall.ENAMETOOLONG) {
		t.Errorf("600 directories deep: %v", err)
	}
	if got := labelOf(t, dir); got != "" {
		t.Errorf("a volume that has not been relabelled to the end has label %q", got)
	}
}
