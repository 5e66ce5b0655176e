package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
)

// report is the results of a run without critest, one per promise.
type report struct {
	mode  string // of the run
	specs []spec
}

// spec is one promise in the form of critest's report.
type spec struct {
	LeafNodeType, LeafNodeText, State string
	Failure                           struct{ Message string }
}

// promise reports whether a promise was kept.
func (r *report) promise(text string, err error) {
	s := spec{LeafNodeType: "It", LeafNodeText: text, State: "passed"}
	if err != nil {
		s.State, s.Failure.Message = "failed", err.Error()
	}
	r.specs = append(r.specs, s)
	fmt.Printf("%s: %s: %s %s\n", r.mode, text, s.State, s.Failure.Message)
}

// write writes the results for the host, and a table of all promises.
func (r *report) write() error {
	data, err := json.Marshal([]map[string]any{{"SpecReports": r.specs}})
	if err != nil {
		return err
	}
	var steps strings.Builder
	fmt.Fprintf(&steps, "%d steps\n", len(r.specs))
	for _, s := range r.specs {
		fmt.Fprintf(&steps, "  %-6s  %s\n", s.State, s.LeafNodeText)
	}
	return errors.Join(os.WriteFile("out/report.json", data, 0o644), os.WriteFile("out/wrong", nil, 0o644),
		os.WriteFile("out/steps", []byte(steps.String()), 0o644))
}
