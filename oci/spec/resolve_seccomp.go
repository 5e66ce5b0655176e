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

// ResolveSeccomp loads the localhost profile that a container's request names,
// for Facts.Seccomp. It is nil where the request names none.
func ResolveSeccomp(sc *cri.LinuxContainerSecurityContext) (*Profile, error) {
	want, err := chooseProfile(sc.GetSeccomp(), sc.GetSeccompProfilePath(), unconfined)
	if err != nil {
		return nil, fmt.Errorf("seccomp profile: %w", err)
	}
	if want.confinement != localhost || sc.GetPrivileged() {
		return nil, nil
	}
	if err := checkProfilePath(want.ref); err != nil {
		return nil, err
	}
	return LoadProfile(want.ref)
}

// LeftUnconfined tells whether a container's request leaves it without a seccomp profile,
// and an annotation of the pod may give it one. Privileged containers have none.
func LeftUnconfined(sc *cri.LinuxContainerSecurityContext) bool {
	want, err := chooseProfile(sc.GetSeccomp(), sc.GetSeccompProfilePath(), unconfined)
	return err == nil && want.confinement == unconfined && !sc.GetPrivileged()
}

// CheckPodSeccomp refuses a pod whose own localhost profile cannot be loaded. It
// is for the pod's infra container, which has the runtime's default instead; but
// whoever names a profile relies on it.
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
