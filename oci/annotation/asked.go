// Package annotation reads annotations by which pods request something from
// crius itself, where the CRI has no field. What it reads is hostile: it checks
// each value, which has an effect only where the configuration allows it.
//
// Errors wrap fault.Invalid, or fault.Denied for what this pod may not have.
package annotation

import (
	"encoding/base64"
	"fmt"
	"maps"
	"math"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/oci/spec"
	"github.com/crius-run/crius/oci/tuning"
)

// Asked is what a pod requests. Most annotations are CRI-O's, in both of their
// spellings (its pkg/annotations/v2), some are containerd's or crius's own. They
// take effect if the pod's handler or workload allows them.
type Asked struct {
	ShmSize         int64         // of the pod's /dev/shm in bytes; 0: not requested
	Devices         []*cri.Device // for each container
	Umask           *uint32       // of each container's first process
	WritableCgroups bool          // containers may make cgroups below their own; cgroup v2
	DisableFIPS     bool          // containers do not see that the node is in FIPS mode
	LogVolume       string        // emptyDir volume in which containers see the pod's logs

	// Tuning is for containers with exclusive CPUs; TuningOf says what one of them asks for.
	Tuning tuning.Wishes

	tuning   map[string]map[string]string   // values of containers' own requests for CPUs, by container and name
	unified  map[string]map[string]string   // files of cgroup v2, by container
	profiles map[string]string              // OCI artifacts with seccomp profiles, by container
	layers   map[string]int64               // sizes of writable layers, by container; "": of all others
	ulimits  map[string][]specs.POSIXRlimit // the same of ulimits

	workload  *Workload      // of the pod; nil: none
	overrides map[string]CPU // by container

	// Allowed are the annotations that the handler and the workload allow.
	Allowed []string
	// Ignored are the annotations that request something and have no effect: the
	// handler does not allow them, or crius does not implement them. They are
	// sorted.
	Ignored []string
}

// Names of requests in the newer spelling, which is followed by a domain.
const (
	askShmSize = "shm-size"
	askDevices = "devices"
	askUmask   = "umask"
	askUnified = "unified-cgroup"
	askCgroups = "cgroup2-mount-hierarchy-rw"
	askNoFIPS  = "disable-fips"
	askLogs    = "link-logs"
	askSeccomp = "seccomp-profile"
	askDomain  = ".crio.io"
)

// oldSpelling maps what crius implements to its old spelling. A request with
// only one spelling maps to that.
var oldSpelling = map[string]string{
	askShmSize: "io.kubernetes.cri-o.ShmSize",
	askDevices: "io.kubernetes.cri-o.Devices",
	askUmask:   "io.kubernetes.cri-o.umask",
	askUnified: "io.kubernetes.cri-o.UnifiedCgroup",
	askCgroups: "io.kubernetes.cri-o.cgroup2-mount-hierarchy-rw",
	askNoFIPS:  "io.kubernetes.cri-o.DisableFIPS",
	askLogs:    "io.kubernetes.cri-o.LinkLogs",
	askSeccomp: "seccomp-profile.kubernetes.cri-o.io",

	askInterrupts: askInterrupts + askDomain,
	askBalancing:  askBalancing + askDomain,
	askQuota:      askQuota + askDomain,
	askLatency:    askLatency + askDomain,
	askGovernor:   askGovernor + askDomain,
	askShared:     askShared + askDomain,

	askLayerSize: LayerSizeKey,
	askUlimits:   askUlimits,
}

// perContainer are the requests whose key names a container, mayNameContainer those whose key may.
var (
	perContainer     = []string{askUnified, askShared, askSeccomp}
	mayNameContainer = []string{askInterrupts, askBalancing, askQuota, askLayerSize, askUlimits}
)

func wellNamed(name, container string) bool {
	return slices.Contains(perContainer, name) == (container != "") || slices.Contains(mayNameContainer, name)
}

// allContainers stands in the key of a seccomp profile for all containers
// without their own.
const allContainers = "POD"

// NotDone are the requests that CRI-O implements and crius does not, by their old spelling: the
// newer one, and what that means for a pod whose handler allows it.
var NotDone = map[string]struct{ Key, Means string }{
	"io.kubernetes.cri-o.PlatformRuntimePath":       {"platform-runtime-path" + askDomain, "the pod runs with the runtime of its handler"},
	"io.kubernetes.cri-o.seccompNotifierAction":     {"seccomp-notifier-action" + askDomain, "system calls that are denied are not reported, and stop no container"},
	"io.kubernetes.cri-o.Spoofed":                   {"spoofed" + askDomain, "the containers run"},
	"io.kubernetes.cri-o.TrySkipVolumeSELinuxLabel": {"try-skip-volume-selinux-label" + askDomain, "volumes are relabelled where the kubelet asks for it"},
	askUserns: {"userns-mode" + askDomain, "the pod is refused, which would otherwise run without the user namespace that it asks for: set hostUsers: false in it"},
}

