package oci

import (
	"cmp"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// advisories are the vulnerabilities of runtimes that crius knows by their
// versions: those by which a container gets at the node, or a container in a
// virtual machine at that machine. gVisor publishes none by version.
var advisories = []advisory{
	{"CVE-2024-21626", "runc", []string{"1.1.12"}, "containers can access the node's files through leaked descriptors", "GHSA-xr7r-f8xq-vfvv"},
	{"CVE-2025-31133", "runc", []string{"1.2.8", "1.3.3", "1.4.0-rc.3"}, "masked paths can be made writable", "GHSA-9493-h29p-rfm2"},
	{"CVE-2025-52565", "runc", []string{"1.2.8", "1.3.3", "1.4.0-rc.3"}, "/dev/console can be replaced by another file", "GHSA-qw9x-cqr3-wc7r"},
	{"CVE-2025-52881", "runc", []string{"1.2.8", "1.3.3", "1.4.0-rc.3"}, "writes to /proc can be redirected", "GHSA-cgrx-mc8f-2prm"},
	{"CVE-2026-41579", "runc", []string{"1.3.6", "1.4.3", "1.5.0-rc.3"}, "images with a symbolic link at /dev can create links on the node", "GHSA-xjvp-4fhw-gc47"},
	{"CVE-2022-27650", "crun", []string{"1.4.4"}, "exec processes get inheritable capabilities", "GHSA-wr4f-w546-m398"},
	{"CVE-2025-24965", "crun", []string{"1.20"}, "images can access the node's files through the krun handler", "GHSA-f42g-r5jj-qh4j"},
	{"CVE-2026-47766", "crun", []string{"1.28"}, "images with a symbolic link at /dev can create links on the node", "GHSA-7vwr-4279-7gq5"},
	{"CVE-2026-24054", "kata", []string{"3.26.0"}, "images without layers can access the node's disk", "https://www.cve.org/CVERecord?id=CVE-2026-24054"},
	{"CVE-2026-24834", "kata", []string{"3.27.0"}, "containers can become root in their virtual machine", "https://www.cve.org/CVERecord?id=CVE-2026-24834"},
}

type advisory struct {
	cve     string
	program string   // what the runtime calls itself, in lower case
	fixed   []string // the first good version of each branch that has one, ascending
	what    string
	source  string
}

// Vulnerability is one that a runtime has, going by its version.
type Vulnerability struct {
	CVE    string   `json:"cve"`
	What   string   `json:"what"`
	Fixed  []string `json:"fixed"` // versions, of one branch each
	Source string   `json:"source"`
}

// vulnerabilities are those of a runtime that answers so to --version, without
// those that its distribution has backported. A version that cannot be read has
// none.
func vulnerabilities(answer string, backported []string) []Vulnerability {
	name, version := programVersion(answer)
	var found []Vulnerability
	for _, a := range advisories {
		if a.program == name && version.before(a.fixed) && !slices.Contains(backported, a.cve) {
			found = append(found, Vulnerability{a.cve, a.what, a.fixed, a.source})
		}
	}
	return found
}

// version is major, minor and patch version and the number of a release
// candidate.
type version [4]int

// released stands for the release candidate that a release was.
const released = 1 << 30

var versionText = regexp.MustCompile(`^(\d+)\.(\d+)(?:\.(\d+))?(?:[-~]rc\.?(\d+))?`)

func parsed(text string) (v version, ok bool) {
	m := versionText.FindStringSubmatch(text)
	if m == nil {
		return v, false
	}
	for i, digits := range m[1:] {
		v[i], _ = strconv.Atoi(digits)
	}
	if m[4] == "" {
		v[3] = released
	}
	return v, true
}

var versionWord = regexp.MustCompile(`(?i)\bversion:?\s+v?(\d\S*)`)

// programVersion is the name of a runtime and its version; no name if there is no
// version.
func programVersion(answer string) (name string, v version) {
	m := versionWord.FindStringSubmatch(answer)
	if m == nil {
		return "", v
	}
	v, ok := parsed(m[1])
	if !ok {
		return "", v
	}
	return strings.ToLower(programName.FindString(answer)), v
}

func (v version) compare(other version) int { return slices.Compare(v[:], other[:]) }

// before reports whether v has not what came with the versions fixed: it is older
// than that of its own branch, or its branch is older than all of them and has
// none.
func (v version) before(fixed []string) bool {
	for _, text := range fixed {
		good, _ := parsed(text)
		switch cmp.Or(cmp.Compare(v[0], good[0]), cmp.Compare(v[1], good[1])) {
		case -1:
			return true
		case 0:
			return v.compare(good) < 0
		}
	}
	return false
}
