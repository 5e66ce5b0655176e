package nri

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/plugin"
	validator "github.com/containerd/nri/plugins/default-validator"
	"go.yaml.in/yaml/v3"

	"github.com/crius-run/crius/internal/fault"
)

// answered sends a request to the plugins. It is fault.Denied if a required plugin was asked and
// did not answer: the library disconnects such a plugin, goes on without it and, since it was
// there at first, does not miss it (containerd/nri#316).
func (p *Plugins) answered(pod *api.PodSandbox, container string, send func() error) error {
	required := p.required(pod, container)
	if len(required) == 0 {
		return send()
	}
	// The library handles one request after the other: a failure of another is not one of this.
	p.asking.Lock()
	defer p.asking.Unlock()
	before := p.states.failures(required)
	if err := send(); err != nil {
		return err
	}
	for name, n := range p.states.failures(required) {
		if n > before[name] {
			return fmt.Errorf("required NRI plugin %s did not answer and was disconnected: check that it runs, or raise nri.request_timeout: %w", name, fault.Denied)
		}
	}
	return nil
}

// required returns the plugins without which a pod or container must not be created, as the
// library's validator finds them. It reports malformed annotations when a container is created.
func (p *Plugins) required(pod *api.PodSandbox, container string) []string {
	rules := p.cfg.Validator
	if !rules.Enable {
		return nil
	}
	if value, set := plugin.GetEffectiveAnnotation(pod, rules.TolerateMissingWith, container); set && rules.TolerateMissingWith != "" {
		if tolerates, err := strconv.ParseBool(value); tolerates || err != nil {
			return nil
		}
	}
	names := slices.Clone(rules.RequiredPlugins)
	if value, set := plugin.GetEffectiveAnnotation(pod, validator.RequiredPlugins, container); set {
		var more []string
		if yaml.Unmarshal([]byte(value), &more) == nil {
			names = append(names, more...)
		}
	}
	return names
}

// failures returns how many requests each of these plugins has failed. A plugin may be named with
// or without its index.
func (s *states) failures(of []string) map[string]uint64 {
	failures := map[string]uint64{}
	if len(of) == 0 {
		return failures
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for name, state := range s.byName {
		_, bare, _ := strings.Cut(name, "-")
		if slices.Contains(of, name) || slices.Contains(of, bare) {
			failures[name] = state.Failures
		}
	}
	return failures
}
