// Writer writes numbered lines to standard output and standard error at once:
//
//	writer LEDGER BYTES [hold]
//
// It ends when it has written that many bytes to either; 0: never. With hold it
// stops writing instead, and lives on.
package main

import (
	"fmt"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/crius-run/crius/test/kit/logstress"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		os.Exit(70) // standard error carries test output
	}
}

func run(args []string) error {
	if len(args) < 2 {
		return syscall.EINVAL
	}
	limit, err := strconv.ParseInt(args[1], 10, 64)
	if err != nil {
		return err
	}
	ledger, err := open(args[0])
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	var errs [2]error
	for stream := range errs {
		wg.Go(func() { errs[stream] = writer(stream, limit, &ledger[stream]) })
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	if len(args) > 2 {
		for {
			time.Sleep(time.Hour)
		}
	}
	return nil
}

// open maps the ledger: a count survives this process, and costs nothing.
func open(file string) (*[2]atomic.Int64, error) {
	f, err := os.OpenFile(file, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	size := int(unsafe.Sizeof([2]atomic.Int64{}))
	if err := f.Truncate(int64(size)); err != nil {
		return nil, err
	}
	page, err := syscall.Mmap(int(f.Fd()), 0, size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %s: %w", file, err)
	}
	return (*[2]atomic.Int64)(unsafe.Pointer(&page[0])), nil
}

// writer writes pieces of many sizes, independent of the lines.
func writer(stream int, limit int64, written *atomic.Int64) error {
	var text []byte
	for line, turn := 0, 0; limit == 0 || written.Load() < limit; turn++ {
		size := 1 + turn*7919%logstress.MaxWrite
		if turn%3 > 0 {
			size = logstress.MaxWrite
		}
		if limit > 0 {
			size = int(min(int64(size), limit-written.Load()))
		}
		for ; len(text) < size; line++ {
			text = logstress.AppendLine(text, stream, line)
		}
		n, err := syscall.Write(1+stream, text[:size])
		if err == syscall.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		written.Add(int64(n))
		text = append(text[:0], text[n:]...)
	}
	return nil
}
