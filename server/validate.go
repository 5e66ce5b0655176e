package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"time"
	"unicode"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
)

// Bounds of a request. They are generous (Kubernetes' own limits are noted),
// and each exists because something would otherwise grow without limit.
const (
	maxString    = 1 << 20 // any one string; an annotation has 256 KiB, a program's strings less (spec.MaxExecString)
	maxEntries   = 1 << 16 // any one list or map; every service of a namespace adds 7 environment variables
	maxMounts    = 1 << 12
	maxMetadata  = 1 << 20 // labels or annotations of one object in total; 256 KiB
	maxResources = 1 << 20 // the resources of an update, which are kept in memory
	maxPod       = 4 << 20 // the configuration of a pod in total; a whole pod has 1.5 MiB in etcd
	maxContainer = 8 << 20 // that of a container, whose environment may contain ConfigMaps: spec.MaxExec
	maxName      = 253     // a DNS subdomain
	maxHostname  = 64      // HOST_NAME_MAX
	maxPath      = 4095    // PATH_MAX
	maxImage     = 1024    // name, tag and digest: 255 + 128 + 135
	maxDNS       = 64      // entries of a list in dns_config; libc reads 3 servers, 32 search domains
)

// badField is an error about one field of a request. Checks know only their own
// part of the path: in prepends the rest on the way out.
type badField struct {
	path, problem string
}

func (b *badField) Error() string { return b.path + " " + b.problem }

func (b *badField) Unwrap() error { return fault.Invalid }

// bad returns an error that says what is wrong with a value and what to do
// about it. It must not quote the value itself, which may be long or secret,
// unless brief is used.
func bad(format string, args ...any) error {
	return &badField{problem: fmt.Sprintf(format, args...)}
}

// in prepends path to the field path of err, if err is a badField; other errors
// stay unchanged.
func in(path string, err error) error {
	var b *badField
	if !errors.As(err, &b) {
		return err
	}
	if b.path != "" && !strings.HasPrefix(b.path, "[") {
		path += "."
	}
	return &badField{path: path + b.path, problem: b.problem}
}

// each checks at most limit items of the list at path.
func each[T any](path string, items []T, limit int, check func(T) error) error {
	if len(items) > limit {
		return in(path, bad("has %d entries; send at most %d", len(items), limit))
	}
	for i, item := range items {
		if err := check(item); err != nil {
			return in(fmt.Sprintf("%s[%d]", path, i), err)
		}
	}
	return nil
}

// brief shortens a foreign value so that it can be quoted.
func brief(text string) string {
	const limit = 80
	if len(text) > limit {
		text = text[:limit] + "..."
	}
	return valid(text)
}

// freeText reports whether a map is the user's and only passes through.
func freeText(field protoreflect.Name) bool {
	return field == "labels" || field == "annotations" || field == "label_selector"
}

// wellFormed checks what holds for every message of CRI at any depth: enum
// values that exist, bounded strings, lists and maps, and no NUL byte, at which
// the kernel would end a path or an argument.
func wellFormed(m proto.Message) error {
	return formOf(m.ProtoReflect())
}

func formOf(m protoreflect.Message) (err error) {
	m.Range(func(field protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		err = in(string(field.Name()), formOfField(field, v))
		return err == nil
	})
	return err
}

func formOfField(field protoreflect.FieldDescriptor, v protoreflect.Value) (err error) {
	switch {
	case field.IsMap():
		if v.Map().Len() > maxEntries {
			return bad("has %d entries; send at most %d", v.Map().Len(), maxEntries)
		}
		if freeText(field.Name()) {
			return nil // checkMetadata
		}
		v.Map().Range(func(key protoreflect.MapKey, value protoreflect.Value) bool {
			err = cmp.Or(checkText(key.String()), formOfValue(field.MapValue(), value))
			return err == nil
		})
		return err
	case field.IsList():
		if v.List().Len() > maxEntries {
			return bad("has %d entries; send at most %d", v.List().Len(), maxEntries)
		}
		for i := range v.List().Len() {
			if err := formOfValue(field, v.List().Get(i)); err != nil {
				return in(fmt.Sprintf("[%d]", i), err)
			}
		}
		return nil
	default:
		return formOfValue(field, v)
	}
}

func formOfValue(field protoreflect.FieldDescriptor, v protoreflect.Value) error {
	switch field.Kind() {
	case protoreflect.MessageKind:
		return formOf(v.Message())
	case protoreflect.EnumKind:
		if field.Enum().Values().ByNumber(v.Enum()) == nil {
			return bad("is %d, an unknown value; send one of CRI %s", v.Enum(), field.Enum().Name())
		}
	case protoreflect.StringKind:
		return checkText(v.String())
	case protoreflect.BytesKind:
		return checkText(string(v.Bytes()))
	}
	return nil
}

func checkText(text string) error {
	if len(text) > maxString {
		return bad("has %d bytes; send at most %d", len(text), maxString)
	}
	if strings.ContainsRune(text, 0) {
		return bad("has a NUL byte; remove it")
	}
	return nil
}

// checkMetadata checks labels or annotations, which are returned unaltered with
// every list.
func checkMetadata(texts map[string]string) error {
	size := 0
	for key, value := range texts {
		if key == "" {
			return bad("has an empty key; name it")
		}
		size += len(key) + len(value)
	}
	if size > maxMetadata {
		return bad("has %d bytes in all; send at most %d", size, maxMetadata)
	}
	return nil
}

