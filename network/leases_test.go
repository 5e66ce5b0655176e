package network

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// A power cut leaves leases without content: host-local does not sync them. No
// DEL would ever find them, so that the pool would run dry (as in cri-o#4727
// and plugins#561, where leases stayed after reboots).
func TestLeasesAfterPowerCut(t *testing.T) {
	n := newNode(t, map[string]string{"10-pods.conflist": ptpConf(range4)})
	live := n.pod()
	a := n.attach(live)
	if len(n.leased()) != 1 {
		t.Fatalf("one pod has the leases %q", n.leased())
	}
	dir := filepath.Join(n.leases, "pods")
	for name, content := range map[string]string{
		"10.7.0.77": "", "fd00:7::77": "", "fd00_7__78": "", "10.7.0.78": "\x00\x00\x00\x00", "10.7.0.79": "other\r\neth0", "unknown": "",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want := slices.Sorted(slices.Values([]string{a.IPs[0], "10.7.0.79", "unknown"}))

	lock, err := os.Open(filepath.Join(dir, "lock"))
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	if err := n.do(func() error { return n.Restore(t.Context(), nil) }); err != nil {
		t.Fatal(err)
	}
	if got := n.leased(); len(got) != 7 {
		t.Errorf("while a plugin is at work these leases stay: %q", got)
	}
	lock.Close()
	if err := n.do(func() error { return n.Restore(t.Context(), nil) }); err != nil {
		t.Fatal(err)
	}
	if got := slices.Sorted(slices.Values(n.leased())); !slices.Equal(got, want) {
		t.Errorf("leases after the restart are %q, want %q", got, want)
	}
	n.detach(live, a)
}

// A lease has an owner or is lost, whatever a power cut has left in its file,
// and other files beside the leases do not count.
func FuzzLease(f *testing.F) {
	f.Add("10.7.0.2", []byte("owner\r\neth0"))
	f.Add("fd00_7__2", []byte("owner\n"))
	f.Add("10.7.0.3", []byte("\x00\x00\x00"))
	f.Add("last_reserved_ip.0", []byte("10.7.0.2"))
	f.Add("lock", []byte(" \n\x00 eth0"))
	f.Fuzz(func(t *testing.T, name string, text []byte) {
		if name == "" || name == "." || name == ".." || strings.ContainsAny(name, "/\x00") || len(name) > 255 {
			return
		}
		dir := t.TempDir()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		owner, link, err := readLease(path)
		if err != nil || strings.ContainsAny(owner, "\n") || strings.TrimSpace(owner) != owner || strings.TrimSpace(link) != link {
			t.Errorf("%q: owner %q, interface %q, %v", text, owner, link, err)
		}
		if strings.Trim(string(text), "\x00\r\n ") == "" && owner+link != "" {
			t.Errorf("%q: owner %q, interface %q", text, owner, link)
		}
		lost, err := lostLeases(dir)
		if want := leaseAddress(name) != "" && owner == ""; err != nil || (len(lost) == 1) != want {
			t.Errorf("%s with %q: lost are %q, %v", name, text, lost, err)
		}
	})
}
