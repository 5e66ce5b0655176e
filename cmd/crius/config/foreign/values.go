package foreign

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/crius-run/crius/server/tlsfile"
)

// The conversions of single values. Their errors say what is expected.

func typeName[T any]() string {
	switch any(*new(T)).(type) {
	case string:
		return "string"
	case bool:
		return "boolean"
	case int64:
		return "integer"
	}
	return "table"
}

func as[T any](value any) (any, error) {
	if _, ok := value.(T); !ok {
		return nil, fmt.Errorf("must be of type %s, got %s", typeName[T](), Format(value))
	}
	return value, nil
}

// not converts a switch that has the opposite meaning in crius.
func not(value any) (any, error) {
	b, ok := value.(bool)
	if !ok {
		return nil, fmt.Errorf("must be true or false, got %s", Format(value))
	}
	return !b, nil
}

// pullCgroup accepts pod or the path of a slice, of which only the last part is used.
func pullCgroup(value any) (any, error) {
	text, ok := value.(string)
	if !ok {
		return nil, fmt.Errorf("must be of type string, got %s", Format(value))
	}
	if strings.HasSuffix(text, ".slice") {
		text = filepath.Base(text)
	}
	return text, nil
}

// texts accepts a list of strings.
func texts(value any) (any, error) {
	list, err := textsOf(value)
	if err != nil {
		return nil, err
	}
	return list, nil
}

func textsOf(value any) ([]string, error) {
	items, ok := value.([]any)
	if !ok {
		return nil, fmt.Errorf("must be a list of strings, got %s", Format(value))
	}
	list := []string{}
	for _, item := range items {
		text, ok := item.(string)
		if !ok {
			return nil, fmt.Errorf("list items must be strings, got %s", Format(item))
		}
		if text != "" {
			list = append(list, text)
		}
	}
	return list, nil
}

// sysctls accepts "key = value" as well as "key=value".
func sysctls(value any) (any, error) {
	list, err := textsOf(value)
	for i, text := range list {
		name, setting, _ := strings.Cut(text, "=")
		list[i] = strings.TrimSpace(name) + "=" + strings.TrimSpace(setting)
	}
	return list, err
}

// tlsVersion accepts a TLS version by Go's name.
func tlsVersion(value any) (any, error) {
	switch value {
	case "", "VersionTLS12":
		return tlsfile.Version12, nil
	case "VersionTLS13":
		return tlsfile.Version13, nil
	}
	return nil, fmt.Errorf("must be VersionTLS12 or VersionTLS13, got %s: crius supports no older version", Format(value))
}

// atMostUnlimited accepts a number. A negative one means no limit.
func atMostUnlimited(value any) (any, error) {
	n, ok := value.(int64)
	if !ok {
		return nil, fmt.Errorf("must be of type integer, got %s", Format(value))
	}
	return max(n, 0), nil
}

// duration accepts "5m" and, like Go programs that read TOML, a number of nanoseconds.
func duration(value any) (any, error) {
	switch v := value.(type) {
	case string:
		if _, err := time.ParseDuration(v); err != nil {
			return nil, fmt.Errorf(`must be a duration such as "5m", got %q`, v)
		}
		return v, nil
	case int64:
		return time.Duration(v).String(), nil
	}
	return nil, fmt.Errorf(`must be a duration such as "5m", got %s`, Format(value))
}

// seconds accepts a number of seconds.
func seconds(value any) (any, error) {
	n, ok := value.(int64)
	if !ok || n < 0 || n > math.MaxInt64/int64(time.Second) {
		return nil, fmt.Errorf("must be a number of seconds, got %s", Format(value))
	}
	return (time.Duration(n) * time.Second).String(), nil
}

// createTimeout accepts a number of seconds as CRI-O reads it: 240 for 0, and 30 at least.
func createTimeout(value any) (any, error) {
	n, ok := value.(int64)
	if ok && n == 0 {
		value = int64(240)
	} else if ok && n > 0 {
		value = max(n, 30)
	}
	return seconds(value)
}

// logLevel accepts the levels of logrus.
func logLevel(value any) (any, error) {
	text, ok := value.(string)
	if !ok {
		return nil, fmt.Errorf("must be a log level, got %s", Format(value))
	}
	switch strings.ToLower(text) {
	case "fatal", "panic", "error":
		return "error", nil
	case "warn", "warning":
		return "warn", nil
	case "info", "":
		return "info", nil
	case "debug", "trace":
		return "debug", nil
	}
	return nil, fmt.Errorf("must be a log level, got %q", text)
}

// bytes accepts numbers with units such as "12MiB" and "500k"; k is 1024.
func bytes(text string) (int64, error) {
	wrong := fmt.Errorf(`must be a number of bytes such as "12MiB", got %q`, text)
	digits := strings.TrimLeft(text, "0123456789.")
	number, err := strconv.ParseFloat(text[:len(text)-len(digits)], 64)
	if err != nil {
		return 0, wrong
	}
	unit := strings.TrimSuffix(strings.TrimSuffix(strings.ToLower(strings.TrimSpace(digits)), "b"), "i")
	power := strings.Index(" kmgtp", unit)
	if unit == "" {
		power = 0
	}
	if power < 0 || len(unit) > 1 {
		return 0, wrong
	}
	number *= math.Pow(1024, float64(power))
	if number >= math.MaxInt64 {
		return 0, wrong
	}
	return int64(number), nil
}

