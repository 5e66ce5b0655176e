package program

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
)

// Whatever else forks, a written program can be executed.
func TestWrittenProgramsCanBeRun(t *testing.T) {
	dir := t.TempDir()
	var all sync.WaitGroup
	for i := range 6 {
		all.Go(func() {
			file := filepath.Join(dir, fmt.Sprint(i))
			for range 20 {
				if err := Write(file, []byte("#!/bin/sh\n")); err != nil {
					t.Error(err)
				}
				if err := exec.Command(file).Run(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
}
