package monitor

// What package syscall lacks here.
const (
	audit = 0xc0000015 // what seccomp calls this architecture

	sysOpenByHandleAt  = 346
	sysSetns           = 350
	sysProcessVMReadv  = 351
	sysProcessVMWritev = 352
	sysFinitModule     = 353
	sysSeccomp         = 358
	sysBPF             = 361
	sysExecveat        = 362
	sysUserfaultfd     = 364
	sysKexecFileLoad   = 382

	sysSocketcall = 102
)

// refusedHere are all calls for sockets as one: Go makes them one by one.
var refusedHere = [...]uint32{sysSocketcall}
