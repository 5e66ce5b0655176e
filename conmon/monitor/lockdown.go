package monitor

import "github.com/crius-run/crius/conmon/wire"

// lockDown takes from this process what it has no more use for, once it has
// nothing left to do but to copy, to write and to wait. What it copies is the
// container's: whoever found a way in by that would be root of the node. It stays
// root, who may write files, but gets no further from there.
//
// A monitor that runs further commands of the runtime cannot do without any of it:
// they inherit it.
func lockDown(opt *wire.Options) error {
	if opt.Remote() || opt.Fifos {
		return nil
	}
	return refuseCalls()
}
