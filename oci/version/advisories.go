package version

import "slices"

// advisories are the vulnerabilities of runtimes that crius recognizes by
// version: those that let a container reach the node, or a container in a
// virtual machine reach that machine. gVisor publishes none by version.
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
	program string   // the runtime's name in its own answer, in lower case
	fixed   []string // the first fixed version of each branch that has one, ascending
	what    string
	source  string
}

// Vulnerability is a vulnerability that a runtime has according to its version.
type Vulnerability struct {
	CVE    string   `json:"cve"`
	What   string   `json:"what"`
	Fixed  []string `json:"fixed"` // versions, of one branch each
	Source string   `json:"source"`
}

// Vulnerabilities returns those of a runtime with this answer to --version,
// without CVEs for which its distribution has backported a fix. An unparsable
// version yields none.
func Vulnerabilities(answer string, backported []string) []Vulnerability {
	name, v := Parse(answer)
	var found []Vulnerability
	for _, a := range advisories {
		if a.program == name && v.before(a.fixed) && !slices.Contains(backported, a.cve) {
			found = append(found, Vulnerability{a.cve, a.what, a.fixed, a.source})
		}
	}
	return found
}
