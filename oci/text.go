package oci

import (
	"fmt"
	"reflect"
	"strings"
	"unicode/utf8"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crius-run/crius/internal/fault"
)

// checkText refuses a spec with text that config.json cannot hold. The encoder would replace what
// is not UTF-8, so that a program got another value or a path led elsewhere. A request has none,
// but names on the disk have, to which links of the node and of images lead.
func checkText(spec *specs.Spec) error {
	where, text := notText(reflect.ValueOf(spec))
	if where == "" {
		return nil
	}
	return fmt.Errorf("%s of the OCI spec, %.80q, is not valid UTF-8, which config.json cannot hold: rename it, or do without the link that leads to it: %w",
		strings.TrimPrefix(where, "."), text, fault.Invalid)
}

// notText returns the first string in v that is not valid UTF-8, and its place as JSON would name
// it; the place is empty if there is none.
func notText(v reflect.Value) (where, text string) {
	switch v.Kind() {
	case reflect.String:
		if !utf8.ValidString(v.String()) {
			return ".", v.String()
		}
	case reflect.Pointer:
		if !v.IsNil() {
			return notText(v.Elem())
		}
	case reflect.Slice:
		for i := range v.Len() {
			if where, text := notText(v.Index(i)); where != "" {
				return below(fmt.Sprintf("[%d]", i), where), text
			}
		}
	case reflect.Map:
		for entry := v.MapRange(); entry.Next(); {
			for _, part := range []reflect.Value{entry.Key(), entry.Value()} {
				if where, text := notText(part); where != "" {
					return below(fmt.Sprintf("[%.80q]", entry.Key()), where), text
				}
			}
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if where, text := notText(v.Field(i)); where != "" {
				name, _, _ := strings.Cut(v.Type().Field(i).Tag.Get("json"), ",")
				return below("."+name, where), text
			}
		}
	}
	return "", ""
}

// below joins the place of a value and a place in it, "." for the value itself.
func below(outer, inner string) string { return outer + strings.TrimSuffix(inner, ".") }
