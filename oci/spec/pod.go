package spec

import (
	"fmt"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// ValidatePod refuses a pod with an invalid security context, namespaces or
// sysctls, before anything is made for it.
func ValidatePod(pod *cri.PodSandboxConfig) error {
	sc := pod.GetLinux().GetSecurityContext()
	if err := validatePodUser(sc); err != nil {
		return err
	}
	if err := validatePodNamespaces(sc.GetNamespaceOptions()); err != nil {
		return err
	}
	if _, err := chooseProfile(sc.GetSeccomp(), sc.GetSeccompProfilePath(), unconfined); err != nil {
		return fmt.Errorf("seccomp profile of the pod: %w", err)
	}
	if _, err := chooseAppArmor(sc.GetApparmor(), ""); err != nil {
		return fmt.Errorf("AppArmor profile of the pod: %w", err)
	}
	options := sc.GetNamespaceOptions()
	return ValidateSysctls(pod.GetLinux().GetSysctls(),
		options.GetNetwork() == cri.NamespaceMode_NODE, options.GetIpc() == cri.NamespaceMode_NODE)
}

func validatePodUser(sc *cri.LinuxSandboxSecurityContext) error {
	if sc.GetRunAsGroup() != nil && sc.GetRunAsUser() == nil {
		return invalid("run_as_group %d requires run_as_user", sc.GetRunAsGroup().GetValue())
	}
	if _, err := checkID("run_as_user", sc.GetRunAsUser().GetValue()); err != nil {
		return err
	}
	if _, err := checkID("run_as_group", sc.GetRunAsGroup().GetValue()); err != nil {
		return err
	}
	for _, gid := range sc.GetSupplementalGroups() {
		if _, err := checkID("supplemental group", gid); err != nil {
			return err
		}
	}
	return nil
}

func validatePodNamespaces(options *cri.NamespaceOption) error {
	for _, mode := range []cri.NamespaceMode{options.GetNetwork(), options.GetPid(), options.GetIpc()} {
		switch mode {
		case cri.NamespaceMode_POD, cri.NamespaceMode_CONTAINER, cri.NamespaceMode_NODE:
		default:
			return invalid("namespace_options: a pod's namespaces cannot have mode %s", mode)
		}
	}
	return validateUserNamespace(options.GetUsernsOptions())
}
