// Package programs finds the programs that crius starts.
package programs

import (
	"os"
	"os/exec"
	"path/filepath"
)

// Find locates a program in a directory, else in PATH; empty: only there.
func Find(name, dir string) (string, error) {
	if beside := filepath.Join(dir, name); dir != "" && Executable(beside) {
		return beside, nil
	}
	return exec.LookPath(name)
}

// Dir is the directory of the program that runs; empty: it is not known.
func Dir() string {
	self, err := os.Executable()
	if err != nil {
		return ""
	}
	return filepath.Dir(self)
}

// Executable tells whether a path is a program that can be run.
func Executable(path string) bool {
	st, err := os.Stat(path)
	return err == nil && st.Mode().IsRegular() && st.Mode()&0o111 != 0
}
