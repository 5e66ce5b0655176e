package pod

import (
	"context"
	"fmt"
	"log/slog"
	"maps"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/lsm"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/oci/spec"
	"github.com/crius-run/crius/pod/blueprint"
)

// defaults parses the node's policy, and resolves the devices and files that it names.
func (c *Config) defaults(ctx context.Context, hostPaths *conmon.HostPaths) (spec.Defaults, error) {
	defaults := spec.Defaults{Env: c.DefaultEnv, PidsLimit: c.PidsLimit, ReadOnly: c.ReadOnly, DeviceOwnership: c.DeviceOwnership}
	var err error
	if defaults.Capabilities, err = spec.ParseCapabilities(c.DefaultCapabilities); err != nil {
		return defaults, fmt.Errorf("pod.default_capabilities: %w", err)
	}
	sysctls, err := spec.ParseSysctls(c.DefaultSysctls)
	if err != nil {
		return defaults, fmt.Errorf("pod.default_sysctls: %w", err)
	}
	defaults.Sysctls = spec.Unprivileged(c.UnprivilegedPorts, c.UnprivilegedPing)
	maps.Copy(defaults.Sysctls, sysctls)
	for _, text := range c.DefaultUlimits {
		limit, err := spec.ParseUlimit(text)
		if err != nil {
			return defaults, fmt.Errorf("pod.default_ulimits: %w", err)
		}
		defaults.Ulimits = append(defaults.Ulimits, limit)
	}
	if err := spec.CheckOpenFiles(defaults.Ulimits, spec.MaxOpenFiles()); err != nil { // no container would start
		return defaults, fmt.Errorf("pod.default_ulimits: %w", err)
	}
	var devices []*cri.Device
	for _, text := range c.AdditionalDevices {
		device, err := spec.ParseDevice(text)
		if err != nil {
			return defaults, fmt.Errorf("pod.additional_devices: %w", err)
		}
		devices = append(devices, device)
	}
	var paths []string
	for _, d := range devices {
		paths = append(paths, d.GetHostPath())
	}
	if _, err := hostPaths.Look(ctx, paths); err != nil {
		return defaults, fmt.Errorf("pod.additional_devices: %w", err)
	}
	if defaults.Devices, err = spec.ResolveDevices(devices); err != nil {
		return defaults, fmt.Errorf("pod.additional_devices: %w", err)
	}
	if c.SeccompProfile != "" {
		if defaults.Seccomp, err = spec.LoadProfile(c.SeccompProfile); err != nil {
			return defaults, fmt.Errorf("pod.seccomp_profile: %w", err)
		}
	}
	return defaults, nil
}

// defaultsOf returns the node's defaults as a handler changes them.
func defaultsOf(handler oci.Handler, name string, defaults spec.Defaults) (spec.Defaults, error) {
	defaults = blueprint.OfHandler(defaults, handler)
	var err error
	if handler.SeccompProfile != "" {
		if defaults.Seccomp, err = spec.LoadProfile(handler.SeccompProfile); err != nil {
			return defaults, fmt.Errorf("runtime.handlers.%s.seccomp_profile: %w", name, err)
		}
	}
	if handler.BaseRuntimeSpec != "" {
		if defaults.Base, err = spec.LoadBase(handler.BaseRuntimeSpec); err != nil {
			return defaults, fmt.Errorf("runtime.handlers.%s.base_runtime_spec: %w", name, err)
		}
	}
	return defaults, nil
}

// loadedProfile returns the AppArmor profile of RuntimeDefault. If the node cannot load crius's
// own, because it lacks AppArmor's tools, containers run without one, as with other runtimes;
// the log says so.
func loadedProfile(ctx context.Context, name string) string {
	if name != lsm.DefaultProfile {
		return name
	}
	if err := lsm.LoadDefaultProfile(ctx); err != nil {
		slog.Error("containers run without an AppArmor profile", "err", err)
		return ""
	}
	return name
}
