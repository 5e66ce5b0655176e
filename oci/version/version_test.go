package version

import (
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// The versions in the advisories, and those of distributions.
func TestVulnerabilities_CVE_2024_21626_CVE_2025_31133_CVE_2025_52565_CVE_2025_52881_CVE_2026_41579(t *testing.T) {
	t.Parallel()
	const leak, masks, links = "CVE-2024-21626", "CVE-2025-31133 CVE-2025-52565 CVE-2025-52881", "CVE-2026-41579"
	for answer, want := range map[string]string{
		"runc version 1.0.0-rc95":      leak + " " + masks + " " + links,
		"runc version 1.0.0~rc93+ds1":  leak + " " + masks + " " + links,
		"runc version 1.1.5+ds1":       leak + " " + masks + " " + links,
		"runc version 1.1.11":          leak + " " + masks + " " + links,
		"runc version 1.1.12":          masks + " " + links,
		"runc version 1.1.15":          masks + " " + links,
		"runc version 1.2.0-rc.1":      masks + " " + links,
		"runc version 1.2.7":           masks + " " + links,
		"runc version 1.2.8":           links,
		"runc version 1.2.10":          links,
		"runc version 1.3.0":           masks + " " + links,
		"runc version 1.3.3-0ubuntu1":  links,
		"runc version 1.3.6":           "",
		"runc version 1.4.0-rc.2":      masks + " " + links,
		"runc version 1.4.0-rc.3":      links,
		"runc version 1.4.0":           links,
		"runc version 1.4.3":           "",
		"runc version 1.5.0-rc.1":      links,
		"runc version 1.5.0":           "",
		"runc version 2.0.0":           "",
		"crun version 1.4.3":           "CVE-2022-27650 CVE-2025-24965 CVE-2026-47766",
		"crun version 1.8.1":           "CVE-2025-24965 CVE-2026-47766",
		"crun version 1.20":            "CVE-2026-47766",
		"crun version 1.28":            "",
		"runsc version release-2024.1": "",
		`Kata Containers containerd shim (Golang): id: "io.containerd.kata.v2", version: 3.2.0, commit: x`:    "CVE-2026-24054 CVE-2026-24834",
		`Kata Containers containerd shim (Rust): id: io.containerd.kata.v2, version: 3.26.0-alpha, commit: x`: "CVE-2026-24834",
		"Kata Containers containerd shim (Golang): version: 3.27.0":                                           "",
		"other version 1.0.0":  "",
		"runc":                 "",
		"runc version unknown": "",
		"":                     "",
	} {
		var got []string
		for _, v := range Vulnerabilities(answer, nil) {
			got = append(got, v.CVE)
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%s: %q, want %q", answer, got, want)
		}
	}
	left := Vulnerabilities("runc version 1.2.7", []string{"CVE-2025-31133", links})
	if len(left) != 2 || left[0].CVE != "CVE-2025-52565" || !slices.Contains(left[0].Fixed, "1.2.8") {
		t.Errorf("beside what was backported: %+v", left)
	}
}

// The versions in the table can be compared, and each row names its source.
func TestAdvisoriesAreComplete(t *testing.T) {
	t.Parallel()
	number := regexp.MustCompile(`^CVE-\d{4}-\d{4,}$`)
	for _, a := range advisories {
		var last Number
		for _, text := range a.fixed {
			v, ok := parsed(text)
			if !ok || v.compare(last) <= 0 {
				t.Errorf("%s: version %s", a.cve, text)
			}
			last = v
		}
		if !number.MatchString(a.cve) || a.what == "" || a.source == "" || a.program == "" || len(a.fixed) == 0 {
			t.Errorf("%+v", a)
		}
	}
}

// Versions are totally ordered, whatever they contain, and one that is fixed
// stays so in every later release of its branch.
func FuzzVersion(f *testing.F) {
	f.Add("runc version 1.1.5+ds1", "1.1.12")
	f.Add("crun version 1.20", "1.4.0-rc.3")
	f.Add("runc version 99999999999999999999.0.0", "0.0~rc99999999999999999999")
	f.Add("Version: v1", "\xff")
	f.Fuzz(func(t *testing.T, answer, other string) {
		if line := Line([]byte(answer)); len(line) > 200 || !utf8.ValidString(line) || strings.Contains(line, "\n") {
			t.Errorf("%q has the first line %q", answer, line)
		}
		name, v := Parse(answer)
		if (v != Number{} || name != "") && !word.MatchString(answer) {
			t.Errorf("%q is %s %v", answer, name, v)
		}
		if found := Vulnerabilities(answer, nil); name == "" && len(found) > 0 {
			t.Errorf("%q: %v", answer, found)
		}
		w, ok := parsed(other)
		if !ok {
			return
		}
		if v.compare(w) != -w.compare(v) || w.before([]string{other}) {
			t.Errorf("%v and %v", v, w)
		}
		for _, n := range append(w[:], v[:]...) {
			if n < 0 {
				t.Errorf("%v and %v", v, w)
			}
		}
	})
}
