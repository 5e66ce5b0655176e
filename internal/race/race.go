// Package race tells whether the program was built with the race detector.
package race

import "os"

// Environ are the variables that a child with an environment of its own must have to
// run with the detector as this program does: none without it.
func Environ() []string {
	if !Enabled {
		return nil
	}
	return []string{"GORACE=" + os.Getenv("GORACE")}
}
