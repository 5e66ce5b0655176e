package spec

import (
	"fmt"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// nameErrnos sets the error numbers that the profile has by name, as those of containers/common do, and
// refuses numbers of which a runtime would take a part: 65536 would tell the program that a forbidden call
// has succeeded.
func (p *Profile) nameErrnos() error {
	if err := takeErrno(&p.DefaultErrnoRet, p.DefaultErrno); err != nil {
		return fmt.Errorf("defaultErrno: %w", err)
	}
	if p.DefaultAction == specs.ActErrno && p.DefaultErrnoRet != nil && *p.DefaultErrnoRet > maxErrno {
		return fmt.Errorf("defaultErrnoRet %d is not an error number", *p.DefaultErrnoRet)
	}
	for i := range p.Syscalls {
		r := &p.Syscalls[i]
		if err := takeErrno(&r.ErrnoRet, r.Errno); err != nil {
			return fmt.Errorf("rule %d: errno: %w", i, err)
		}
		if r.Action == specs.ActErrno && r.ErrnoRet != nil && *r.ErrnoRet > maxErrno {
			return fmt.Errorf("rule %d: errnoRet %d is not an error number", i, *r.ErrnoRet)
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
