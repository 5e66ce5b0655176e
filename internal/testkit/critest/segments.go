package critest

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// segmentSize is that of the shared memory which the suite makes on the host
// and never removes.
const segmentSize = "1048576"

// segments are the ids of this host's shared memory segments of that size.
func segments() (map[int]bool, error) {
	data, err := os.ReadFile("/proc/sysvipc/shm")
	if err != nil {
		return nil, err
	}
	ids := map[int]bool{}
	for line := range strings.Lines(string(data)) {
		f := strings.Fields(line) // key shmid perms size ...
		if len(f) < 4 || f[3] != segmentSize {
			continue
		}
		id, err := strconv.Atoi(f[1])
		if err != nil {
			return nil, fmt.Errorf("/proc/sysvipc/shm: %w", err)
		}
		ids[id] = true
	}
	return ids, nil
}

// removeSegments removes those that were not there before.
func removeSegments(before map[int]bool) error {
	now, err := segments()
	if err != nil {
		return err
	}
	var errs []error
	for id := range now {
		if before[id] {
			continue
		}
		if _, err := unix.SysvShmCtl(id, unix.IPC_RMID, nil); err != nil {
			errs = append(errs, fmt.Errorf("remove shared memory %d: %w", id, err))
		}
	}
	return errors.Join(errs...)
}
