package rest

const (
	supported = true

	sysEpollPwait = 22
	sysFstat      = 80
	sysExit       = 93
	sysNanosleep  = 101
	sysKill       = 129
	sysMunmap     = 215
)

// enter does what is planned, waits, and jumps to the program's entry point.
//
//go:noescape
func enter(p *plan)