// askUserns asks for a user namespace whose IDs the runtime chooses.
const askUserns = "io.kubernetes.cri-o.userns-mode"

// Rules are what the configuration says about a pod's annotations.
type Rules struct {
	// Allowed are the keys that the pod's handler allows, in either spelling, and
	// patterns, which do not apply to requests to crius.
	Allowed []string
	Devices []string // of the host that a pod may request
	Ulimits []string // that a pod may request, with the largest values, as ParseUlimit of package spec reads them
	// UserNamespace reports whether the pod has one, by hostUsers: false.
	UserNamespace bool
	Workloads     map[string]Workload
}

// Read reads the annotations of a pod.
func Read(annotations map[string]string, rules Rules) (Asked, error) {
	a := Asked{Allowed: rules.Allowed}
	if err := a.joinWorkload(annotations, rules.Workloads); err != nil {
		return Asked{}, err
	}
	if a.workload != nil {
		a.Allowed = slices.Concat(a.Allowed, a.workload.Allowed)
	}
	if err := a.checkIsolation(annotations, rules.UserNamespace); err != nil {
		return Asked{}, err
	}
	for _, key := range slices.Sorted(maps.Keys(annotations)) {
		name, container := nameAsked(key)
		switch {
		case name == "":
		case !wellNamed(name, container), oldSpelling[name] == "", !allowsAsked(a.Allowed, name):
			a.Ignored = append(a.Ignored, key)
		default:
			if err := a.read(name, container, strings.TrimSpace(annotations[key]), rules); err != nil {
				return Asked{}, ofKey(key, err)
			}
		}
	}
	return a, nil
}

// checkIsolation refuses a pod that may ask for a user namespace, asks for one by annotation, and
// has none: it would run with less isolation than it asks for.
func (a *Asked) checkIsolation(annotations map[string]string, has bool) error {
	for _, key := range []string{askUserns, NotDone[askUserns].Key} {
		mode := strings.TrimSpace(annotations[key])
		if has || mode == "" || mode == "host" || !a.names(askUserns) && !a.names(NotDone[askUserns].Key) {
			continue
		}
		return ofKey(key, fmt.Errorf("the handler allows it, but crius makes user namespaces only for pods with hostUsers: false: set that instead, or remove the annotation from allowed_annotations to run the pod without one: %w", fault.Denied))
	}
	return nil
}

// names reports whether the allowed annotations include a key, by itself or by a pattern.
func (a *Asked) names(key string) bool {
	return slices.ContainsFunc(a.Allowed, func(pattern string) bool {
		matches, err := path.Match(pattern, key)
		return pattern == key || matches && err == nil
	})
}

func ofKey(key string, err error) error { return fmt.Errorf("annotation %s: %w", key, err) }

// nameAsked returns what a key requests, and for which container if it names
// one; empty if it requests nothing.
func nameAsked(key string) (name, container string) {
	if key == LayerSizeKey {
		return askLayerSize, ""
	}
	base, container, _ := strings.Cut(key, "/")
	for name, old := range oldSpelling {
		if base == old {
			return name, container
		}
	}
	for _, before := range []string{oldSpelling[askUnified], askUnified + askDomain} {
		if container, is := strings.CutPrefix(key, before+"."); is {
			return askUnified, container
		}
	}
	if _, is := NotDone[base]; is {
		return base, container
	}
	if strings.HasSuffix(base, ownDomain) {
		return base, container
	}
	if name, is := strings.CutSuffix(base, askDomain); is && !strings.HasSuffix(name, ownDomain) {
		return name, container
	}
	return "", ""
}

// allowsAsked reports whether a request is allowed by name. A pattern does not
// allow it: operators write or import patterns to pass on what a runtime may
// read; letting crius itself act takes an explicit name.
func allowsAsked(allowed []string, name string) bool {
	other := name + askDomain
	if strings.HasSuffix(name, ownDomain) {
		other = name
	}
	return slices.Contains(allowed, oldSpelling[name]) || slices.Contains(allowed, other)
}

