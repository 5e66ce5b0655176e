package main

import (
	"slices"
	"testing"
)

// Denials of a stranger's accesses were provoked; all others count, whatever
// reports them.
func TestReadDenials(t *testing.T) {
	const log = `type=SYSCALL msg=audit(1.1:1): arch=c000003e comm="sh" subj=system_u:system_r:container_t:s0:c1,c2
type=AVC msg=audit(1.1:1): avc:  denied  { read } for  pid=1 comm="cat" name="file" dev="vda" ino=2 scontext=system_u:system_r:container_t:s0:c1,c2 tcontext=system_u:object_r:container_file_t:s0:c3,c4 tclass=file permissive=0
type=AVC msg=audit(1.2:2): avc:  denied  { read } for  pid=1 comm="cat" name="file" dev="vda" ino=2 scontext=system_u:system_r:container_t:s0:c5,c6 tcontext=system_u:object_r:container_file_t:s0:c3,c4 tclass=file permissive=0
type=AVC msg=audit(1.3:3): avc:  denied  { read } for  pid=1 comm="cat" name="file" dev="vda" ino=2 scontext=system_u:system_r:container_t:s0:c7,c8 tcontext=system_u:object_r:container_file_t:s0:c3,c4 tclass=file permissive=0
type=AVC msg=audit(1.4:4): avc:  granted  { read } for  pid=1 comm="cat" scontext=system_u:system_r:container_t:s0:c7,c8 tcontext=system_u:object_r:container_file_t:s0:c3,c4 tclass=file permissive=0
type=AVC msg=audit(1.6:6): avc:  denied  { search } for  pid=606 comm="top" name="1" dev="proc" ino=4315 scontext=system_u:system_r:container_t:s0:c7,c8 tcontext=system_u:system_r:container_t:s0:c726,c983 tclass=dir permissive=1
type=USER_AVC msg=audit(1.5:5): pid=1 uid=0 subj=system_u:system_r:init_t:s0 msg='avc:  denied  { start } for auid=n/a cmdline="runc create" function="method_start" scontext=system_u:system_r:container_engine_t:s0 tcontext=system_u:system_r:init_t:s0 tclass=system permissive=1 exe="/usr/lib/systemd/systemd"'
`
	f := readDenials(log, []string{"system_u:system_r:container_t:s0:c1,c2"})
	want := []string{
		"1 x container_engine_t to { start } of init_t, class system",
		"2 x cat container_t to { read } of container_file_t, class file",
	}
	got := f.lines()
	slices.Sort(got)
	if f.provoked != 2 || !slices.Equal(got, want) {
		t.Errorf("%d provoked, and %q", f.provoked, got)
	}
}
