package main

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
)

// denial matches the parts of an audit(8) record that identify the denied
// access.
var denial = regexp.MustCompile(`type=(?:AVC|USER_AVC) .*denied +(\{[^}]*\}) .*?(?:comm="?([^" ]*)"? .*)?scontext=(\S+) tcontext=(\S+) tclass=(\S+)`)

// denials writes what SELinux has denied since the boot, and returns what was
// not provoked.
func (s *seLinuxNode) denials() (wrong []string) {
	log, err := os.ReadFile(auditLog)
	if err != nil {
		return []string{err.Error()}
	}
	found := readDenials(string(log), s.strangers)
	if found.provoked == 0 {
		wrong = append(wrong, "no denial was recorded of the pods that were to be denied something")
	}
	if err := os.WriteFile("out/denials", []byte(found.String()), 0o644); err != nil {
		wrong = append(wrong, err.Error())
	}
	for _, line := range found.lines() {
		wrong = append(wrong, "denied: "+line)
	}
	return wrong
}

// found are the denials of a log.
type found struct {
	provoked int
	other    map[string]int // by what was denied
}

// readDenials counts denials; those of processes with a context in provokers
// were provoked, and so were those between processes of different levels.
func readDenials(log string, provokers []string) found {
	f := found{other: map[string]int{}}
	for line := range strings.Lines(log) {
		m := denial.FindStringSubmatch(line)
		switch {
		case m == nil:
		case slices.Contains(provokers, m[3]), kind(m[3]) == kind(m[4]) && level(m[3]) != level(m[4]):
			f.provoked++ // by a pod of this program, or of the suite that looks at another one's processes
		default:
			who := strings.TrimSpace(m[2] + " " + kind(m[3]))
			f.other[fmt.Sprintf("%s to %s of %s, class %s", who, m[1], kind(m[4]), m[5])]++
		}
	}
	return f
}

func (f found) lines() []string {
	var lines []string
	for _, what := range slices.Sorted(maps.Keys(f.other)) {
		lines = append(lines, fmt.Sprintf("%d x %s", f.other[what], what))
	}
	return lines
}

func (f found) String() string {
	sum := 0
	for _, n := range f.other {
		sum += n
	}
	return strings.Join(append([]string{fmt.Sprintf("AVC denials: %d provoked, %d not", f.provoked, sum)}, f.lines()...), "\n") + "\n"
}

// kind returns the type in a context, user:role:type:level.
func kind(context string) string {
	if parts := strings.SplitN(context, ":", 4); len(parts) > 2 {
		return parts[2]
	}
	return context
}

// saveAudit keeps the log of the audit daemon, if there is one.
func saveAudit() error {
	log, err := os.ReadFile(auditLog)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return errors.Join(err, os.WriteFile("out/audit.log", log, 0o644))
}
