/*
 * Preloaded into user-mode Linux, so that it runs with any extended registers of
 * the processor, including AMX's.
 *
 * UML before 6.13 keeps 2696 bytes of a process's extended registers. If the
 * processor has more, the kernel refuses to set less than all of them (EFAULT),
 * and UML's init dies at its first instruction; if it has less, the kernel refuses
 * to set more (EINVAL). This sets UML's registers over those of the process: the
 * rest is AMX's, which guests never use.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/types.h>
#include <sys/uio.h>

typedef long (*ptrace_function)(int, pid_t, void *, void *);

static long set_xstate(ptrace_function real, pid_t pid, const struct iovec *wanted)
{
	static _Alignas(64) unsigned char all[1 << 16]; /* UML is one thread */
	struct iovec whole = {all, sizeof all};
	size_t length = wanted->iov_len;

	if (real(PTRACE_GETREGSET, pid, (void *)NT_X86_XSTATE, &whole) < 0)
		return -1;
	if (wanted->iov_len > whole.iov_len)
		length = whole.iov_len;
	memcpy(all, wanted->iov_base, length);
	return real(PTRACE_SETREGSET, pid, (void *)NT_X86_XSTATE, &whole);
}

long ptrace(enum __ptrace_request request, ...)
{
	static ptrace_function real;
	va_list arguments;
	pid_t pid;
	void *address, *data;

	va_start(arguments, request);
	pid = va_arg(arguments, pid_t);
	address = va_arg(arguments, void *);
	data = va_arg(arguments, void *);
	va_end(arguments);
	if (!real)
		real = (ptrace_function)dlsym(RTLD_NEXT, "ptrace");
	if (request == PTRACE_SETREGSET && address == (void *)NT_X86_XSTATE)
		return set_xstate(real, pid, data);
	return real(request, pid, address, data);
}
