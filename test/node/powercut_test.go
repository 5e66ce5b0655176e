package main

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/crius-run/crius/test/kit/image"
)

// diskWith returns a disk of four physical sectors, to which the versions 1, 2,
// 3 … of the given sectors were written without a flush.
func diskWith(t *testing.T, writes ...[]int) (disk, undo string) {
	t.Helper()
	dir := t.TempDir()
	disk, undo = filepath.Join(dir, "disk"), filepath.Join(dir, "undo")
	content := make([]byte, 4*physical)
	var log []byte
	for version, sectors := range writes {
		from, count := sectors[0], len(sectors)
		log = binary.LittleEndian.AppendUint64(log, uint64(from*physical))
		log = binary.LittleEndian.AppendUint64(log, uint64(count*physical))
		log = append(log, content[from*physical:(from+count)*physical]...)
		for _, s := range sectors {
			copy(content[s*physical:], bytes.Repeat([]byte{byte(version + 1)}, physical))
		}
	}
	log = append(log, log[:min(len(log), 100)]...) // truncated within an entry
	write(t, disk, string(content))
	write(t, undo, string(log))
	return disk, undo
}

// A disk that forgets may have any version of each sector that was written
// since the last flush, and nothing else; and every case does occur.
func TestDiskLosesOnlyUnflushedWrites(t *testing.T) {
	seen := map[string]bool{}
	random := rand.New(rand.NewPCG(1, 1))
	for range 400 {
		disk, undo := diskWith(t, []int{0, 1}, []int{1, 2}, []int{0})
		lost, err := forget(disk, undo, random)
		if err != nil {
			t.Fatal(err)
		}
		data, err := os.ReadFile(disk)
		if err != nil {
			t.Fatal(err)
		}
		var state []byte
		for s := range 4 {
			one := data[s*physical : (s+1)*physical]
			if !bytes.Equal(one, bytes.Repeat(one[:1], physical)) {
				t.Fatalf("sector %d is torn", s)
			}
			state = append(state, '0'+one[0])
		}
		if !strings.ContainsRune("013", rune(state[0])) || !strings.ContainsRune("012", rune(state[1])) ||
			!strings.ContainsRune("02", rune(state[2])) || state[3] != '0' {
			t.Fatalf("the disk has %s", state)
		}
		if lost == 0 && string(state) != "3220" {
			t.Errorf("%s: %d writes are lost", state, lost)
		}
		seen[string(state)] = true
		if _, err := os.Stat(undo); err == nil {
			t.Fatal("the next boot would be taken back, too")
		}
	}
	for _, state := range []string{"0000", "3220", "3000", "0220", "1220", "3100", "3200"} {
		if !seen[state] {
			t.Errorf("a disk with %s is never seen, only %v", state, seen)
		}
	}
}

// The expected content of a container is that of a stack of layers.
func TestManifestOfLayers(t *testing.T) {
	all := tree{}
	all.add([]image.File{
		image.Dir("data"), image.Text("data/a", "a"), image.Text("data/b", "b"), image.Hardlink("data/c", "data/a"),
		image.Dir("data/d"), image.Text("data/d/old", "x"), image.Symlink("data/s", "a"),
	})
	all.add([]image.File{image.Whiteout("data/b"), image.Dir("data/d"), image.Opaque("data/d"), image.Text("data/d/new", "y").Owned(1, 2)})
	var names []string
	for line := range strings.Lines(string(all.manifest())) {
		name, rest, _ := strings.Cut(line, " ")
		names = append(names, name)
		if name == "/data/s" && !strings.HasPrefix(rest, "120777 0:0 a") || name == "/data/d/new" && !strings.HasPrefix(rest, "100644 1:2 ") {
			t.Error(line)
		}
	}
	if want := []string{"/data", "/data/a", "/data/c", "/data/d", "/data/d/new", "/data/s"}; !slices.Equal(names, want) {
		t.Errorf("%q, want %q", names, want)
	}
}

// The guest's reports are counted, and a promise holds until it is withdrawn.
func TestPowerCutCountsGuestReports(t *testing.T) {
	v := &victim{cutting: &cutting{}, present: map[string]bool{}}
	for message, want := range map[string]string{"failed \"a\\nb\"": "a\nb", "verified x": `the guest said "verified x"`} {
		if got := v.hear(message); !strings.Contains(got, want) || got == "" {
			t.Errorf("%s: %q", message, got)
		}
	}
	for _, message := range []string{"answered 20", "answered 10", "answered 30", "verified 2 1 3 4", "pulled one", "pulled two", "removing one"} {
		if failure := v.hear(message); failure != "" {
			t.Errorf("%s: %s", message, failure)
		}
	}
	if len(v.present) != 1 || !v.present["two"] {
		t.Errorf("promised are %v", v.present)
	}
	line := v.sum.line()
	for _, part := range []string{"20 ms (median; longest 30 ms)", "2 pulls done", "2 images verified", "1 things set aside", "3 pods and 4 containers"} {
		if !strings.Contains(line, part) {
			t.Errorf("%q is not in %q", part, line)
		}
	}
}
