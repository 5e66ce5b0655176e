// Package race reports whether the program was built with the race detector.
package race

import "os"

// Environ returns the variables that a child with its own environment needs to
// run with the race detector like this program: none without it.
func Environ() []string {
	if !Enabled {
		return nil
	}
	return []string{"GORACE=" + os.Getenv("GORACE")}
}

// Needs returns the directories of the node that a program built with the race detector needs, because it is linked
// dynamically: none without it.
func Needs() []string {
	if !Enabled {
		return nil
	}
	return []string{"/lib", "/lib64", "/proc", "/usr/lib", "/usr/lib64"}
}
