package shim

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"

	runc "github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/api/types/runtimeoptions/v1"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/crius-run/crius/internal/fault"
)

// Options returns a runtime's options, from lines such as
// "--SystemdCgroup=true": the field names of containerd.runc.v1.Options if the
// shim is runc's, else of runtimeoptions.v1.Options. Without lines it returns
// nil: some shims refuse a message that they do not know.
func Options(ofRunc bool, lines []string) (*anypb.Any, error) {
	if len(lines) == 0 {
		return nil, nil
	}
	var message proto.Message = new(runtimeoptions.Options)
	if ofRunc {
		message = new(runc.Options)
	}
	for _, line := range lines {
		name, value, ok := strings.Cut(strings.TrimLeft(line, "-"), "=")
		if !ok {
			return nil, fmt.Errorf("option %q is not of the form --KEY=VALUE: %w", line, fault.Invalid)
		}
		if err := set(message.ProtoReflect(), name, value); err != nil {
			return nil, err
		}
	}
	text, err := proto.Marshal(message)
	// Without a host before the name, as in containerd.
	return &anypb.Any{TypeUrl: string(message.ProtoReflect().Descriptor().FullName()), Value: text}, err
}

// set sets the field of a name in any of the spellings Root, root and
// root_path.
func set(m protoreflect.Message, name, value string) error {
	plain := func(s string) string { return strings.ToLower(strings.ReplaceAll(s, "_", "")) }
	fields := m.Descriptor().Fields()
	var known []string
	for i := range fields.Len() {
		f := fields.Get(i)
		known = append(known, string(f.Name()))
		if plain(string(f.Name())) != plain(name) {
			continue
		}
		v, err := parseValue(f.Kind(), value)
		if err != nil {
			return fmt.Errorf("%s=%s: %w: %w", name, value, err, fault.Invalid)
		}
		m.Set(f, v)
		return nil
	}
	return fmt.Errorf("unknown runtime option %q, supported are %s: %w", name, strings.Join(known, ", "), fault.Invalid)
}

func parseValue(kind protoreflect.Kind, value string) (protoreflect.Value, error) {
	switch kind {
	case protoreflect.BoolKind:
		b, err := strconv.ParseBool(value)
		return protoreflect.ValueOfBool(b), err
	case protoreflect.Uint32Kind:
		n, err := strconv.ParseUint(value, 10, 32)
		return protoreflect.ValueOfUint32(uint32(n)), err
	case protoreflect.BytesKind:
		return protoreflect.ValueOfBytes([]byte(value)), nil
	}
	if !utf8.ValidString(value) {
		return protoreflect.Value{}, errors.New("not valid UTF-8")
	}
	return protoreflect.ValueOfString(value), nil
}
