// Say is the program in the images for power cuts. It runs as the init of a
// container:
//
//	say check SUM     compares all of the image with /manifest, whose digest is SUM
//	say exit CODE     ends with that code
//	say sleep         sleeps until it is killed
//	say write         writes into the writable layer until it is killed
//
// In the manifest, each line is the result of describe for a file.
package main

import (
	"crypto/sha256"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"syscall"
	"time"
)

func main() {
	args := append(os.Args[1:], "", "")
	switch args[0] {
	case "check":
		check(args[1])
	case "exit":
		code, _ := strconv.Atoi(args[1])
		os.Exit(code)
	case "write":
		for i := 0; ; i++ {
			_ = os.WriteFile(fmt.Sprintf("/data/written-%d", i%8), make([]byte, 64<<10), 0o600)
			time.Sleep(10 * time.Millisecond)
		}
	default:
		time.Sleep(time.Hour)
	}
}

// check prints "whole: N files", or what is wrong.
func check(sum string) {
	manifest, err := os.ReadFile("/manifest")
	if got := fmt.Sprintf("%x", sha256.Sum256(manifest)); err != nil || got != sum {
		fmt.Printf("the manifest has %d bytes and the digest %s, want %s: %v\n", len(manifest), got, sum, err)
		os.Exit(1)
	}
	want := map[string]bool{}
	for line := range strings.Lines(string(manifest)) {
		want[strings.TrimSuffix(line, "\n")] = true
	}
	var wrong []string
	count := 0
	see := func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			wrong = append(wrong, err.Error())
			return nil
		}
		line, err := describe(path)
		if err != nil {
			wrong = append(wrong, err.Error())
		} else if !want[line] {
			wrong = append(wrong, "is:     "+line)
		}
		delete(want, line)
		count++
		return nil
	}
	_ = filepath.WalkDir("/data", see)
	_ = see("/say", nil, nil)
	for line := range want {
		wrong = append(wrong, "should: "+line)
	}
	if len(wrong) == 0 {
		fmt.Printf("whole: %d files\n", count)
		return
	}
	sort.Slice(wrong, func(i, j int) bool { return wrong[i][8:] < wrong[j][8:] })
	for _, line := range wrong[:min(len(wrong), 10)] {
		fmt.Println(line)
	}
	fmt.Printf("%d differences\n", len(wrong))
	os.Exit(1)
}

// describe returns path, mode, owner, and content of a file.
func describe(path string) (string, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return "", err
	}
	st := info.Sys().(*syscall.Stat_t)
	content := ""
	switch {
	case info.Mode().IsRegular():
		data, err := os.ReadFile(path)
		if err != nil {
			return "", err
		}
		content = fmt.Sprintf("%x", sha256.Sum256(data))
	case info.Mode()&fs.ModeSymlink != 0:
		content, err = os.Readlink(path)
	}
	return fmt.Sprintf("%s %o %d:%d %s", path, st.Mode, st.Uid, st.Gid, content), err
}
