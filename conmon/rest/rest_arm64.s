#include "go_asm.h"
#include "textflag.h"

// R19 is the plan, R20 the stack pointer at the program's beginning, R21 the epoll
// descriptor, R22 the program's first instruction, R23 the top of the stack from here on.
// System calls change R0.
//
// func enter(p *plan)
TEXT ·enter(SB), NOSPLIT|NOFRAME, $0-8
	MOVD	p+0(FP), R19
	MOVD	plan_stack(R19), R20
	MOVD	plan_epoll(R19), R21
	MOVD	plan_entry(R19), R22
	SUB	$256, R20, R23
	AND	$~15, R23
	MOVD	R23, RSP
	MOVD	$leave<>(SB), R0
	MOVD	R0, plan_leave+action_handler(R19)
	ADD	$plan_before, R19, R24
	BL	calls<>(SB)

others:
	MOVD	plan_tasks(R19), R0
	MOVD	R23, R1
	MOVD	$const_sysFstat, R8
	SVC
	MOVWU	20(R23), R0		// st_nlink
	CMP	$3, R0
	BEQ	alone
	MOVD	plan_pid(R19), R0
	MOVD	$const_leaveWith, R1
	MOVD	$const_sysKill, R8
	SVC
	MOVD	ZR, 0(R23)
	MOVD	$100000, R0		// nanoseconds
	MOVD	R0, 8(R23)
	MOVD	R23, R0
	MOVD	ZR, R1
	MOVD	$const_sysNanosleep, R8
	SVC
	B	others

alone:
	ADD	$plan_after, R19, R24
	BL	calls<>(SB)
	MOVD	plan_tail(R19), R0
	MOVD	plan_tailSize(R19), R1
zero:
	CBZ	R1, zeroed
	MOVB	ZR, (R0)
	ADD	$1, R0
	SUB	$1, R1
	B	zero
zeroed:
	MOVD	R19, R0
	MOVD	$plan__size, R1
	MOVD	$const_sysMunmap, R8
	SVC

wait:
	MOVD	R21, R0
	MOVD	R23, R1
	MOVD	$1, R2
	MOVD	$-1, R3
	MOVD	ZR, R4
	MOVD	$8, R5
	MOVD	$const_sysEpollPwait, R8
	SVC
	CMN	$4, R0			// EINTR, after SIGCONT
	BEQ	wait
	MOVD	R20, RSP
	MOVD	ZR, R0			// no function to call at the end
	JMP	(R22)

// The list at R24.
TEXT calls<>(SB), NOSPLIT|NOFRAME, $0
next:
	MOVD	call_number(R24), R8
	TBNZ	$63, R8, done
	MOVD	call_args+0(R24), R0
	MOVD	call_args+8(R24), R1
	MOVD	call_args+16(R24), R2
	MOVD	call_args+24(R24), R3
	SVC
	ADD	$call__size, R24
	B	next
done:
	RET

// A thread's end.
TEXT leave<>(SB), NOSPLIT|NOFRAME, $0
	MOVD	ZR, R0
	MOVD	$const_sysExit, R8
	SVC
	BRK
