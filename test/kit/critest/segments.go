package critest

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// segmentSize is the size of the shared memory that the suite makes on the host
// and never removes.
const segmentSize = "1048576"

// sweeper removes the shared memory that runs of the suite leave on the host,
// once none is running: the owner of a segment is unknown.
type sweeper struct {
	mu     sync.Mutex
	runs   int          // under way
	before map[int]bool // the segments of others
}

// begin records what exists before the first run.
func (s *sweeper) begin() (err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.runs == 0 {
		s.before, err = segments()
	}
	if err == nil {
		s.runs++
	}
	return err
}

// end removes, after the last run, what has been added since.
func (s *sweeper) end() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.runs--; s.runs > 0 {
		return nil
	}
	return removeSegments(s.before)
}

// segments returns the ids of this host's shared memory segments of that size.
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

// removeSegments removes those that did not exist before.
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
