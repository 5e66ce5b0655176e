// Command cadvisor compares crius's data with cAdvisor's own code. It is a
// separate module, so that cAdvisor never becomes a dependency of crius: call
// it with
//
//	go run -C test/cadvisor . metrics <crius.json
//
// which prints the differences from cAdvisor's metrics, and fails if there are
// any, and with
//
//	cadvisor crio CGROUP...
//
// which queries CRI-O's socket as cAdvisor does in a kubelet, and prints what
// it takes the cgroups for, in JSON.
package main

import (
	"encoding/json"
	"fmt"
	"os"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(args []string) error {
	switch {
	case len(args) == 1 && args[0] == "metrics":
		var crius map[string]map[string]metric
		if err := json.NewDecoder(os.Stdin).Decode(&crius); err != nil {
			return fmt.Errorf("what crius has: %w", err)
		}
		return compareMetrics(crius)
	case len(args) > 1 && args[0] == "crio":
		seen, err := look(args[1:])
		if err != nil {
			return err
		}
		return json.NewEncoder(os.Stdout).Encode(seen)
	}
	return fmt.Errorf("want metrics, or crio and cgroups, got %q", args)
}
