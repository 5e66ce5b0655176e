package ns

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/thread"
)

// setting is a sysctl that has passed all checks.
type setting struct {
	name  string // as requested
	path  string // below /proc/sys
	value string
	flag  int  // its namespace, as a clone flag
	late  bool // it names a network interface that CNI has not made yet
}

const (
	maxValue = 4 << 10 // more than any sysctl accepts
	maxUTS   = 64      // __NEW_UTS_LEN
)

// settings checks the sysctls of s and sorts them by path. Each must belong to
// a namespace that s makes: every other would change the host (CVE-2022-0532).
func (s Spec) settings() ([]setting, error) {
	list := make([]setting, 0, len(s.Sysctls))
	for name, value := range s.Sysctls {
		one, err := s.setting(name, value)
		if err != nil {
			return nil, fmt.Errorf("sysctl %.128q: %w: %w", name, err, fault.Invalid)
		}
		list = append(list, one)
	}
	slices.SortFunc(list, func(a, b setting) int {
		return strings.Compare(a.path+"\x00"+a.name, b.path+"\x00"+b.name)
	})
	return list, nil
}

func (s Spec) setting(name, value string) (setting, error) {
	path, err := sysctlPath(name)
	if err != nil {
		return setting{}, err
	}
	out := setting{name: name, path: path, value: value, flag: namespaceOf(path)}
	switch out.flag {
	case 0:
		return setting{}, errors.New("it is not namespaced and would change the whole node")
	case unix.CLONE_NEWNET:
		if !s.Net {
			return setting{}, errors.New("it needs the pod's own network namespace, not the host's")
		}
		out.late = namesInterface(path)
	case unix.CLONE_NEWIPC:
		if !s.IPC {
			return setting{}, errors.New("it needs the pod's own IPC namespace, not the host's")
		}
	case unix.CLONE_NEWUTS:
		if !s.UTS {
			return setting{}, errors.New("it needs the pod's own UTS namespace, not the host's")
		}
		if err := utsName("value", value); err != nil {
			return setting{}, err
		}
	}
	if value == "" || len(value) > maxValue {
		return setting{}, fmt.Errorf("the value has %d bytes; allowed are 1 to %d", len(value), maxValue)
	}
	if i := strings.IndexFunc(value, unprintable); i >= 0 {
		return setting{}, fmt.Errorf("the value contains %q, which no sysctl accepts", value[i])
	}
	if path == "net/ipv4/ping_group_range" && s.mapped() {
		out.value, err = s.hostGroups(value)
	}
	return out, err
}

// hostGroups translates a range of groups of the pod's user namespace into the
// host's ids: the kernel reads ids as the writer's, and this process is in the
// host's namespace. It drops the part of the range that the namespace does not
// map. A range that ends before it begins is empty, and stays so.
func (s Spec) hostGroups(value string) (string, error) {
	fields := strings.Fields(value)
	if len(fields) != 2 {
		return "", fmt.Errorf("%.128q must be two group ids", value)
	}
	low, err := strconv.ParseUint(fields[0], 10, 32)
	high, err2 := strconv.ParseUint(fields[1], 10, 32)
	if err := errors.Join(err, err2); err != nil {
		return "", fmt.Errorf("%.128q must be two group ids: %w", value, err)
	}
	if low > high {
		return value, nil
	}
	for _, m := range s.GIDs {
		first, size := uint64(m.Container), uint64(m.Size)
		if low >= first && low < first+size {
			return fmt.Sprintf("%d %d", uint64(m.Host)+low-first, uint64(m.Host)+min(high-first, size-1)), nil
		}
	}
	return "", fmt.Errorf("group %d is not mapped in the pod's user namespace", low)
}

// sysctlPath turns a name as in sysctl.d(5) into a path below /proc/sys: the
// first dot or slash is the separator, and the other character stands for
// itself (net.ipv4.conf.eth0/100.forwarding belongs to the interface eth0.100).
// The path cannot lead out of /proc/sys.
func sysctlPath(name string) (string, error) {
	path := name
	if i := strings.IndexAny(name, "./"); i >= 0 && name[i] == '.' {
		path = strings.NewReplacer(".", "/", "/", ".").Replace(name)
	}
	if strings.ContainsFunc(path, unprintable) || strings.ContainsAny(path, " \t") || !fs.ValidPath(path) || path == "." {
		return "", errors.New("not a valid sysctl name")
	}
	return path, nil
}

func unprintable(r rune) bool { return (r < ' ' && r != '\t') || r > '~' }

// namespaceOf returns the type of namespace to which the sysctl at path
// belongs, as a clone flag; 0 if it is the whole node's. Sysctls below net are
// left to the kernel, which shows a network namespace only its own.
func namespaceOf(path string) int {
	switch path {
	case "kernel/hostname", "kernel/domainname":
		return unix.CLONE_NEWUTS
	case "kernel/msgmax", "kernel/msgmnb", "kernel/msgmni", "kernel/msg_next_id", "kernel/auto_msgmni",
		"kernel/shmall", "kernel/shmmax", "kernel/shmmni", "kernel/shm_next_id", "kernel/shm_rmid_forced",
		"kernel/sem", "kernel/sem_next_id":
		return unix.CLONE_NEWIPC
	}
	switch {
	case strings.HasPrefix(path, "fs/mqueue/"):
		return unix.CLONE_NEWIPC
	case strings.HasPrefix(path, "net/"):
		return unix.CLONE_NEWNET
	}
	return 0
}

