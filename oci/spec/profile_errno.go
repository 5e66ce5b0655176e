package spec

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// nameErrnos sets the error numbers that the profile has by name, as those of containers/common do.
func (p *Profile) nameErrnos() error {
	if err := takeErrno(&p.DefaultErrnoRet, p.DefaultErrno); err != nil {
		return fmt.Errorf("defaultErrno: %w", err)
	}
	for i := range p.Syscalls {
		if err := takeErrno(&p.Syscalls[i].ErrnoRet, p.Syscalls[i].Errno); err != nil {
			return fmt.Errorf("rule %d: errno: %w", i, err)
		}
	}
	return nil
}

func takeErrno(number **uint, name string) error {
	if name == "" {
		return nil
	}
	for n := range uint(maxErrno) {
		if unix.ErrnoName(unix.Errno(n)) != name {
			continue
		}
		if *number != nil && **number != n {
			return fmt.Errorf("%s is %d, and the number beside it is %d", name, n, **number)
		}
		*number = &n
		return nil
	}
	return fmt.Errorf("%.40q is unknown", name)
}