var (
	umask = regexp.MustCompile(`^[0-7]{1,4}$`)
	label = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`) // RFC 1123
)

func (a *Asked) read(name, container, value string, rules Rules) (err error) {
	switch name {
	case askShmSize:
		a.ShmSize, err = parseQuantity(value)
	case askDevices:
		a.Devices, err = askedDevices(value, rules.Devices)
	case askUmask:
		if !umask.MatchString(value) {
			return invalid("umask %.20q is not an octal number of up to four digits", value)
		}
		mask, _ := strconv.ParseUint(value, 8, 32)
		a.Umask = new(uint32(mask) & 0o777)
	case askUnified:
		if a.unified == nil {
			a.unified = map[string]map[string]string{}
		}
		a.unified[container], err = askedFiles(value)
	case askCgroups:
		a.WritableCgroups, err = parseBool(value)
	case askNoFIPS:
		a.DisableFIPS, err = parseBool(value)
	case askLogs:
		if !label.MatchString(value) {
			return invalid("%.80q is not the name of a volume", value)
		}
		a.LogVolume = value
	case askSeccomp:
		if a.profiles == nil {
			a.profiles = map[string]string{}
		}
		a.profiles[container] = value
	case askLayerSize:
		err = a.readLayerSize(container, value)
	case askUlimits:
		err = a.readUlimits(container, value, rules.Ulimits)
	default:
		err = a.readTuning(name, container, value)
	}
	return err
}

func parseBool(text string) (bool, error) {
	is, err := strconv.ParseBool(text)
	if err != nil {
		return false, invalid("must be true or false, got %.20q", text)
	}
	return is, nil
}

// factors are the units of a Kubernetes quantity.
var factors = map[string]int64{
	"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12,
	"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40,
}

// parseQuantity reads an integer quantity, such as 128Mi.
func parseQuantity(text string) (int64, error) {
	digits := strings.TrimRight(text, "kMGTi")
	n, err := strconv.ParseInt(digits, 10, 64)
	factor, known := factors[text[len(digits):]]
	if err != nil || !known || n <= 0 || n > math.MaxInt64/factor {
		return 0, invalid("must be a size in bytes such as 128Mi, got %.40q", text)
	}
	return n * factor, nil
}

// askedDevices reads HOST[:CONTAINER[:PERMISSIONS]], separated by commas.
func askedDevices(text string, allowed []string) ([]*cri.Device, error) {
	var list []*cri.Device
	for item := range strings.SplitSeq(text, ",") {
		if item = strings.TrimSpace(item); item == "" {
			continue
		}
		d, err := spec.ParseDevice(item)
		if err != nil {
			return nil, err
		}
		if !slices.Contains(allowed, path.Clean(d.GetHostPath())) {
			return nil, fmt.Errorf("device %.200s is not in pod.allowed_devices: %w", d.GetHostPath(), fault.Denied)
		}
		list = append(list, d)
	}
	return list, nil
}

// askedFiles reads FILE=VALUE, separated by semicolons. A value may be in
// base64, because the values of some files contain semicolons.
func askedFiles(text string) (map[string]string, error) {
	files := map[string]string{}
	for item := range strings.SplitSeq(text, ";") {
		file, value, found := strings.Cut(item, "=")
		if !found {
			return nil, invalid("must be of the form FILE=VALUE;FILE=VALUE, got %.80q", item)
		}
		if decoded, err := base64.StdEncoding.DecodeString(value); err == nil {
			value = string(decoded)
		}
		files[strings.TrimSpace(file)] = value
	}
	return files, nil
}

// SeccompProfile returns the name of the OCI artifact with the seccomp profile
// for a container; empty: none.
func (a Asked) SeccompProfile(container string) string {
	if own, given := a.profiles[container]; given {
		return own
	}
	return a.profiles[allContainers]
}

// Resources returns a container's resources with the files that the pod
// requests, which override those of r.
func (a Asked) Resources(container string, r *cri.LinuxContainerResources) *cri.LinuxContainerResources {
	files := a.unified[container]
	if len(files) == 0 {
		return r
	}
	all := &cri.LinuxContainerResources{}
	if r != nil {
		all = proto.CloneOf(r)
	}
	if all.Unified == nil {
		all.Unified = map[string]string{}
	}
	maps.Copy(all.Unified, files)
	return all
}

func invalid(format string, args ...any) error {
	return fmt.Errorf(format+": %w", append(args, fault.Invalid)...)
}
