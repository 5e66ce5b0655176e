// Command cadvisor compares what crius says of itself with cAdvisor's own code.
// It is a module of its own, so that cAdvisor never becomes a dependency of
// crius: call it with
//
//	go run -C test/cadvisor . metrics <crius.json
//
// It prints what differs, and fails if anything does.
package main

import (
	"encoding/json"
	"fmt"
	"os"
)

func main() {
	differences, err := run(os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	for _, d := range differences {
		fmt.Println(d)
	}
	if len(differences) > 0 {
		os.Exit(1)
	}
}

func run(args []string) (differences []string, err error) {
	if len(args) != 1 || args[0] != "metrics" {
		return nil, fmt.Errorf("want metrics, got %q", args)
	}
	var crius map[string]map[string]metric
	if err := json.NewDecoder(os.Stdin).Decode(&crius); err != nil {
		return nil, fmt.Errorf("what crius has: %w", err)
	}
	return compareMetrics(crius)
}
