package monitor

// What package syscall lacks here.
const (
	audit = 0x40000028 // what seccomp calls this architecture

	sysOpenByHandleAt  = 371
	sysSetns           = 375
	sysProcessVMReadv  = 376
	sysProcessVMWritev = 377
	sysFinitModule     = 379
	sysSeccomp         = 383
	sysBPF             = 386
	sysExecveat        = 387
	sysUserfaultfd     = 388
	sysKexecFileLoad   = 401
)

var refusedHere [0]uint32