// pairs converts a table of strings to a list of key=value.
func pairs(value any) (any, error) {
	entries, ok := value.(map[string]any)
	if !ok {
		return nil, errors.New("must be a table of strings")
	}
	list := []string{}
	for _, name := range slices.Sorted(maps.Keys(entries)) {
		text, ok := entries[name].(string)
		if !ok {
			return nil, fmt.Errorf("table values must be strings, got %s", Format(entries[name]))
		}
		list = append(list, name+"="+text)
	}
	return list, nil
}

// byteText is bytes as a conversion. For an empty text it sets nothing.
func byteText(value any) (any, error) {
	text, ok := value.(string)
	if !ok {
		return nil, fmt.Errorf(`must be a string such as "12MiB", got %s`, Format(value))
	}
	if text == "" {
		return int64(0), nil
	}
	return bytes(text)
}

// capabilities converts names of capabilities to capitals without prefix.
func capabilities(value any) (any, error) {
	list, err := textsOf(value)
	for i, name := range list {
		list[i] = strings.TrimPrefix(strings.ToUpper(name), "CAP_")
	}
	return list, err
}

// journal converts CRI-O's switch for writing to the journal in addition to the logs.
func journal(value any) (any, error) {
	on, ok := value.(bool)
	if !ok {
		return nil, fmt.Errorf("must be true or false, got %s", Format(value))
	}
	if on {
		return "/run/systemd/journal/socket", nil
	}
	return "", nil
}

// hostPorts converts CRI-O's switch that leaves host ports to CNI plugins.
func hostPorts(value any) (any, error) {
	off, ok := value.(bool)
	if !ok {
		return nil, fmt.Errorf("must be true or false, got %s", Format(value))
	}
	if off {
		return "cni", nil
	}
	return "auto", nil
}

// mountsFile accepts the path of mounts.conf, the only one that is read. An empty text
// means the files that crius reads by default.
func mountsFile(value any) (any, error) {
	file, ok := value.(string)
	if !ok {
		return nil, fmt.Errorf("must be of type string, got %s", Format(value))
	}
	if file == "" {
		return []string{"/etc/containers/mounts.conf", "/usr/share/containers/mounts.conf"}, nil
	}
	return []string{file}, nil
}

// irqbalanceFile accepts the path of irqbalance's configuration. CRI-O's default, which not
// all distributions have, means the files in which crius looks by default.
func irqbalanceFile(value any) (any, error) {
	file, ok := value.(string)
	if !ok {
		return nil, fmt.Errorf("must be of type string, got %s", Format(value))
	}
	switch file {
	case "":
		return []string{}, nil
	case "/etc/sysconfig/irqbalance":
		return []string{file, "/etc/default/irqbalance"}, nil
	}
	return []string{file}, nil
}

// prefixes converts the annotations that CRI-O allows.
func prefixes(value any) (any, error) {
	list, err := patternsOf(value)
	return list, err
}

// patternsOf converts CRI-O's list, whose entries are prefixes of keys, to keys and
// patterns that allow the same.
func patternsOf(value any) ([]string, error) {
	list, err := textsOf(value)
	patterns := []string{}
	for _, prefix := range list {
		patterns = append(patterns, prefix, literally(prefix)+"*", literally(prefix)+"*/*")
	}
	return patterns, err
}

// literally returns a pattern that matches only the text.
func literally(text string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(text)
}

// logFormat converts containerd's log format.
func logFormat(value any) (any, error) {
	switch value {
	case "", "text":
		return "text", nil
	case "json":
		return "json", nil
	}
	return nil, fmt.Errorf(`must be "text" or "json", got %s`, Format(value))
}

// imageVolumes converts containerd's switch. By default, containerd's volumes are writable
// even if the root file system is not.
func imageVolumes(value any) (any, error) {
	ignore, ok := value.(bool)
	if !ok {
		return nil, fmt.Errorf("must be true or false, got %s", Format(value))
	}
	if ignore {
		return "ignore", nil
	}
	return "bind", nil
}

// firstFamily converts containerd's preferred address family.
func firstFamily(value any) (any, error) {
	if value == "" {
		return "ipv4", nil
	}
	return as[string](value)
}

// perMillion converts a ratio.
func perMillion(value any) (any, error) {
	switch v := value.(type) {
	case float64:
		return int64(math.Round(v * 1e6)), nil
	case int64:
		return v * 1e6, nil
	}
	return nil, fmt.Errorf("must be a number from 0 to 1, got %s", Format(value))
}

// shortNames converts CRI-O's mode, whose default is enforcing.
func shortNames(value any) (any, error) {
	switch value {
	case "", "enforcing":
		return "enforcing", nil
	case "disabled":
		return "disabled", nil
	}
	return nil, fmt.Errorf(`must be "enforcing" or "disabled", got %s`, Format(value))
}

// criuSupport converts the switch of checkpoints.
func criuSupport(value any) (any, error) {
	on, ok := value.(bool)
	if !ok {
		return nil, fmt.Errorf("must be true or false, got %s", Format(value))
	}
	if on {
		return "criu", nil
	}
	return "", nil
}