// namesInterface reports whether path belongs to one network interface
// (net/ipv4/conf/eth0/rp_filter) that does not exist in a new namespace.
func namesInterface(path string) bool {
	e := strings.Split(path, "/")
	if len(e) < 5 || (e[2] != "conf" && e[2] != "neigh") {
		return false
	}
	return e[3] != "all" && e[3] != "default" && e[3] != "lo"
}

// SetNetworkSysctls writes those sysctls of s that belong to its network namespace: call it once the
// network is attached. Those of interfaces (net.ipv4.conf.eth0.rp_filter) can only be set now, and
// plugins may have changed the others: Calico's, for one, sets net.ipv4.ip_forward.
func SetNetworkSysctls(s Spec) error {
	settings, err := s.settings()
	if err != nil {
		return fmt.Errorf("set network sysctls: %w", err)
	}
	settings = slices.DeleteFunc(settings, func(one setting) bool { return one.flag != unix.CLONE_NEWNET })
	if len(settings) == 0 {
		return nil
	}
	slices.SortStableFunc(settings, func(a, b setting) int { // ip_forward changes all interfaces
		switch {
		case a.late == b.late:
			return 0
		case b.late:
			return -1
		}
		return 1
	})
	err = Do(s.path(network()), func() error {
		for _, one := range settings {
			if err := one.write(); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("set network sysctls: %w", err)
	}
	return nil
}

// ResetUTS gives the pinned UTS namespace of s its host name and sysctls once more: criu writes those of a checkpoint
// into it.
func ResetUTS(s Spec) error {
	if !s.UTS {
		return nil
	}
	settings, err := s.settings()
	if err == nil {
		err = thread.Run(func() error { return s.resetUTS(settings) })
	}
	if err != nil {
		return fmt.Errorf("reset UTS namespace: %w", err)
	}
	return nil
}

func (s Spec) resetUTS(settings []setting) error {
	pin, err := os.Open(s.Paths().UTS)
	if err != nil {
		return err
	}
	defer pin.Close()
	if err := unix.Setns(int(pin.Fd()), unix.CLONE_NEWUTS); err != nil {
		return fmt.Errorf("enter %s: %w", pin.Name(), err)
	}
	if s.Hostname != "" {
		if err := unix.Sethostname([]byte(s.Hostname)); err != nil {
			return fmt.Errorf("set host name %q: %w", s.Hostname, err)
		}
	}
	for _, one := range settings {
		if one.flag != unix.CLONE_NEWUTS {
			continue
		}
		if err := one.write(); err != nil {
			return err
		}
	}
	return nil
}

// apply writes the settings, except for the late ones, into the namespaces of
// the calling thread.
func (s Spec) apply(settings []setting) error {
	var ipc []setting
	for _, one := range settings {
		switch {
		case one.late:
			continue
		case one.flag == unix.CLONE_NEWIPC:
			ipc = append(ipc, one)
			continue
		}
		if err := one.write(); err != nil {
			return err
		}
	}
	if len(ipc) > 0 && s.mapped() {
		if err := s.becomeMappedRoot(); err != nil {
			return err
		}
	}
	for _, one := range ipc {
		if err := one.write(); err != nil {
			return err
		}
	}
	return nil
}

func (one setting) write() (err error) {
	switch one.path {
	case "kernel/hostname":
		err = unix.Sethostname([]byte(one.value))
	case "kernel/domainname":
		err = unix.Setdomainname([]byte(one.value))
	default:
		err = writeProc("/proc/sys/"+one.path, one.value)
	}
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENOENT):
		return fmt.Errorf("sysctl %s: this kernel has no such sysctl in the namespaces of a pod; if the node has it, set it there: %w", one.name, fault.Invalid)
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return fmt.Errorf("sysctl %s: this kernel lets nobody change it in the namespaces of a pod, set it on the node: %w: %w", one.name, err, fault.Invalid)
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ERANGE):
		return fmt.Errorf("sysctl %s: the kernel rejects the value %.128q: %w: %w", one.name, one.value, err, fault.Invalid)
	}
	return fmt.Errorf("sysctl %s: %w", one.name, err)
}

// writeProc writes value with a single write, as sysctls require.
func writeProc(path, value string) error {
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	_, err = unix.Write(fd, []byte(value))
	return err
}

// utsName checks a name for sethostname(2) or setdomainname(2).
func utsName(what, name string) error {
	if len(name) > maxUTS {
		return fmt.Errorf("%s %.128q is longer than %d bytes: %w", what, name, maxUTS, fault.Invalid)
	}
	if strings.ContainsFunc(name, unprintable) || strings.ContainsAny(name, " \t") {
		return fmt.Errorf("%s %q has a character that is not allowed in a host name: %w", what, name, fault.Invalid)
	}
	return nil
}
