package network

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/template"

	"github.com/crius-run/crius/internal/fault"
)

// rendered is the name of the file in Config.ConfDir that is rendered from
// Config.ConfTemplate.
const rendered = "10-crius-net.conflist"

// podRanges is the data of a configuration template.
type podRanges struct {
	PodCIDR       string   // the first range
	PodCIDRRanges []string // all ranges
	Routes        []string // the default route of each address family among them
}

// SetPodCIDR sets the node's pod address ranges, separated by commas, as the
// kubelet announces them by UpdateRuntimeConfig. They are the "ipRanges" of
// pods planned from now on. Config.ConfTemplate, if set, is rendered with them
// and replaces 10-crius-net.conflist in Config.ConfDir atomically. An empty
// announcement changes nothing.
//
// It is fault.Invalid for malformed ranges, and fault.Precondition for a
// template that does not yield a network configuration.
func (n *Network) SetPodCIDR(cidr string) error {
	if strings.TrimSpace(cidr) == "" {
		return nil
	}
	ranges, err := parseRanges(cidr)
	if err != nil {
		return fmt.Errorf("pod CIDR: %w", err)
	}
	if n.config().ConfTemplate != "" {
		text, err := render(n.config().ConfTemplate, ranges)
		if err != nil {
			return fmt.Errorf("pod CIDR: template %s: %w", n.config().ConfTemplate, err)
		}
		if err := replace(filepath.Join(n.config().ConfDir, rendered), text, 0o644); err != nil {
			return fmt.Errorf("pod CIDR: %w", err)
		}
	}
	if n.config().PodCIDRFile != "" {
		if err := replace(n.config().PodCIDRFile, []byte(strings.Join(ranges.PodCIDRRanges, ",")), 0o600); err != nil {
			return fmt.Errorf("pod CIDR: %w", err)
		}
	}
	n.mu.Lock()
	n.podCIDRs = ranges.PodCIDRRanges
	n.mu.Unlock()
	return nil
}

// announced returns the pod address ranges, if known.
func (n *Network) announced() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.podCIDRs == nil && n.config().PodCIDRFile != "" {
		if text, err := slurp(n.config().PodCIDRFile); err == nil {
			if ranges, err := parseRanges(string(text)); err == nil {
				n.podCIDRs = ranges.PodCIDRRanges
			}
		}
	}
	return n.podCIDRs
}

func parseRanges(cidr string) (podRanges, error) {
	var r podRanges
	for _, text := range strings.Split(cidr, ",") {
		prefix, err := netip.ParsePrefix(strings.TrimSpace(text))
		if err != nil {
			return r, fmt.Errorf("%.64q is not an address range such as 10.1.0.0/24: %w", text, fault.Invalid)
		}
		r.PodCIDRRanges = append(r.PodCIDRRanges, prefix.Masked().String())
		route := "0.0.0.0/0"
		if prefix.Addr().Is6() {
			route = "::/0"
		}
		if !slices.Contains(r.Routes, route) {
			r.Routes = append(r.Routes, route)
		}
	}
	r.PodCIDR = r.PodCIDRRanges[0]
	return r, nil
}

func render(file string, ranges podRanges) ([]byte, error) {
	text, err := slurp(file)
	if err != nil {
		return nil, err
	}
	t, err := template.New(filepath.Base(file)).Parse(string(text))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", err, fault.Precondition)
	}
	var out bytes.Buffer
	if err := t.Execute(&out, ranges); err != nil {
		return nil, fmt.Errorf("%w: %w", err, fault.Precondition)
	}
	if _, err := parse(out.Bytes()); err != nil {
		return nil, fmt.Errorf("the rendered template is not a CNI configuration: %w: %w", err, fault.Precondition)
	}
	return out.Bytes(), nil
}

// replace writes text into file atomically, even if the machine stops in
// between. It does not touch a file that already contains text.
func replace(file string, text []byte, perm os.FileMode) (err error) {
	if old, err := slurp(file); err == nil && bytes.Equal(old, text) {
		return nil
	}
	dir := filepath.Dir(file)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	fresh, err := os.CreateTemp(dir, ".crius-*") // with an extension that is not read
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(fresh.Name())
		}
	}()
	_, err = fresh.Write(text)
	if err := errors.Join(err, fresh.Chmod(perm), fresh.Sync(), fresh.Close()); err != nil {
		return err
	}
	if err := os.Rename(fresh.Name(), file); err != nil {
		return err
	}
	parent, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(parent.Sync(), parent.Close())
}
