// Package lsm loads what the node's Linux security modules need before they can
// confine containers.
package lsm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"text/template"
	"time"

	"github.com/crius-run/crius/internal/fault"
)

// DefaultProfile is the name of the AppArmor profile that LoadDefaultProfile
// loads.
const DefaultProfile = "crius-default"

// profile allows a container everything that its capabilities, seccomp filter
// and mounts allow, except access to the node: writing to the parts of /proc
// and /sys that are not namespaced, mounting, and touching processes outside.
// Ubuntu 23.10 and later confine runtimes by their own profiles, so signals
// from these must be allowed; with no_new_privs crun stacks this profile on its
// own instead of changing to it, so the container's processes see each other
// under both.
var profile = template.Must(template.New("").Parse(`profile {{.}} flags=(attach_disconnected,mediate_deleted) {
  network,
  capability,
  file,
  umount,
  unix,

  signal (receive) peer=unconfined,
  signal (receive) peer={runc,crun,crius},
  signal (send, receive) peer={{.}},
  signal (send, receive) peer={{.}}//&{runc,crun},
  ptrace (trace, read, tracedby, readby) peer={{.}},
  ptrace (trace, read, tracedby, readby) peer={{.}}//&{runc,crun},

  deny mount,

  deny /proc/* w,
  deny /proc/{acpi,asound,bus,driver,fs,irq,scsi,sys,sysvipc,tty}/** w,
  deny /proc/{kcore,sysrq-trigger} rwklx,

  deny /sys/{block,bus,class,dev,devices,hypervisor,kernel,module,power}/** wklx,
  deny /sys/fs/{[^c],c[^g]}*/** wklx,
  deny /sys/{firmware,kernel/security,devices/virtual/powercap}/** rwklx,
}
`))

// loadTimeout is far longer than the parser needs.
const loadTimeout = 30 * time.Second

// LoadDefaultProfile loads the default profile into the kernel, replacing one
// of the same name. It needs apparmor_parser; the error is fault.Unavailable if
// that is missing, and fault.Timeout if it takes too long.
func LoadDefaultProfile(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, loadTimeout, fmt.Errorf("apparmor_parser did not finish within %s and was killed: %w", loadTimeout, fault.Timeout))
	defer cancel()
	var text bytes.Buffer
	if err := profile.Execute(&text, DefaultProfile); err != nil {
		return err
	}
	// Without the cache on disk, which is for the node's own profiles.
	cmd := exec.CommandContext(ctx, "apparmor_parser", "--replace", "--skip-cache")
	cmd.Stdin = &text
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	if errors.Is(err, exec.ErrNotFound) {
		return fmt.Errorf("apparmor_parser is missing: install the package apparmor: %w", fault.Unavailable)
	}
	if err != nil && ctx.Err() != nil { // the program's error says only that it was killed
		err = context.Cause(ctx)
	}
	if err != nil {
		return fmt.Errorf("load AppArmor profile %s: %w: %s", DefaultProfile, err, strings.TrimSpace(string(out[:min(len(out), 1000)])))
	}
	return nil
}

// loadedProfiles lists the kernel's profiles, one name with its mode per line.
const loadedProfiles = "/sys/kernel/security/apparmor/profiles"

// Ensure checks that a profile is loaded. It loads a missing default profile
// again, because tools that remove unused profiles do not know it; any other
// missing profile is fault.Precondition.
func Ensure(ctx context.Context, name string) error {
	list, err := os.ReadFile(loadedProfiles)
	if err != nil {
		return nil //nolint:nilerr // the runtime will tell
	}
	if listed(string(list), name) {
		return nil
	}
	if name == DefaultProfile {
		return LoadDefaultProfile(ctx)
	}
	return fmt.Errorf("AppArmor profile %q is not loaded on this node: load it with apparmor_parser: %w", name, fault.Precondition)
}

func listed(list, name string) bool {
	for line := range strings.Lines(list) {
		if i := strings.LastIndex(line, " ("); i >= 0 && line[:i] == name {
			return true
		}
	}
	return false
}
