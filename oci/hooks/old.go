package hooks

import (
	"encoding/json"
	"fmt"
	"regexp"
	"slices"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// parseOld reads schema 0.1.0, in which any condition is enough, annotations are matched by their
// values, and lists have two names. A file without conditions matches no container.
func parseOld(text []byte) (*hook, error) {
	var file struct {
		Hook          string   `json:"hook"`
		Arguments     []string `json:"arguments"`
		Stage         []string `json:"stage"`
		Stages        []string `json:"stages"`
		Cmd           []string `json:"cmd"`
		Cmds          []string `json:"cmds"`
		Annotation    []string `json:"annotation"`
		Annotations   []string `json:"annotations"`
		HasBindMounts bool     `json:"hasbindmounts"`
	}
	if err := json.Unmarshal(text, &file); err != nil {
		return nil, fmt.Errorf("not a valid hook file of version 0.1.0: %w", err)
	}
	h := &hook{
		hook:   specs.Hook{Path: file.Hook, Args: append([]string{file.Hook}, file.Arguments...)},
		stages: slices.Concat(file.Stages, file.Stage),
		when:   conditions{any: true, bindMounts: file.HasBindMounts},
	}
	if err := h.check(); err != nil {
		return nil, err
	}
	for _, text := range slices.Concat(file.Cmds, file.Cmd) {
		pattern, err := regexp.Compile(text)
		if err != nil {
			return nil, fmt.Errorf("cmds: %w", err)
		}
		h.when.commands = append(h.when.commands, pattern)
	}
	for _, text := range slices.Concat(file.Annotations, file.Annotation) {
		pattern, err := regexp.Compile(text)
		if err != nil {
			return nil, fmt.Errorf("annotations: %w", err)
		}
		h.when.annotations = append(h.when.annotations, pair{regexp.MustCompile(""), pattern})
	}
	return h, nil
}
