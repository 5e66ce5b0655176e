package layout

import (
	"path"
	"regexp"
	"strings"
	"testing"
)

// A package that keeps records compares their names with those on the disk: without that, a
// rename in Go would make the records of earlier versions unreadable.
func TestPackagesWithRecordsCompareTheirNames(t *testing.T) {
	opens := regexp.MustCompile(`\brecord\.(At|Open)\[`)
	keeps, compares := map[string]bool{}, map[string]bool{}
	sources(t, func(file, text string) {
		dir := path.Dir(file)
		switch {
		case !strings.HasSuffix(file, ".go"):
		case strings.HasSuffix(file, "_test.go"):
			compares[dir] = compares[dir] || strings.Contains(text, "disk.Names(")
		default:
			keeps[dir] = keeps[dir] || opens.MatchString(text)
		}
	})
	found := false
	for dir, keeps := range keeps {
		found = found || keeps
		if keeps && !compares[dir] {
			t.Errorf("%s keeps records: compare their names with those on the disk, by Names of test/kit/disk", dir)
		}
	}
	if !found {
		t.Error("no package is seen that keeps records")
	}
}
