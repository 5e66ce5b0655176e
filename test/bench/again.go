package main

import (
	"fmt"
	"os"
	"strings"
	"time"
)

// insist repeats do, which attaches or detaches a pod, if a CNI plugin was interrupted: while it
// read a list from the kernel, others who attach pods changed that (NLM_F_DUMP_INTR in
// linux/netlink.h). The plugins of some distributions give up then, and the kubelet would
// ask again. Failed attempts count in the time, and are printed.
func insist(do func() error) error {
	const attempts = 10
	for n := 1; ; n++ {
		err := do()
		if err == nil || n == attempts || !interrupted(err) {
			return err
		}
		fmt.Fprintln(os.Stderr, "bench: tries again:", err)
		time.Sleep(10 * time.Millisecond) // others are at it
	}
}

// interrupted goes by what netlink libraries say, older and newer ones.
func interrupted(err error) bool {
	return strings.Contains(err.Error(), "interrupted system call") || strings.Contains(err.Error(), "results may be incomplete or inconsistent")
}
