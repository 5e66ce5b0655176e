package rest

const (
	supported = true

	sysFstat      = 5
	sysMunmap     = 11
	sysNanosleep  = 35
	sysExit       = 60
	sysKill       = 62
	sysEpollPwait = 281
)

// enter does what is planned, waits, and jumps to the program's entry point.
//
//go:noescape
func enter(p *plan)
