package spec

import (
	"errors"
	"fmt"
	"io/fs"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/regular"
)

const maxProfileFile = 4 << 20

// ResolveSeccomp loads the localhost profile that a container's request names, as its profile or as
// the base of one, for Facts.Seccomp. It returns nil if the request names none.
func ResolveSeccomp(sc *cri.LinuxContainerSecurityContext) (*Profile, error) {
	want, err := chooseProfile(sc.GetSeccomp(), sc.GetSeccompProfilePath(), unconfined)
	if err != nil {
		return nil, fmt.Errorf("seccomp profile: %w", err)
	}
	if want.path() == "" || sc.GetPrivileged() {
		return nil, nil
	}
	if err := checkProfilePath(want.path()); err != nil {
		return nil, err
	}
	return LoadProfile(want.path())
}

// LeftUnconfined reports whether a container's request leaves it without a
// seccomp profile, so that an annotation of the pod may give it one. A
// privileged container does not count: it never has a profile.
func LeftUnconfined(sc *cri.LinuxContainerSecurityContext) bool {
	want, err := chooseProfile(sc.GetSeccomp(), sc.GetSeccompProfilePath(), unconfined)
	return err == nil && want.confinement == unconfined && !sc.GetPrivileged()
}

// SeccompName returns what messages call the profile that a container's request chooses, empty for none,
// and whether it is one of the user's, and not the runtime's default.
func SeccompName(sc *cri.LinuxContainerSecurityContext) (name string, own bool) {
	want, err := chooseProfile(sc.GetSeccomp(), sc.GetSeccompProfilePath(), unconfined)
	switch {
	case err != nil || sc.GetPrivileged() || want.confinement == unconfined:
		return "", false
	case want.confinement == runtimeDefault:
		return "RuntimeDefault", false
	}
	return want.ref, true
}

// CheckPodSeccomp refuses a pod whose localhost profile cannot be loaded. That
// profile is for the pod's infra container, which runs under the runtime's
// default instead; but a user who names a profile relies on it.
func CheckPodSeccomp(sc *cri.LinuxSandboxSecurityContext) error {
	_, err := ResolveSeccomp(&cri.LinuxContainerSecurityContext{
		Seccomp: sc.GetSeccomp(), SeccompProfilePath: sc.GetSeccompProfilePath(), Privileged: sc.GetPrivileged(),
	})
	return err
}

// LoadProfile reads a seccomp profile from the node.
func LoadProfile(path string) (*Profile, error) {
	data, err := regular.Read(path, maxProfileFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("seccomp profile %s does not exist on this node: %w", path, fault.Invalid)
	}
	if err != nil {
		return nil, fmt.Errorf("seccomp profile %w", err)
	}
	profile, err := ParseProfile(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return profile, nil
}