// checkID refuses what cannot be an id or a prefix of one. CRI clients may
// invent ids (critest sends UUIDs): those name objects that do not exist.
func checkID(field, id string) error {
	if id == "" {
		return in(field, bad("is empty; send the ID that crius returned"))
	}
	if len(id) > 64 || strings.Trim(id, "0123456789abcdef") != "" {
		return fmt.Errorf("%s %q %w", field, brief(id), fault.NotFound)
	}
	return nil
}

// knownID is for verbs that CRI requires to succeed on objects that are gone:
// an impossible id counts as unknown, which is not an error.
func knownID(field, id string) (known bool, err error) {
	err = checkID(field, id)
	if errors.Is(err, fault.NotFound) {
		return false, nil
	}
	return err == nil, err
}

// checkTimeout returns seconds as a duration; a value that does not fit means
// forever.
func checkTimeout(field string, seconds int64) (time.Duration, error) {
	if seconds < 0 {
		return 0, in(field, bad("is negative; send a number of seconds, or 0"))
	}
	if seconds > math.MaxInt64/int64(time.Second) {
		return math.MaxInt64, nil
	}
	return time.Duration(seconds) * time.Second, nil
}

// checkImage checks an image reference before storage parses it.
func checkImage(spec *cri.ImageSpec) error {
	if spec.GetImage() == "" {
		return in("image", bad("is empty; send an image name or id"))
	}
	return checkImageFilter(spec)
}

// checkImageFilter is checkImage for a filter, which need not name an image.
func checkImageFilter(spec *cri.ImageSpec) error {
	return cmp.Or(
		wellFormed(spec),
		in("image", checkReference(spec.GetImage())),
		in("user_specified_image", checkReference(spec.GetUserSpecifiedImage())),
		in("image_ref", checkReference(spec.GetImageRef())),
		in("annotations", checkMetadata(spec.GetAnnotations())),
	)
}

func checkReference(ref string) error {
	if len(ref) > maxImage {
		return bad("has %d bytes; an image reference has at most %d", len(ref), maxImage)
	}
	if strings.ContainsFunc(ref, isBlank) {
		return bad("has white space or control characters; send an image reference")
	}
	return nil
}

// checkPullImage refuses unknown handlers, as CRI requires.
func (s *imageAPI) checkPullImage(ctx context.Context, req *cri.PullImageRequest) error {
	if err := cmp.Or(wellFormed(req), in("image", checkImage(req.GetImage()))); err != nil {
		return err
	}
	return checkHandler(ctx, req.GetImage(), s.handlers)
}

func checkHandler(ctx context.Context, image *cri.ImageSpec, handlers func(context.Context) []*cri.RuntimeHandler) error {
	want := image.GetRuntimeHandler()
	if want == "" {
		return nil
	}
	var names []string
	for _, h := range handlers(ctx) {
		names = append(names, h.GetName())
	}
	if !slices.Contains(names, want) {
		return in("image.runtime_handler", bad("is %q, which is not configured; use one of %q", brief(want), names))
	}
	return nil
}

func checkExecSync(req *cri.ExecSyncRequest) (timeout time.Duration, err error) {
	timeout, err = checkTimeout("timeout", req.GetTimeout())
	return timeout, cmp.Or(err, checkCommand(req.GetCmd()), wellFormed(req), checkID("container_id", req.GetContainerId()))
}

func checkCommand(args []string) error {
	if len(args) == 0 || args[0] == "" {
		return in("cmd", bad("is empty; send the command to run"))
	}
	return cmp.Or(each("cmd", args, maxEntries, checkArgument), in("cmd", checkExecSize(sizeOf(args))))
}

func checkUpdateContainerResources(req *cri.UpdateContainerResourcesRequest) error {
	if req.GetLinux() == nil {
		return in("linux", bad("is missing; send the resources to change"))
	}
	return cmp.Or(
		wellFormed(req),
		in("linux", checkResources(req.GetLinux())),
		in("annotations", checkMetadata(req.GetAnnotations())),
		in("linux", checkSize(req.GetLinux(), maxResources)),
		checkID("container_id", req.GetContainerId()),
	)
}

func checkUpdatePodSandboxResources(req *cri.UpdatePodSandboxResourcesRequest) error {
	return cmp.Or(
		wellFormed(req),
		in("overhead", checkResources(req.GetOverhead())),
		in("resources", checkResources(req.GetResources())),
		in("overhead", checkSize(req.GetOverhead(), maxResources)),
		in("resources", checkSize(req.GetResources(), maxResources)),
		checkID("pod_sandbox_id", req.GetPodSandboxId()),
	)
}

// checkPodCIDR accepts one CIDR, or two for a dual-stack node.
func checkPodCIDR(cidrs string) error {
	list := strings.Split(cidrs, ",")
	for _, cidr := range list {
		if _, err := netip.ParsePrefix(cidr); err != nil || len(list) > 2 {
			return bad("is %q; send a CIDR such as 10.85.0.0/24, or two joined by a comma", brief(cidrs))
		}
	}
	return nil
}

func isBlank(r rune) bool { return unicode.IsSpace(r) || unicode.IsControl(r) }
