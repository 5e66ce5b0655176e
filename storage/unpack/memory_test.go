package unpack

import "testing"

// Go's runtime dies in more than one way when it gets no memory.
func TestDeathsForLackOfMemory(t *testing.T) {
	t.Parallel()
	for said, want := range map[string]bool{
		"fatal error: runtime: out of memory\n": true,
		"runtime: cannot allocate memory":       true,
		"SIGSEGV: segmentation violation\nPC=0x437b5d m=3 sigcode=1 addr=0x0\n\ngoroutine 0 gp=0x20fd7692c0 m=3 mp=0x20fd7c5008 [idle]:\nruntime.(*spanQueue).tryDrain(0x400?, 0x2b19d00?, 0xfd7b8008?)\n": true,
		"SIGSEGV: segmentation violation\nPC=0x437b5d m=3 sigcode=1 addr=0x0\n\ngoroutine 0 gp=0x20fd7692c0 m=3 mp=0x20fd7c5008 [idle]:\nruntime.scanblock(0x40008)\n":                                     false,
		"panic: runtime error: invalid memory address or nil pointer dereference\n[signal SIGSEGV: segmentation violation code=0x1 addr=0x0 pc=0x1]\n\ngoroutine 18 [running]:\nmain.main()\n":             false,
	} {
		if got := outOfMemory.MatchString(said); got != want {
			t.Errorf("%v for\n%s", got, said)
		}
	}
}
