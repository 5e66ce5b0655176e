package monitor

import "github.com/crius-run/crius/conmon/wire"

// lockDown takes from this process what it has no more use for, once it has
// nothing left to do but to copy, to write and to wait. What it copies is the
// container's: whoever found a way in by that would be root of the node. It stays
// root, who may write files, but gets no further from there.
//
// A monitor that runs further commands of the runtime has no filter, which they would
// inherit. That they have no more privileges than it has they can do without: they wait for
// the container. What one of them leaves of a container whose shim has died the server
// removes.
func lockDown(opt *wire.Options) error {
	if err := dropCapabilities(opt); err != nil {
		return wire.Fail("drop capabilities", err)
	}
	if opt.Remote() || opt.Fifos {
		return wire.Fail("set no_new_privs", refusePrivileges())
	}
	return wire.Fail("install seccomp filter", refuseCalls())
}
