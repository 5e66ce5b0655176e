package spec

import (
	"fmt"
	"path"
	"slices"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// privilege refuses a privileged container in a pod that is not declared to
// have privileged containers, neither by its own request nor by PrivilegedPod.
func privilege(in *Input, _ *specs.Spec) error {
	if in.privileged() && !in.podSecurity().GetPrivileged() && !in.Request.PrivilegedPod {
		return invalid("a privileged container needs a privileged pod: set privileged in the security context of sandbox_config too")
	}
	return nil
}

// pathMasks hides the parts of /proc and /sys that reveal or change the node.
// The kubelet sends complete lists and, for procMount Unmasked, empty ones, so
// empty lists in a security context hide nothing; a request without a security
// context gets the defaults.
func pathMasks(in *Input, s *specs.Spec) error {
	sc := in.security()
	switch {
	case in.privileged():
		return nil
	case sc == nil:
		s.Linux.MaskedPaths = defaultMaskedPaths()
		s.Linux.ReadonlyPaths = defaultReadonlyPaths()
		return nil
	}
	for _, hidden := range slices.Concat(sc.GetMaskedPaths(), sc.GetReadonlyPaths()) {
		if !path.IsAbs(hidden) {
			return invalid("masked or read-only path %q is not absolute", hidden)
		}
	}
	s.Linux.MaskedPaths = cleaned(sc.GetMaskedPaths())
	s.Linux.ReadonlyPaths = slices.DeleteFunc(cleaned(sc.GetReadonlyPaths()), func(hidden string) bool {
		return slices.Contains(s.Linux.MaskedPaths, hidden) // its mask is read-only as well
	})
	// Kubelets before 1.29 do not mask it.
	if len(s.Linux.MaskedPaths) > 0 && !slices.Contains(s.Linux.MaskedPaths, powercap) {
		s.Linux.MaskedPaths = append(s.Linux.MaskedPaths, powercap)
	}
	return nil
}

// cleaned returns the paths as the kernel lists mounts at them.
func cleaned(paths []string) []string {
	all := slices.Clone(paths)
	for i, p := range all {
		all[i] = path.Clean(p)
	}
	return all
}

// powercap shows the processor's energy use, precisely enough to reveal what
// other programs compute (GHSA-7ww5-4wqc-m92c).
const powercap = "/sys/devices/virtual/powercap"

func defaultMaskedPaths() []string {
	return []string{
		"/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys",
		"/proc/latency_stats", "/proc/sched_debug", "/proc/scsi", "/proc/timer_list",
		"/proc/timer_stats", "/sys/firmware", powercap,
	}
}

func defaultReadonlyPaths() []string {
	return []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}
}

// confinement is the kind of seccomp or AppArmor confinement that a request
// chooses.
type confinement int

const (
	unconfined confinement = iota
	runtimeDefault
	localhost
	pulled // seccomp only: a profile of a registry together with its base profile
)

// choice is a confinement and the profile's name or path, for localhost, or its reference, for
// pulled.
type choice struct {
	confinement
	ref  string
	base string // of pulled: path of the base profile; empty: it is the default profile
}

// path returns the path of the seccomp profile on the node that the choice needs; empty: none.
func (c choice) path() string {
	switch c.confinement {
	case localhost:
		return c.ref
	case pulled:
		return c.base
	}
	return ""
}

// chooseProfile reads the profile field or, if a kubelet up to 1.18 left it
// out, the deprecated string; it returns absent if neither is set. A localhost
// profile without a name is an error, never no profile (CVE-2023-2431).
func chooseProfile(profile *cri.SecurityProfile, deprecated string, absent confinement) (choice, error) {
	if profile != nil {
		switch profile.GetProfileType() {
		case cri.SecurityProfile_RuntimeDefault:
			return choice{confinement: runtimeDefault}, nil
		case cri.SecurityProfile_Unconfined:
			return choice{confinement: unconfined}, nil
		case cri.SecurityProfile_Localhost:
			return localhostProfile(profile.GetLocalhostRef())
		case cri.SecurityProfile_OCI:
			return pulledProfile(profile)
		}
		return choice{}, invalid("profile type %d is unknown", profile.GetProfileType())
	}
	switch deprecated {
	case "":
		return choice{confinement: absent}, nil
	case "unconfined":
		return choice{confinement: unconfined}, nil
	case "runtime/default", "docker/default":
		return choice{confinement: runtimeDefault}, nil
	}
	ref, ok := strings.CutPrefix(deprecated, "localhost/")
	if !ok {
		return choice{}, invalid("profile %q: must be runtime/default, unconfined or localhost/…", deprecated)
	}
	return localhostProfile(ref)
}

func localhostProfile(ref string) (choice, error) {
	control := func(r rune) bool { return r < ' ' || r == 0x7f }
	if ref == "" || len(ref) > 4096 || strings.ContainsFunc(ref, control) {
		return choice{}, invalid("a localhost profile needs a name")
	}
	return choice{confinement: localhost, ref: ref}, nil
}

func pulledProfile(profile *cri.SecurityProfile) (choice, error) {
	want := choice{confinement: pulled, ref: profile.GetOciRef()}
	if want.ref == "" {
		return choice{}, invalid("a profile of type OCI needs an oci_ref")
	}
	switch base := profile.GetBaseProfile(); base.GetType() {
	case cri.SecurityProfileBase_RuntimeDefault: // also if there is none
		return want, nil
	case cri.SecurityProfileBase_Localhost:
		local, err := localhostProfile(base.GetLocalhostRef())
		want.base = local.ref
		return want, err
	default:
		return choice{}, invalid("base profile type %d is unknown", base.GetType())
	}
}

// chooseAppArmor is chooseProfile for AppArmor, which has no profiles of registries.
func chooseAppArmor(profile *cri.SecurityProfile, deprecated string) (choice, error) {
	want, err := chooseProfile(profile, deprecated, runtimeDefault)
	if err == nil && want.confinement == pulled {
		err = invalid("type OCI is for seccomp profiles; name a loaded profile by type Localhost")
	}
	return want, err
}

// appArmorProfile writes the AppArmor profile, if the node has AppArmor.
func appArmorProfile(in *Input, s *specs.Spec) (err error) {
	s.Process.ApparmorProfile, err = in.appArmor()
	return err
}

func (in *Input) appArmor() (string, error) {
	sc := in.security()
	want, err := chooseAppArmor(sc.GetApparmor(), sc.GetApparmorProfile())
	if err == nil && want.confinement == localhost {
		// The kubelet sends the profile's name; other clients prefix it as in the
		// deprecated string.
		want, err = localhostProfile(strings.TrimPrefix(want.ref, "localhost/"))
	}
	if err != nil {
		return "", fmt.Errorf("AppArmor profile: %w", err)
	}
	enabled := in.Facts.Host.AppArmor
	if f := in.linuxFeatures(); f != nil && f.Apparmor != nil && f.Apparmor.Enabled != nil {
		enabled = enabled && *f.Apparmor.Enabled
	}
	switch {
	case in.privileged() || want.confinement == unconfined:
		return "", nil
	case want.confinement == localhost && want.ref == "unconfined":
		return "", invalid("AppArmor profile: a localhost profile cannot be called unconfined")
	case want.confinement == localhost && !enabled:
		return "", unimplemented("AppArmor profile %q: AppArmor is not enabled on this node: run the pod where it is, or take the profile from it", want.ref)
	case want.confinement == localhost:
		return want.ref, nil
	case !enabled:
		return "", nil
	}
	return in.Defaults.AppArmorProfile, nil
}
