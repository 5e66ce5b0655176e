package spec

import (
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
)

func TestValidateSysctls_CVE_2022_0532_CVE_2022_0811(t *testing.T) {
	for _, c := range []struct {
		name, value      string
		hostNet, hostIPC bool
		ok               bool
	}{
		{"net.ipv4.ip_forward", "1", false, false, true},
		{"net.ipv4.ip_forward", "1", false, true, true},
		{"net.ipv4.ip_forward", "1", true, false, false}, // CVE-2022-0532
		{"net/ipv4/conf/eth0.100/forwarding", "1", false, false, true},
		{"net/ipv4/ip_forward", "1", true, false, false},
		{"net.ipv4.ip_local_port_range", "1024 65535", false, false, true},
		{"net.ipv4.tcp_rmem", "4096\t87380\t6291456", false, false, true},
		{"kernel.shm_rmid_forced", "1", false, false, true},
		{"kernel.shmmax", "1", false, true, false}, // CVE-2022-0532
		{"kernel.msgmax", "1", true, false, true},
		{"kernel.msgmax", "1", false, true, false},
		{"kernel.sem", "250 32000 32 128", false, false, true},
		{"kernel.sem", "1", false, true, false},
		{"fs.mqueue.msg_max", "10", false, false, true},
		{"fs.mqueue.msg_max", "10", false, true, false},
		{"kernel.domainname", "x", false, false, true},
		{"kernel.domainname", "x", true, false, false},
		{"kernel.hostname", "x", false, false, false},
		{"kernel.core_pattern", "|/bin/sh", false, false, false},
		{"kernel.semantics", "1", false, false, false},
		{"vm.swappiness", "1", false, false, false},
		{"fs.file-max", "1", false, false, false},
		{"net", "1", false, false, false},
		{"net.", "1", false, false, false},
		{".net.x", "1", false, false, false},
		{"net..x", "1", false, false, false},
		{"net.ipv4/../../kernel/core_pattern", "1", false, false, false},
		{"net.ipv4. ip_forward", "1", false, false, false},
		{"net.x=1\nkernel.core_pattern", "1", false, false, false},
		{"", "1", false, false, false},
		{"net." + strings.Repeat("a", 300), "1", false, false, false},
		{"net.x", "1+kernel.core_pattern=|/evil", false, false, false}, // CVE-2022-0811
		{"net.x", "1=2", false, false, false},
		{"net.x", "1\n2", false, false, false},
		{"net.x", "1\x002", false, false, false},
		{"net.x", "é", false, false, false},
		{"net.x", strings.Repeat("1", 5000), false, false, false},
		{"net.ipv4.ip_local_reserved_ports", "", false, false, true},
	} {
		err := ValidateSysctls(map[string]string{c.name: c.value}, c.hostNet, c.hostIPC)
		if (err == nil) != c.ok || err != nil && !errors.Is(err, fault.Invalid) {
			t.Errorf("%.60q = %.40q (host network %v, IPC %v): %v", c.name, c.value, c.hostNet, c.hostIPC, err)
		}
	}
}

func TestSysctls(t *testing.T) {
	pod := typicalPod()
	pod.Linux.Sysctls = map[string]string{"net.core.somaxconn": "1024"}
	defaults := map[string]string{"net.core.somaxconn": "1", "net.ipv4.ip_unprivileged_port_start": "0", "kernel.shmmni": "5"}
	got, err := Sysctls(defaults, pod)
	want := map[string]string{"net.core.somaxconn": "1024", "net.ipv4.ip_unprivileged_port_start": "0", "kernel.shmmni": "5"}
	if err != nil || !maps.Equal(got, want) {
		t.Errorf("%v, %v", got, err)
	}
	pod.Linux.SecurityContext.NamespaceOptions.Network = cri.NamespaceMode_NODE
	if _, err := Sysctls(defaults, pod); !errors.Is(err, fault.Invalid) {
		t.Errorf("asked for with host network: %v", err)
	}
	pod.Linux.Sysctls = nil
	if got, err = Sysctls(defaults, pod); err != nil || !maps.Equal(got, map[string]string{"kernel.shmmni": "5"}) {
		t.Errorf("defaults with host network: %v, %v", got, err)
	}
	if defaults["net.core.somaxconn"] != "1" || len(defaults) != 3 {
		t.Error("the defaults were changed")
	}
}

