package config

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"reflect"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// assign sets the option dst to a value from the TOML decoder. If the value does not fit,
// it returns an error that says what is expected, and does not change dst.
func assign(dst reflect.Value, src any) error {
	switch p := dst.Addr().Interface().(type) {
	case *string:
		return assignAs(p, src)
	case *bool:
		return assignAs(p, src)
	case *int64:
		return assignAs(p, src)
	case *int:
		number := int64(*p)
		if err := assignAs(&number, src); err != nil {
			return err
		}
		if dst.OverflowInt(number) { // int has 32 bits on some architectures
			return fmt.Errorf("must be from %d to %d, got %d", math.MinInt, math.MaxInt, number)
		}
		*p = int(number)
		return nil
	case *time.Duration:
		return assignDuration(p, src)
	case *fs.FileMode:
		return assignMode(p, src)
	case *[]string:
		return assignList(p, src)
	}
	panic(unsupported(dst))
}

func assignAs[T any](dst *T, src any) error {
	value, ok := src.(T)
	if !ok {
		return fmt.Errorf("must be of type %s, got %s", typeName(reflect.ValueOf(dst).Elem()), describe(src))
	}
	*dst = value
	return nil
}

// assignDuration refuses bare numbers: "timeout = 5" would mean nanoseconds.
func assignDuration(dst *time.Duration, src any) error {
	text, ok := src.(string)
	if !ok {
		return fmt.Errorf(`must be a duration in quotes such as "5m" or "1m30s", got %s`, describe(src))
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		return fmt.Errorf(`must be a duration such as "5m" or "1m30s", got %q`, text)
	}
	*dst = d
	return nil
}

// assignMode accepts 0o660, "0660" and "660". The bound refuses most numbers that were
// meant as octal but written as decimal: 660 is 0o1224.
func assignMode(dst *fs.FileMode, src any) error {
	var mode uint64
	switch src := src.(type) {
	case int64:
		mode = uint64(src)
	case string:
		var err error
		if mode, err = strconv.ParseUint(strings.TrimPrefix(src, "0o"), 8, 32); err != nil {
			return fmt.Errorf(`must be permission bits such as 0o660, got %q`, src)
		}
	default:
		return fmt.Errorf("must be permission bits such as 0o660, got %s", describe(src))
	}
	if mode > 0o777 {
		return fmt.Errorf(`must be permission bits such as 0o660 (octal numbers begin with 0o), got %v`, src)
	}
	*dst = fs.FileMode(mode)
	return nil
}

func assignList(dst *[]string, src any) error {
	items, ok := src.([]any)
	if !ok {
		return fmt.Errorf("must be a list of strings, got %s", describe(src))
	}
	list := make([]string, len(items))
	for i, item := range items {
		text, ok := item.(string)
		if !ok {
			return fmt.Errorf("list items must be strings, got %s", describe(item))
		}
		list[i] = text
	}
	*dst = list
	return nil
}

// assignText sets dst to a value from the command line. Each use of a list's flag adds one
// item; an empty text adds none, so that a list can be emptied.
func assignText(dst reflect.Value, text string, first bool) error {
	if !utf8.ValidString(text) {
		return errors.New("must be valid UTF-8")
	}
	switch p := dst.Addr().Interface().(type) {
	case *bool:
		b, err := strconv.ParseBool(text)
		if err != nil {
			return errors.New("must be true or false")
		}
		return assign(dst, b)
	case *int, *int64:
		n, err := strconv.ParseInt(text, 0, dst.Type().Bits())
		if err != nil {
			return errors.New("must be a number")
		}
		return assign(dst, n)
	case *[]string:
		if first {
			*p = []string{}
		}
		if text != "" {
			*p = append(*p, text)
		}
		return nil
	}
	return assign(dst, text)
}

// typeName returns the name of an option's type for people.
func typeName(v reflect.Value) string {
	switch v.Interface().(type) {
	case string:
		return "string"
	case bool:
		return "boolean"
	case int, int64:
		return "integer"
	case time.Duration:
		return "duration"
	case fs.FileMode:
		return "mode"
	case []string:
		return "list of strings"
	}
	panic(unsupported(v))
}

// describe formats a decoded TOML value for an error.
func describe(v any) string {
	switch v := v.(type) {
	case string:
		return "the string " + format(v)
	case bool, int64, float64:
		return fmt.Sprintf("%v", v)
	case map[string]any:
		return "a table"
	case []map[string]any:
		return "an array of tables"
	case []any:
		return "a list"
	}
	return "a date or time"
}

// unsupported is the panic for an option of an unsupported type. Any test that walks the
// options finds it.
func unsupported(v reflect.Value) string {
	return fmt.Sprintf("config: options of type %s are not supported", v.Type())
}

// format formats an option's value in TOML.
func format(v any) string {
	switch v := v.(type) {
	case string:
		return quote(v)
	case time.Duration:
		return quote(formatDuration(v))
	case fs.FileMode:
		return fmt.Sprintf("0o%03o", uint32(v))
	case []string:
		items := make([]string, len(v))
		for i, item := range v {
			items[i] = quote(item)
		}
		return "[" + strings.Join(items, ", ") + "]"
	}
	return fmt.Sprint(v)
}

// formatDuration is Duration.String without trailing zeros: 5m, not 5m0s.
func formatDuration(d time.Duration) string {
	text := d.String()
	if strings.HasSuffix(text, "m0s") {
		text = strings.TrimSuffix(text, "0s")
	}
	if strings.HasSuffix(text, "h0m") {
		text = strings.TrimSuffix(text, "0m")
	}
	return text
}

// quote formats a TOML basic string without control sequences that could reach a terminal
// (CVE-2021-25743).
func quote(s string) string {
	var b strings.Builder
	b.WriteByte('"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			b.WriteRune('\\')
			b.WriteRune(r)
		case unicode.IsPrint(r):
			b.WriteRune(r)
		default:
			fmt.Fprintf(&b, `\U%08X`, r)
		}
	}
	b.WriteByte('"')
	return b.String()
}

// plain formats an option's value for the command line's help.
func plain(v any) string {
	switch v := v.(type) {
	case string:
		return v
	case []string:
		if len(v) == 0 {
			return ""
		}
		return "[" + strings.Join(v, ", ") + "]"
	case time.Duration:
		return formatDuration(v)
	}
	return format(v)
}
