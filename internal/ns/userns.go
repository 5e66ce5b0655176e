package ns

import (
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/thread"
)

// enterMapped makes a user namespace and, owned by it, the other wanted
// namespaces, and moves the calling thread into the latter.
//
// A process with several threads cannot enter a new user namespace. Therefore a
// child is started in all of them and stopped by ptrace(2) before the first
// instruction of its program: it exists only to have a /proc/PID/ns, and is
// killed on release, or by the kernel if this process dies.
func (s Spec) enterMapped(wanted []kind) (source string, release func(), err error) {
	var flags uintptr
	for _, k := range wanted {
		flags |= uintptr(k.flag)
	}
	child, err := os.StartProcess("/proc/self/exe", []string{"crius-userns"}, &os.ProcAttr{
		Dir: "/",
		Env: []string{},
		Sys: &syscall.SysProcAttr{
			Cloneflags:  flags,
			UidMappings: idMappings(s.UIDs),
			GidMappings: idMappings(s.GIDs),

			GidMappingsEnableSetgroups: true, // containers have supplementary groups
			Ptrace:                     true,
			Pdeathsig:                  unix.SIGKILL,
		},
	})
	if err != nil {
		return "", nil, limit(fmt.Errorf("start a process in a new user namespace (see sysctls user.max_user_namespaces and kernel.yama.ptrace_scope): %w", err))
	}
	release = func() {
		_ = child.Kill()
		_, _ = child.Wait()
	}
	source = fmt.Sprintf("/proc/%d/ns/", child.Pid)
	for _, k := range wanted {
		if k.flag == unix.CLONE_NEWUSER {
			continue
		}
		if err := setns(source+k.proc, k.flag); err != nil {
			release()
			return "", nil, fmt.Errorf("enter %s namespace: %w", k.proc, err)
		}
	}
	return source, release, nil
}

// WithUser calls f with the path of a user namespace that has these mappings of
// users and groups, and that is gone afterwards.
func WithUser(ids []IDMap, f func(path string) error) error {
	user := kinds()[0]
	return thread.Run(func() error {
		source, release, err := Spec{UIDs: ids, GIDs: ids}.enterMapped([]kind{user})
		if err != nil {
			return err
		}
		defer release()
		return f(source + user.proc)
	})
}

func setns(path string, flag int) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.Setns(fd, flag)
}

// becomeMappedRoot gives only the calling thread the host's id of the user
// namespace's root: no other user may write the sysctls of an IPC namespace
// (ipc_permissions in the kernel's ipc/ipc_sysctl.c).
func (s Spec) becomeMappedRoot() error {
	for _, m := range s.UIDs {
		if m.Container != 0 || m.Size == 0 {
			continue
		}
		const keep = ^uintptr(0)
		if _, _, errno := unix.RawSyscall(sysSetresuid, keep, uintptr(m.Host), keep); errno != 0 {
			return fmt.Errorf("become the user namespace's root (%d): %w", m.Host, errno)
		}
		return nil
	}
	return nil // no root: the kernel will report it
}

func idMappings(maps []IDMap) []syscall.SysProcIDMap {
	out := make([]syscall.SysProcIDMap, 0, len(maps))
	for _, m := range maps {
		out = append(out, syscall.SysProcIDMap{ContainerID: int(m.Container), HostID: int(m.Host), Size: int(m.Size)})
	}
	return out
}