func TestUnprivilegedSysctls(t *testing.T) {
	for _, c := range []struct {
		ports, ping bool
		want        string
	}{
		{false, false, "map[]"},
		{true, false, "map[net.ipv4.ip_unprivileged_port_start:0]"},
		{false, true, "map[net.ipv4.ping_group_range:0 2147483647]"},
	} {
		if got := fmt.Sprint(Unprivileged(c.ports, c.ping)); got != c.want {
			t.Errorf("ports %v, ping %v: %s, want %s", c.ports, c.ping, got, c.want)
		}
	}
	pod := typicalPod()
	pod.Linux.Sysctls = map[string]string{"net.ipv4.ip_unprivileged_port_start": "80"}
	got, err := Sysctls(Unprivileged(true, true), pod)
	if want := "map[net.ipv4.ip_unprivileged_port_start:80 net.ipv4.ping_group_range:0 2147483647]"; err != nil || fmt.Sprint(got) != want {
		t.Errorf("%v, %v, want %s", got, err, want)
	}
	pod.Linux.Sysctls = nil
	pod.Linux.SecurityContext.NamespaceOptions.Network = cri.NamespaceMode_NODE
	if got, err := Sysctls(Unprivileged(true, true), pod); err != nil || len(got) != 0 {
		t.Errorf("with host network: %v, %v", got, err)
	}
}

// A default must not keep a pod from running because some kernels refuse its
// groups.
func TestPingGroupsOfUserNamespaces(t *testing.T) {
	for last, want := range map[uint32]int{1<<31 - 1: 1, 1 << 31: 0} {
		pod := typicalPod()
		ids := []*cri.IDMapping{{HostId: last - 65535, Length: 65536}}
		pod.Linux.SecurityContext.NamespaceOptions.UsernsOptions = &cri.UserNamespace{Uids: ids, Gids: ids}
		if got, err := Sysctls(Unprivileged(false, true), pod); err != nil || len(got) != want {
			t.Errorf("groups up to %d: %v, %v", last, got, err)
		}
	}
}

func TestParseSysctls(t *testing.T) {
	got, err := ParseSysctls([]string{"net.ipv4.ping_group_range = 0 2147483647", "kernel.shmmni=1"})
	if err != nil || got["net.ipv4.ping_group_range"] != "0 2147483647" || got["kernel.shmmni"] != "1" {
		t.Errorf("%v, %v", got, err)
	}
	for _, entry := range []string{"", "net.x", "vm.swappiness=1", "net.x=1+2"} {
		if _, err := ParseSysctls([]string{entry}); !errors.Is(err, fault.Invalid) {
			t.Errorf("%q: %v", entry, err)
		}
	}
}

// FuzzSysctls: an accepted sysctl stays below /proc/sys within the pod's
// namespaces, and cannot be read as two settings by a program that joins them.
func FuzzSysctls(f *testing.F) {
	f.Add("net.ipv4.ip_forward", "1", false, false)
	f.Add("kernel.shm/../core_pattern", "|x", false, true)
	f.Add("net.x", "1+kernel.core_pattern=x", true, false)
	f.Fuzz(func(t *testing.T, name, value string, hostNet, hostIPC bool) {
		if err := ValidateSysctls(map[string]string{name: value}, hostNet, hostIPC); err != nil {
			if !errors.Is(err, fault.Invalid) {
				t.Fatal(err)
			}
			return
		}
		path := filepath.Join("/proc/sys", strings.ReplaceAll(name, ".", "/"))
		inNet := strings.HasPrefix(path, "/proc/sys/net/")
		inIPC := strings.HasPrefix(path, "/proc/sys/kernel/shm") || strings.HasPrefix(path, "/proc/sys/kernel/msg") ||
			path == "/proc/sys/kernel/sem" || strings.HasPrefix(path, "/proc/sys/fs/mqueue/")
		inUTS := path == "/proc/sys/kernel/domainname"
		if !inNet && !inIPC && !inUTS || (inNet || inUTS) && hostNet || inIPC && hostIPC {
			t.Fatalf("%q passed (%s)", name, path)
		}
		if strings.ContainsAny(name+value, "+=\n\r\x00") {
			t.Fatalf("%q = %q passed", name, value)
		}
	})
}
