package switchover

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/crius-run/crius/cmd/crius/config"
	"github.com/crius-run/crius/cmd/crius/diagnosis"
)

// service reports what the service of the other runtime sets beside its configuration: flags and variables
// that win over the files and are not converted, variables such as those of a proxy, and limits that its
// containers inherit.
func (c *comparison) service(context.Context) []diagnosis.Finding {
	name := c.program() + ".service"
	theirs, ours := readUnit(c.root, name), readUnit(c.root, "crius.service")
	if theirs.exec.File == "" {
		return []diagnosis.Finding{diagnosis.OK("systemd has no %s: its flags and variables are not known", name)}
	}
	var findings []diagnosis.Finding
	const convert = "put what they set into the configuration files, and convert those again"
	if len(theirs.arguments) > 0 {
		findings = append(findings, diagnosis.Warn(convert, "%s runs it with %s (%s): flags win over the configuration files, and are not converted",
			name, config.Short(strings.Join(theirs.arguments, " ")), theirs.exec.File))
	}
	isFlag := func(variable string) bool { return c.program() == "crio" && strings.HasPrefix(variable, "CONTAINER_") }
	if flags, files := names(theirs.variables, isFlag); len(flags) > 0 {
		findings = append(findings, diagnosis.Warn(convert, "%s sets %s (%s): variables win over the configuration files, and are not converted",
			name, strings.Join(flags, ", "), strings.Join(files, ", ")))
	}
	isOther := func(variable string) bool {
		return !isFlag(variable) && !strings.HasPrefix(variable, "GO") && theirs.variables[variable].Value != ours.variables[variable].Value
	}
	if others, files := names(theirs.variables, isOther); len(others) > 0 {
		findings = append(findings, diagnosis.Warn("set them in /etc/default/crius, if crius needs them", "%s sets %s (%s), which crius.service does not",
			name, strings.Join(others, ", "), strings.Join(files, ", ")))
	}
	if findings = append(findings, c.limits(name, theirs, ours)...); len(findings) == 0 {
		findings = []diagnosis.Finding{diagnosis.OK("%s sets nothing beside the configuration files", name)}
	}
	return findings
}

// limits compares the limits that containers inherit from the services.
func (c *comparison) limits(name string, theirs, ours unit) []diagnosis.Finding {
	set := map[string]bool{}
	for _, ulimit := range c.now.Config.Pod.DefaultUlimits {
		key, _, _ := strings.Cut(ulimit, "=")
		set[key] = true
	}
	differs := func(key string) bool {
		has := ours.limits[key].Value
		return !set[key] && has != theirs.limits[key].Value && has != "infinity"
	}
	keys, files := names(theirs.limits, differs)
	if len(keys) == 0 {
		return nil
	}
	var units, ulimits []string
	for _, key := range keys {
		value := theirs.limits[key].Value
		units = append(units, "Limit"+strings.ToUpper(key)+"="+value)
		ulimits = append(ulimits, strconv.Quote(key+"="+ulimit(key, value)))
	}
	return []diagnosis.Finding{diagnosis.Warn(fmt.Sprintf("add %s to pod.default_ulimits, if pods rely on them", strings.Join(ulimits, ", ")),
		"containers of %s inherit %s of %s (%s), those of crius have 1024 open files, and the node's defaults",
		c.Import.Of, strings.Join(units, ", "), name, strings.Join(files, ", "))}
}

// ulimit converts the value of a Limit option of systemd.
func ulimit(key, value string) string {
	var parts []string
	for part := range strings.SplitSeq(value, ":") {
		switch {
		case part == "infinity" && key == "nofile": // the kernel has a bound
			part = "1048576"
		case part == "infinity":
			part = "unlimited"
		default:
			part = inBytes(part)
		}
		parts = append(parts, part)
	}
	return strings.Join(parts, ":")
}

// inBytes converts a size such as 64M; other texts stay as they are.
func inBytes(size string) string {
	for i, suffix := range []string{"K", "M", "G", "T"} {
		number, has := strings.CutSuffix(size, suffix)
		if n, err := strconv.ParseUint(number, 10, 32); has && err == nil {
			return strconv.FormatUint(n<<(10*(i+1)), 10)
		}
	}
	return size
}
