package main

import "strings"

// insist does what attaches or detaches a pod again if a CNI plugin was interrupted: it has read
// a list of the kernel that others, who attach pods as well, changed meanwhile (NLM_F_DUMP_INTR
// in linux/netlink.h). The plugins of some distributions give up then, and the kubelet asks again.
// What the first attempts have taken counts.
func insist(do func() error) error {
	const attempts = 10
	for n := 1; ; n++ {
		err := do()
		if err == nil || n == attempts || !strings.Contains(err.Error(), "interrupted system call") {
			return err
		}
	}
}
