package main

import (
	"fmt"
	"os"
	"strings"
	"time"
)

// insist repeats do, which attaches or detaches a pod, if a CNI plugin was
// interrupted: while it read a list from the kernel, another process that
// attaches pods changed that list (NLM_F_DUMP_INTR in linux/netlink.h). The
// plugins of some distributions give up then, and the kubelet would ask again.
// Failed attempts count in the time, and are printed.
func insist(do func() error) error {
	const attempts = 10
	for n := 1; ; n++ {
		err := do()
		if err == nil || n == attempts || !interrupted(err) {
			return err
		}
		fmt.Fprintln(os.Stderr, "bench: tries again:", err)
		time.Sleep(10 * time.Millisecond) // others are changing it
	}
}

// interrupted recognizes the error messages of older and newer netlink
// libraries.
func interrupted(err error) bool {
	return strings.Contains(err.Error(), "interrupted system call") || strings.Contains(err.Error(), "results may be incomplete or inconsistent")
}
