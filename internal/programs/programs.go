// Package programs finds the programs that crius starts.
package programs

import (
	"os"
	"os/exec"
	"path/filepath"
)

// Find locates a program in dir, else in PATH; an empty dir means only in PATH.
func Find(name, dir string) (string, error) {
	if beside := filepath.Join(dir, name); dir != "" && Executable(beside) {
		return beside, nil
	}
	return exec.LookPath(name)
}

// Dir returns the directory of the running program; empty: unknown.
func Dir() string {
	self, err := os.Executable()
	if err != nil {
		return ""
	}
	return filepath.Dir(self)
}

// Executable reports whether path is an executable program.
func Executable(path string) bool {
	st, err := os.Stat(path)
	return err == nil && st.Mode().IsRegular() && st.Mode()&0o111 != 0
}
