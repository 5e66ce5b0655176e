package main

import (
	"strings"
	"testing"
)

// at is the beginning of lines of dmesg --ctime.
const at = "[Sat Nov 28 08:00:00 2026] "

// Each message quotes a name that a container may choose, most of them without privileges.
func TestKernelLogHoldsNoNamesOfContainers(t *testing.T) {
	t.Parallel()
	names := []string{"s3cr3t", "hunter2", "zqx", "Zqx_kernel", "zqx error", "zqx\\x0akernel", "zqx: zqx", "ünï", "\xff\xfezqx", "zqx+0x1/0x2", "'zqx'", "`zqx'", "\"zqx\"", "zqx\n" + at + "zqx"}
	for _, line := range []string{
		"futex_wake_op: NAME tries to shift op by 33; fix this program",
		"tmpfs: Unknown parameter 'NAME'",
		"x86/split lock detection: #AC: NAME/123 took a split_lock trap at address: 0x7f",
		`overlayfs: unrecognized mount option "NAME" or missing value`,
		"overlayfs: failed to resolve 'NAME': -2",
		"br0: port 1(NAME) entered blocking state",
		"NAME: port 1(NAME) entered disabled state",
		"NAME: renamed from eth0",
		"eth0: renamed from NAME",
		"device NAME entered promiscuous mode",
		"NAME: entered allmulticast mode",
		"NAME: page allocation failure: order:0, mode:0x40cc0(GFP_KERNEL|__GFP_COMP), nodemask=(null),cpuset=NAME,mems_allowed=0",
		"NAME (12) uses deprecated CONFIG_X interface",
		"coredump: NAME(123): over core_pipe_limit, skipping core dump",
		"cgroup: fork rejected by pids controller in /kubepods.slice/NAME",
		"oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=NAME,mems_allowed=0,oom_memcg=/a/NAME,task_memcg=/NAME/b,task=NAME,pid=1,uid=0",
		"Memory cgroup stats for /kubepods/NAME:",
		"Tasks in /NAME are going to be killed due to memory.oom.group set",
		`audit: type=1309 audit(1.2:3): argc=2 a0="sh" a1="NAME"`,
		`audit: type=1326 audit(1.2:3): auid=1 comm="NAME" exe="/NAME" sig=0`,
		"ptrace attach of \"./NAME\"[12] was attempted by \"NAME\"[13]",
		"process 'NAME' started with executable stack",
		"[    123]  1000   123     1234      567    45056        0           985 NAME",
		"NAME[12]: segfault at 0 ip 0000 sp 0000 error 4 in NAME[5600+1000]",
		"CPU: 0 PID: 12 Comm: NAME Not tainted 6.1.0",
		"INFO: task NAME:12 blocked for more than 120 seconds.",
		"systemd[1]: NAME",
		"a message of a later version: NAME",
		"NAME",
	} {
		for _, name := range names {
			text := strings.ToLower(string(kernelLog([]byte(at + strings.ReplaceAll(line, "NAME", name) + "\n"))))
			for _, part := range []string{"zqx", "hunter", "s3cr", "ünï", "\xff", "\\x0a"} {
				if strings.Contains(text, part) {
					t.Errorf("%q in %q: %q", name, line, text)
				}
			}
		}
	}
}

// Quoted text is redacted even if it consists of known words and numbers.
func TestKernelLogHoldsNothingQuoted(t *testing.T) {
	t.Parallel()
	for _, line := range []string{
		"tmpfs: Unknown parameter 'error 4711'", `audit: audit(1.2:3): a1="error 4711"`, "warning: `error 4711' uses 32-bit capabilities",
		"cgroup: fork rejected by pids controller in /error/4711", "overlayfs: refusing to follow metacopy origin for (/error_4711)",
		"oom-kill:cpuset=/error/4711,mems_allowed=0,task_memcg=/error_4711",
	} {
		if text := kernelLine(at + line); strings.Contains(text, "error") || strings.Contains(text, "4711") {
			t.Errorf("%s", text)
		}
	}
}

// The audit system writes text that is not printable, or pretends to be, in hexadecimal.
func TestKernelLogHoldsNoNamesInHexadecimal(t *testing.T) {
	t.Parallel()
	for _, field := range []string{"comm", "exe", "a1", "a2[0]", "proctitle", "name", "new_field"} {
		if text := kernelLine(at + "audit: type=1309 audit(1.2:3): " + field + "=73656372 pid=12"); strings.Contains(text, "73656372") || !strings.Contains(text, "pid=12") {
			t.Errorf("%s", text)
		}
	}
}

// The kernel's own messages remain for operators.
func TestKernelLogKeepsWhatTheKernelSays(t *testing.T) {
	t.Parallel()
	for line, want := range map[string]string{
		"java invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=985":                                                                      "<redacted> invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=985",
		"Memory cgroup out of memory: Killed process 12 (java) total-vm:1kB, anon-rss:1kB, file-rss:0kB, shmem-rss:0kB, UID:0 pgtables:60kB oom_score_adj:985": "Memory cgroup out of memory: Killed process 12 (<redacted>) total-vm:1kB, anon-rss:1kB, file-rss:0kB, shmem-rss:0kB, UID:0 pgtables:60kB oom_score_adj:985",
		"memory: usage 65536kB, limit 65536kB, failcnt 21":                                                                                                     "",
		"oom_reaper: reaped process 12 (java), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB":                                                                  "oom_reaper: reaped process 12 (<redacted>), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB",
		"INFO: task java:12 blocked for more than 120 seconds.":                                                                                                "INFO: task <redacted>:12 blocked for more than 120 seconds.",
		"EXT4-fs (nvme0n1p2): mounted filesystem with ordered data mode. Quota mode: none.":                                                                    "",
		"EXT4-fs error (device sda1): ext4_find_entry:1455: inode #2: comm java: reading directory lblock 0":                                                   "EXT4-fs error (device sda1): ext4_find_entry:1455: inode #2: comm <redacted>: reading directory lblock 0",
		"blk_update_request: I/O error, dev sda, sector 12345678 op 0x0:(READ) flags 0x80700":                                                                  "",
		"nfs: server 10.0.0.1 not responding, still trying":                                                                                                    "",
		"watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [java:12]":                                                                                          "watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [<redacted>:12]",
		"rcu: INFO: rcu_sched self-detected stall on CPU":                                                                                                      "",
		"nf_conntrack: table full, dropping packet":                                                                                                            "",
		"neighbour: arp_cache: neighbor table overflow!":                                                                                                       "",

		"RIP: 0033:0x7f0000000001":                                                           "",
		" ? do_syscall_64+0x3b/0x90":                                                         "",
		" ovl_lookup+0x2f/0xa0 [overlay]":                                                    "",
		"unregister_netdevice: waiting for eth0 to become free. Usage count = 1":             "",
		"device-mapper: thin: 253:2: reached low water mark for data device: sending event.": "",
		"XFS (dm-3): metadata I/O error in \"xfs_trans\" at daddr 0x1 len 8 error 5":         "XFS (dm-3): metadata I/O error in <redacted> at daddr 0x1 len 8 error 5",
	} {
		if want == "" {
			want = line
		}
		if got := kernelLine(at + line); got != at+want {
			t.Errorf("%s\nbecomes %s", line, got)
		}
	}
}
