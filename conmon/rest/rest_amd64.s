#include "go_asm.h"
#include "textflag.h"

// R12 is the plan, R13 the stack pointer at the program's start, BX the epoll
// descriptor, R15 the program's first instruction. System calls change AX, CX and R11.
//
// func enter(p *plan)
TEXT ·enter(SB), NOSPLIT|NOFRAME, $0-8
	MOVQ	p+0(FP), R12
	MOVQ	plan_stack(R12), R13
	MOVQ	plan_epoll(R12), BX
	MOVQ	plan_entry(R12), R15
	LEAQ	-256(R13), SP
	ANDQ	$~15, SP
	LEAQ	leave<>(SB), AX
	MOVQ	AX, plan_leave+action_handler(R12)
	MOVQ	AX, plan_leave+action_restorer(R12)
	LEAQ	plan_before(R12), R14
	CALL	calls<>(SB)

others:
	MOVQ	plan_tasks(R12), DI
	MOVQ	SP, SI
	MOVQ	$const_sysFstat, AX
	SYSCALL
	CMPQ	16(SP), $3		// st_nlink
	JEQ	alone
	MOVQ	plan_pid(R12), DI
	MOVQ	$const_leaveWith, SI
	MOVQ	$const_sysKill, AX
	SYSCALL
	MOVQ	$0, 0(SP)
	MOVQ	$100000, 8(SP)		// nanoseconds
	MOVQ	SP, DI
	MOVQ	$0, SI
	MOVQ	$const_sysNanosleep, AX
	SYSCALL
	JMP	others

alone:
	LEAQ	plan_after(R12), R14
	CALL	calls<>(SB)
	MOVQ	plan_tail(R12), DI
	MOVQ	plan_tailSize(R12), CX
	XORL	AX, AX
	CLD
	REP; STOSB
	MOVQ	R12, DI
	MOVQ	$plan__size, SI
	MOVQ	$const_sysMunmap, AX
	SYSCALL

wait:
	MOVQ	BX, DI
	MOVQ	SP, SI
	MOVQ	$1, DX
	MOVQ	$-1, R10
	MOVQ	$0, R8
	MOVQ	$8, R9
	MOVQ	$const_sysEpollPwait, AX
	SYSCALL
	CMPQ	AX, $-4			// EINTR, after SIGCONT
	JEQ	wait

	// The runtime ends the process if it gets no memory or thread. Wait until both are available.
ready:
	XORL	DI, DI
	MOVQ	$const_memory, SI
	MOVQ	$const_mapAccess, DX
	MOVQ	$const_mapFlags, R10
	MOVQ	$-1, R8
	XORL	R9, R9
	MOVQ	$const_sysMmap, AX
	SYSCALL
	TESTQ	AX, AX
	JLT	scarce
	MOVQ	AX, DI
	MOVQ	$const_memory, SI
	MOVQ	$const_sysMunmap, AX
	SYSCALL
	MOVQ	$const_threadFlags, DI
	MOVQ	SP, SI			// the thread does not use it
	XORL	DX, DX
	XORL	R10, R10
	XORL	R8, R8
	MOVQ	$const_sysClone, AX
	SYSCALL
	TESTQ	AX, AX
	JEQ	thread
	JLT	scarce
	MOVQ	R13, SP
	XORL	DX, DX			// no function to call at the end
	JMP	R15

thread:
	JMP	leave<>(SB)

scarce:
	MOVQ	$0, 0(SP)
	MOVQ	$100000000, 8(SP)	// nanoseconds
	MOVQ	SP, DI
	XORL	SI, SI
	MOVQ	$const_sysNanosleep, AX
	SYSCALL
	JMP	ready

// calls makes the system calls in the list at R14.
TEXT calls<>(SB), NOSPLIT|NOFRAME, $0
next:
	MOVQ	call_number(R14), AX
	TESTQ	AX, AX
	JLT	done
	MOVQ	call_args+0(R14), DI
	MOVQ	call_args+8(R14), SI
	MOVQ	call_args+16(R14), DX
	MOVQ	call_args+24(R14), R10
	SYSCALL
	ADDQ	$call__size, R14
	JMP	next
done:
	RET

// leave ends a thread.
TEXT leave<>(SB), NOSPLIT|NOFRAME, $0
	MOVQ	$0, DI
	MOVQ	$const_sysExit, AX
	SYSCALL
	INT	$3
