package ns

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/thread"
)

func TestUserNamespace(t *testing.T) {
	t.Parallel()
	s := spec(t)
	s.UIDs = []IDMap{{0, 700000, 65536}}
	s.GIDs = []IDMap{{0, 800000, 65536}}
	s.Sysctls = map[string]string{"net.ipv4.ip_unprivileged_port_start": "0", "kernel.shmmax": "1000000", "fs.mqueue.msg_max": "20", "kernel.domainname": "d"}
	set := create(t, s)
	defer remove(t, s)
	if set.User != filepath.Join(s.Dir, "userns", s.Name) {
		t.Fatalf("set %+v", set)
	}
	inside(t, set, func() error {
		got := []string{sysctl("net/ipv4/ip_unprivileged_port_start"), sysctl("kernel/shmmax"), sysctl("fs/mqueue/msg_max"), sysctl("kernel/domainname")}
		if strings.Join(got, " ") != "0 1000000 20 d" {
			t.Errorf("sysctls %q", got)
		}
		return nil
	})
	// Root of the user namespace has power over the other namespaces, and
	// setgroups is allowed: a container's runtime needs both.
	script := "cat /proc/self/uid_map /proc/self/gid_map /proc/self/setgroups; hostname changed && hostname; ip -o link show lo; ip link add x type veth && ip -o link | wc -l"
	out, err := exec.Command("nsenter", "-S", "0", "-G", "0", "--user="+set.User, "--net="+set.Net, "--ipc="+set.IPC, "--uts="+set.UTS,
		"sh", "-ec", script).CombinedOutput()
	text := strings.Join(strings.Fields(string(out)), " ")
	for _, want := range []string{"0 700000 65536 0 800000 65536 allow changed 1: lo: <LOOPBACK,UP,LOWER_UP>", " 3"} {
		if !strings.Contains(text, want) {
			t.Errorf("%v: %s\nlacks %q", err, text, want)
		}
	}
}

// The values are the pod's groups, as if the pod's own root had written the
// sysctl.
func TestUserNamespaceSysctlOfGroups(t *testing.T) {
	t.Parallel()
	for value, want := range map[string]string{
		"0 2147483647": "800000 865535",
		"0 0":          "800000 800000",
		"100 200":      "800100 800200",
		"1 0":          "1 0",
	} {
		s := spec(t)
		s.UIDs, s.GIDs = []IDMap{{0, 700000, 65536}}, []IDMap{{0, 800000, 65536}}
		s.Sysctls = map[string]string{"net.ipv4.ping_group_range": value}
		set := create(t, s)
		inside(t, set, func() error {
			if got := strings.Join(strings.Fields(sysctl("net/ipv4/ping_group_range")), " "); got != want {
				t.Errorf("%q on the host is %q, want %q", value, got, want)
			}
			return nil
		})
		remove(t, s)
	}
	for _, value := range []string{"65536 65537", "1", "0 0 0", "-1 5", "0 4294967296", "a b"} {
		s := spec(t)
		s.UIDs, s.GIDs = []IDMap{{0, 700000, 65536}}, []IDMap{{0, 800000, 65536}}
		s.Sysctls = map[string]string{"net.ipv4.ping_group_range": value}
		if _, err := Create(s); !errors.Is(err, fault.Invalid) {
			t.Errorf("%q: %v, want fault.Invalid", value, err)
		}
	}
}

func TestUserNamespaceRefused(t *testing.T) {
	t.Parallel()
	s := spec(t)
	s.UIDs = []IDMap{{0, 700000, 10}, {5, 700000, 10}} // overlap
	s.GIDs = s.UIDs
	if _, err := Create(s); err == nil {
		t.Error("overlapping mappings were taken")
	}
}

// User ids have 32 bits on every architecture.
func TestMappedRoot(t *testing.T) {
	t.Parallel()
	const root = 1<<20 + 5
	err := thread.Run(func() error {
		err := Spec{UIDs: []IDMap{{0, root, 65536}}}.becomeMappedRoot()
		status, _ := os.ReadFile("/proc/thread-self/status")
		if want := fmt.Sprintf("\nUid:\t0\t%d\t0\t%[1]d\n", root); !strings.Contains(string(status), want) {
			return fmt.Errorf("%v; status lacks %q:\n%s", err, want, status)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}
