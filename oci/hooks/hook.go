package hooks

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crius-run/crius/internal/regular"
)

// Stages of a hook. Those of the runtime have the names of the OCI runtime
// specification; precreate runs before the runtime is called, and changes the
// spec.
const (
	precreate       = "precreate"
	prestart        = "prestart"
	createRuntime   = "createRuntime"
	createContainer = "createContainer"
	startContainer  = "startContainer"
	poststart       = "poststart"
	poststop        = "poststop"
)

// hook is a parsed hook file.
type hook struct {
	file   string
	hook   specs.Hook
	when   conditions
	stages []string
}

// conditions must all hold, or any of them. Conditions that are not set always hold, unless any is
// enough.
type conditions struct {
	any         bool // one is enough, as in schema 0.1.0
	never       bool // some condition of the file can hold for no container
	annotations []pair
	commands    []*regexp.Regexp // nil: any command
	bindMounts  bool             // at least one is required
}

// pair matches annotations by key and value.
type pair struct{ key, value *regexp.Regexp }

// parse reads schema 1.0.0, or 0.1.0 as CRI-O and podman do. Unknown conditions are errors, because the hook
// would run for more containers than its author wanted; unknown fields
// elsewhere are ignored.
func parse(text []byte) (*hook, error) {
	var file struct {
		Version string          `json:"version"`
		Hook    specs.Hook      `json:"hook"`
		When    json.RawMessage `json:"when"`
		Stages  []string        `json:"stages"`
	}
	var kind struct {
		Version string `json:"version"`
	}
	if err := json.Unmarshal(text, &kind); err != nil {
		return nil, fmt.Errorf("not a valid hook file: %w", err)
	}
	switch kind.Version {
	case "1.0.0":
	case "", "0.1.0":
		return parseOld(text)
	default:
		return nil, fmt.Errorf("hook version %.20q is not supported, must be 1.0.0 or 0.1.0", kind.Version)
	}
	if err := json.Unmarshal(text, &file); err != nil {
		return nil, fmt.Errorf("not a valid hook file: %w", err)
	}
	h := &hook{hook: file.Hook, stages: file.Stages}
	if err := h.check(); err != nil {
		return nil, err
	}
	var err error
	if h.when, err = parseConditions(file.When); err != nil {
		return nil, fmt.Errorf("when: %w", err)
	}
	return h, nil
}

// check refuses a hook that no stage can run.
func (h *hook) check() error {
	switch {
	case !filepath.IsAbs(h.hook.Path) || strings.ContainsRune(h.hook.Path, 0):
		return fmt.Errorf("hook.path %.80q is not an absolute path", h.hook.Path)
	case h.hook.Timeout != nil && *h.hook.Timeout <= 0:
		return fmt.Errorf("hook.timeout is %d, must be more than 0", *h.hook.Timeout)
	case len(h.stages) == 0:
		return errors.New("stages is missing or empty")
	}
	for _, stage := range h.stages {
		if !slices.Contains([]string{precreate, prestart, createRuntime, createContainer, startContainer, poststart, poststop}, stage) {
			return fmt.Errorf("unknown stage %.40q", stage)
		}
	}
	return nil
}

func parseConditions(text json.RawMessage) (when conditions, err error) {
	var file struct {
		Always        *bool             `json:"always"`
		Annotations   map[string]string `json:"annotations"`
		Commands      []string          `json:"commands"`
		HasBindMounts *bool             `json:"hasBindMounts"`
	}
	if len(text) > 0 {
		strict := json.NewDecoder(bytes.NewReader(text))
		strict.DisallowUnknownFields()
		if err := strict.Decode(&file); err != nil {
			return when, err
		}
	}
	if file.Always == nil && len(file.Annotations) == 0 && len(file.Commands) == 0 && file.HasBindMounts == nil {
		return when, errors.New("no condition; to match all containers set \"always\": true")
	}
	no := func(condition *bool) bool { return condition != nil && !*condition }
	when.never = no(file.Always) || no(file.HasBindMounts)
	when.bindMounts = file.HasBindMounts != nil
	for key, value := range file.Annotations {
		var p pair
		if p.key, err = regexp.Compile(key); err != nil {
			return when, err
		}
		if p.value, err = regexp.Compile(value); err != nil {
			return when, err
		}
		when.annotations = append(when.annotations, p)
	}
	for _, command := range file.Commands {
		pattern, err := regexp.Compile(command)
		if err != nil {
			return when, err
		}
		when.commands = append(when.commands, pattern)
	}
	return when, nil
}

func (when *conditions) match(s *specs.Spec, annotations map[string]string, bindMounts bool) bool {
	if when.any {
		return when.bindMounts && bindMounts || when.matchesCommand(s) ||
			slices.ContainsFunc(when.annotations, func(p pair) bool { return p.in(annotations) })
	}
	if when.never || when.bindMounts && !bindMounts {
		return false
	}
	for _, p := range when.annotations {
		if !p.in(annotations) {
			return false
		}
	}
	return when.commands == nil || when.matchesCommand(s)
}

func (when *conditions) matchesCommand(s *specs.Spec) bool {
	if s.Process == nil || len(s.Process.Args) == 0 {
		return false
	}
	return slices.ContainsFunc(when.commands, func(pattern *regexp.Regexp) bool { return pattern.MatchString(s.Process.Args[0]) })
}

func (p pair) in(annotations map[string]string) bool {
	for key, value := range annotations {
		if p.key.MatchString(key) && p.value.MatchString(value) {
			return true
		}
	}
	return false
}

// checkProgram refuses a program that is missing, or that users other than root
// can change. The runtime looks up a program that runs only in the container
// there.
func (h *hook) checkProgram() error {
	if !slices.ContainsFunc(h.stages, func(stage string) bool { return stage != startContainer }) {
		return nil
	}
	if err := regular.Program(h.hook.Path); err != nil {
		return fmt.Errorf("hook file %s: hook.path %w", h.file, err)
	}
	return nil
}

// addTo adds the hook to the stages of the runtime, and reports whether it has
// the stage precreate as well.
func (h *hook) addTo(s *specs.Spec) (filters bool) {
	for _, stage := range h.stages {
		if stage == precreate {
			filters = true
			continue
		}
		if s.Hooks == nil {
			s.Hooks = &specs.Hooks{}
		}
		list := stageOf(s.Hooks, stage)
		*list = append(*list, h.hook)
	}
	return filters
}

func stageOf(hooks *specs.Hooks, stage string) *[]specs.Hook {
	switch stage {
	case createRuntime:
		return &hooks.CreateRuntime
	case createContainer:
		return &hooks.CreateContainer
	case startContainer:
		return &hooks.StartContainer
	case poststart:
		return &hooks.Poststart
	case poststop:
		return &hooks.Poststop
	default: // prestart
		return &hooks.Prestart //nolint:staticcheck // deprecated, and still what hook files ask for
	}
}
