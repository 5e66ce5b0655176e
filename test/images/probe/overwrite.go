package main

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// overwrite looks for programs other than its own for ever. It writes to a
// program the byte that is already there.
func overwrite([]string) error {
	go reap()
	var own unix.Stat_t
	if err := unix.Stat("/proc/self/exe", &own); err != nil {
		return err
	}
	fmt.Println("ready")
	seen := map[uint64]bool{own.Ino: true}
	for {
		entries, err := os.ReadDir("/proc")
		if err != nil {
			return err
		}
		for _, e := range entries {
			f, err := os.Open("/proc/" + e.Name() + "/exe")
			if err != nil {
				continue
			}
			var st unix.Stat_t
			if err := unix.Fstat(int(f.Fd()), &st); err != nil || seen[st.Ino] {
				f.Close()
				continue
			}
			seen[st.Ino] = true
			fmt.Println("sees", st.Ino)
			go overwriteLater(f, st.Ino)
		}
	}
}

// overwriteLater waits for the end of the processes that run a program.
func overwriteLater(program *os.File, inode uint64) {
	defer program.Close()
	first := make([]byte, 1)
	if _, err := program.ReadAt(first, 0); err != nil {
		fmt.Println("kept", inode, err)
		return
	}
	for {
		f, err := os.OpenFile("/proc/self/fd/"+strconv.Itoa(int(program.Fd())), os.O_WRONLY, 0)
		if errors.Is(err, unix.ETXTBSY) {
			time.Sleep(time.Millisecond)
			continue
		}
		if err == nil {
			_, err = f.WriteAt(first, 0)
			f.Close()
		}
		if err != nil {
			fmt.Println("kept", inode, err)
		} else {
			fmt.Println("written", inode)
		}
		return
	}
}
