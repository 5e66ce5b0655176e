package record

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/test/kit/wait"
)

type doc struct {
	Name  string
	Count int
	Data  []byte
}

func id(n int) string { return fmt.Sprintf("%064x", n) }

func open(t *testing.T, root string) *Dir[doc] {
	t.Helper()
	d := At[doc](root, "doc.json", 1)
	if err := d.Make(); err != nil {
		t.Fatal(err)
	}
	return d
}

func TestRoundTrip(t *testing.T) {
	root := filepath.Join(t.TempDir(), "records")
	d := open(t, root)
	if _, err := d.Get(id(1)); !errors.Is(err, fault.NotFound) {
		t.Fatalf("Get of nothing: %v", err)
	}
	want := &doc{Name: "a", Count: 1, Data: []byte{0, 0xff}}
	if err := d.Put(t.Context(), id(1), want); err != nil {
		t.Fatal(err)
	}
	want.Count = 2
	if err := d.Put(t.Context(), id(1), want); err != nil {
		t.Fatal(err)
	}
	got, err := open(t, root).Get(id(1))
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Fatalf("got %+v, %v", got, err)
	}
	if err := os.WriteFile(filepath.Join(d.Path(id(1)), "left by the owner"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second tests idempotence
		if err := d.Delete(t.Context(), id(1)); err != nil {
			t.Fatal(err)
		}
	}
	if left, _ := os.ReadDir(root); len(left) != 0 {
		t.Errorf("left after Delete: %v", left)
	}
}

func TestDirectoriesArePrivate_CVE_2021_41103_CVE_2024_25621(t *testing.T) {
	root := filepath.Join(t.TempDir(), "records")
	d := open(t, root)
	if err := d.Put(t.Context(), id(1), &doc{}); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]os.FileMode{root: 0o700, d.Path(id(1)): 0o700, filepath.Join(d.Path(id(1)), "doc.json"): 0o600} {
		st, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if got := st.Mode().Perm(); got != want {
			t.Errorf("%s has mode %o, want %o", path, got, want)
		}
	}
}

// TestAllSetsDamagedAside: an unreadable document is kept for a human,
// reported, and does not affect the rest.
func TestAllSetsDamagedAside(t *testing.T) {
	root := t.TempDir()
	d := open(t, root)
	for n := range 200 {
		if err := d.Put(t.Context(), id(n), &doc{Count: n}); err != nil {
			t.Fatal(err)
		}
	}
	broken := map[string]string{
		id(3): "",                             // zero length, as after a power cut without fsync
		id(4): `{"version":1,"body":{"Count"`, // cut short
		id(5): `{"version":2,"body":{}}`,      // from a newer program
		id(6): `{"version":1}`,
		id(7): `null`,
	}
	for id, text := range broken {
		if err := os.WriteFile(filepath.Join(d.Path(id), "doc.json"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(d.Path(id(1000)), 0o700); err != nil { // killed between mkdir and rename
		t.Fatal(err)
	}
	docs, orphans, damaged, err := d.All()
	if err != nil {
		t.Fatal(err)
	}
	if len(docs) != 195 {
		t.Errorf("read %d documents, want 195", len(docs))
	}
	for id, doc := range docs {
		if want := fmt.Sprintf("%064x", doc.Count); id != want {
			t.Errorf("document of %s came as %s", want, id)
		}
	}
	var ids []string
	for _, dmg := range damaged {
		ids = append(ids, dmg.ID)
		text, err := os.ReadFile(dmg.File)
		if err != nil || string(text) != broken[dmg.ID] {
			t.Errorf("%s was not kept: %q, %v", dmg.ID, text, err)
		}
	}
	slices.Sort(ids)
	if want := []string{id(3), id(4), id(5), id(6), id(7)}; !slices.Equal(ids, want) {
		t.Errorf("damaged %v, want %v", ids, want)
	}
	slices.Sort(orphans)
	if want := append(ids, id(1000)); !slices.Equal(orphans, want) {
		t.Errorf("orphans %v, want %v", orphans, want)
	}
	// The same id damaged again must not overwrite the first copy.
	if err := os.WriteFile(filepath.Join(d.Path(id(3)), "doc.json"), []byte("again"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, damaged, err = d.All(); err != nil || len(damaged) != 1 || !strings.HasSuffix(damaged[0].File, ".1") {
		t.Errorf("second round: %v, %v", damaged, err)
	}
}

// A power cut may spoil a document that was renamed and not yet synced: then
// the latest synced one is read instead.
func TestPowerCutBeforeTheSync(t *testing.T) {
	root := t.TempDir()
	d := open(t, root)
	d.delay = time.Hour
	put := func(count int) {
		t.Helper()
		if err := d.Put(t.Context(), id(1), &doc{Count: count}); err != nil {
			t.Fatal(err)
		}
	}
	spoil := func(text string) {
		t.Helper()
		if err := os.WriteFile(d.file(id(1)), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	finds := func(want int, read func() (map[string]*doc, []string, []Damaged, error)) {
		t.Helper()
		docs, orphans, damaged, err := read()
		if err != nil || len(orphans)+len(damaged) != 0 || len(docs) != 1 || docs[id(1)].Count != want {
			t.Errorf("found %v, %v, %v, %v, want %d", docs, orphans, damaged, err, want)
		}
		if got, err := d.Get(id(1)); err != nil || got.Count != want {
			t.Errorf("Get: %v, %v, want %d", got, err, want)
		}
	}
	sync := func(d *Dir[doc]) {
		t.Helper()
		if err := d.Sync(); err != nil {
			t.Error(err)
		}
		if names := namesIn(t, d.Path(id(1))); !slices.Equal(names, []string{"doc.json"}) {
			t.Errorf("after a sync there are %v", names)
		}
	}
	put(1)
	sync(d)
	put(2)
	put(3)
	finds(3, d.Read)
	for _, text := range []string{"", `{"version":1,"bo`, strings.Repeat("\x00", 40)} {
		spoil(text)
		finds(1, d.Read)
		next := open(t, root) // of the process after the cut
		next.delay = time.Hour
		finds(1, next.All)
		sync(next)
		finds(1, d.Read)
		sync(d)
		put(4)
		finds(4, d.Read)
	}
	sync(d)
	put(5)
	whole := d.file(id(1)) + ".whole"
	if err := errors.Join(os.Rename(d.file(id(1)), whole), os.Symlink(d.file(id(1)), d.file(id(1)))); err != nil { // cannot be read now
		t.Fatal(err)
	}
	next := open(t, root)
	next.delay = time.Hour
	finds(4, next.All)
	if err := os.Rename(whole, d.file(id(1))); err != nil {
		t.Fatal(err)
	}
	finds(5, d.Read)
	spoil("")
	finds(4, d.Read)
	put(6)
	sync(d)
	finds(6, d.Read)
}

// A document that cannot be synced does not keep the others from it, and is
// tried again.
func TestSyncThatFails(t *testing.T) {
	d := open(t, t.TempDir())
	d.delay = time.Hour
	for _, sync := range []func() error{d.Sync, func() error { return d.SyncOne(id(3)) }} {
		for n := range 20 {
			if err := d.Put(t.Context(), id(n), &doc{}); err != nil {
				t.Fatal(err)
			}
		}
		if err := sync(); err != nil {
			t.Fatal(err)
		}
	}
	if names := namesIn(t, d.Path(id(3))); !slices.Equal(names, []string{"doc.json"}) {
		t.Errorf("after its sync there are %v", names)
	}
	odd := d.file(id(7))
	if err := errors.Join(os.Rename(odd, odd+".real"), os.Symlink(odd, odd)); err != nil { // which cannot be opened
		t.Fatal(err)
	}
	if err := d.Sync(); err == nil {
		t.Error("a loop of links was synced")
	}
	left, err := filepath.Glob(filepath.Join(d.root, "*", "*"+lastSuffix))
	if err != nil || len(left) != 1 || left[0] != odd+lastSuffix {
		t.Errorf("not synced: %v, %v", left, err)
	}
	if err := os.Rename(odd+".real", odd); err != nil {
		t.Fatal(err)
	}
	if err := d.Sync(); err != nil {
		t.Error(err)
	}
	if names := namesIn(t, d.Path(id(7))); !slices.Equal(names, []string{"doc.json"}) {
		t.Errorf("after the sync there are %v", names)
	}
}

// The sync happens by itself, both in the process that wrote and in the next
// one; and a deleted document leaves nothing to sync.
func TestSyncInTheBackground(t *testing.T) {
	root := t.TempDir()
	d := open(t, root)
	for n := range 3 {
		for range 2 {
			if err := d.Put(t.Context(), id(n), &doc{}); err != nil {
				t.Fatal(err)
			}
			if n > 0 {
				if err := d.Sync(); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	if err := os.Link(d.file(id(1)), d.file(id(1))+lastSuffix); err != nil { // of a process that was killed
		t.Fatal(err)
	}
	if _, _, _, err := open(t, root).All(); err != nil {
		t.Fatal(err)
	}
	if err := d.Delete(t.Context(), id(2)); err != nil {
		t.Fatal(err)
	}
	idle := func() bool {
		d.mu.Lock()
		defer d.mu.Unlock()
		return !d.syncing && len(d.changed) == 0
	}
	wait.For(t, "all documents to be synced", func() bool {
		found, err := filepath.Glob(filepath.Join(root, "*", "*"+lastSuffix))
		if err != nil {
			t.Fatal(err)
		}
		return len(found) == 0 && idle()
	})
	if names := namesIn(t, root); !slices.Equal(names, []string{id(0), id(1)}) {
		t.Errorf("there are %v", names)
	}
}

// Each sync makes the disk write its cache: only what has changed is synced, and never less.
func TestSyncsAreFew(t *testing.T) {
	root := t.TempDir()
	d := open(t, root)
	var synced []string
	meanwhile := func() {}
	watch := func() {
		d.delay = time.Hour
		d.fsync = func(path string) error {
			if _, err := os.Lstat(path); err == nil {
				synced = append(synced, path)
			}
			err := syncFile(path)
			if path == root {
				meanwhile()
			}
			return err
		}
	}
	watch()
	do := func(steps ...error) {
		t.Helper()
		if err := errors.Join(steps...); err != nil {
			t.Fatal(err)
		}
	}
	put := func(n int) error { return d.Put(t.Context(), id(n), &doc{}) }
	want := func(when string, paths ...string) {
		t.Helper()
		if !slices.Equal(synced, paths) {
			t.Errorf("%s: %q were synced, want %q", when, synced, paths)
		}
		synced = nil
	}
	do(put(1), d.Sync())
	want("new", d.file(id(1)), d.Path(id(1)), root)
	do(put(1), put(1), d.SyncOne(id(1)))
	want("changed", d.file(id(1)), d.Path(id(1)))
	do(d.Sync())
	want("unchanged")
	do(d.Delete(t.Context(), id(1)), d.Sync())
	want("deleted", root)
	do(put(1), d.Delete(t.Context(), id(1)), put(1), d.Sync())
	want("deleted and new", d.file(id(1)), d.Path(id(1)), root)
	d = open(t, root)
	watch()
	do(put(1), d.Sync())
	want("the first of a process", d.file(id(1)), d.Path(id(1)), root)
	do(put(2))
	meanwhile = func() { // the sync that is under way may have been too early for them
		meanwhile = func() {}
		do(put(3), d.SyncOne(id(3)), put(4))
	}
	do(d.Sync())
	want("new during a sync", d.file(id(2)), d.Path(id(2)), root, d.file(id(3)), d.Path(id(3)), root)
	do(d.Sync())
	want("new during a sync, and not synced", d.file(id(4)), d.Path(id(4)), root)
	broken := errors.New("broken")
	whole := d.fsync
	d.fsync = func(path string) error {
		if path == root {
			return broken
		}
		return nil
	}
	do(put(5))
	if err := d.Sync(); !errors.Is(err, broken) {
		t.Errorf("sync of a broken directory: %v", err)
	}
	d.fsync = whole
	do(d.Sync())
	want("after a failure", d.file(id(5)), d.Path(id(5)), root)
}

// Many writers write documents while these are synced.
func TestSyncBesideWriters(t *testing.T) {
	root := t.TempDir()
	d := open(t, root)
	var group sync.WaitGroup
	for n := range 8 {
		group.Go(func() {
			for count := range 50 {
				if err := d.Put(t.Context(), id(n), &doc{Count: count}); err != nil {
					t.Error(err)
				}
				if got, err := d.Get(id(n)); err != nil || got.Count != count {
					t.Errorf("got %v, %v, want %d", got, err, count)
				}
			}
			if n%2 == 0 {
				if err := d.Delete(t.Context(), id(n)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for range 20 {
		if err := d.Sync(); err != nil {
			t.Error(err)
		}
	}
	group.Wait()
	if err := d.Sync(); err != nil {
		t.Error(err)
	}
	for n := range 8 {
		got, err := d.Get(id(n))
		if n%2 == 0 {
			if !errors.Is(err, fault.NotFound) {
				t.Errorf("deleted and there: %v", err)
			}
			continue
		}
		if names := namesIn(t, d.Path(id(n))); err != nil || got.Count != 49 || len(names) != 1 {
			t.Errorf("%v, %v, %v", got, err, names)
		}
	}
}

func namesIn(t *testing.T, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// TestKilledWriter: whenever the writer is killed, a reader finds the old or
// the new document, never a mixture and never none.
func TestKilledWriter(t *testing.T) {
	if root := os.Getenv("RECORD_WRITER"); root != "" {
		d := open(t, root)
		for n := 0; ; n++ {
			body := strings.Repeat(fmt.Sprint(n%10), 100_000)
			if err := d.Put(t.Context(), id(1), &doc{Name: body}); err != nil {
				t.Fatal(err)
			}
			fmt.Println(n)
		}
	}
	root := t.TempDir()
	d := open(t, root)
	for round := range 20 {
		cmd := exec.Command(os.Args[0], "-test.run=^TestKilledWriter$")
		cmd.Env = append(os.Environ(), "RECORD_WRITER="+root)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		// Let it report some writes, then kill it at a random point.
		buf := make([]byte, 2+3*round)
		for read := 0; read < len(buf); {
			n, err := out.Read(buf[read:])
			if err != nil {
				t.Fatal(err)
			}
			read += n
		}
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		got, err := d.Get(id(1))
		if err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		if got.Name != strings.Repeat(got.Name[:1], 100_000) {
			t.Fatalf("round %d: a mixture of two documents", round)
		}
	}
}

func BenchmarkPut(b *testing.B) {
	d := At[doc](b.TempDir(), "doc.json", 1)
	body := &doc{Data: make([]byte, 2000)}
	for n := 0; b.Loop(); n++ {
		if err := d.Put(b.Context(), id(n%100), body); err != nil {
			b.Fatal(err)
		}
	}
}

// Read changes nothing, and needs no directory.
func TestReadChangesNothing(t *testing.T) {
	root := filepath.Join(t.TempDir(), "records")
	d := At[doc](root, "doc.json", 1)
	if docs, orphans, damaged, err := d.Read(); err != nil || len(docs)+len(orphans)+len(damaged) > 0 {
		t.Errorf("of nothing: %v, %v, %v, %v", docs, orphans, damaged, err)
	}
	if _, err := os.Stat(root); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the root: %v", err)
	}
	if err := d.Make(); err != nil {
		t.Fatal(err)
	}
	if err := d.Put(t.Context(), id(1), &doc{Name: "whole"}); err != nil {
		t.Fatal(err)
	}
	for n, text := range map[int]string{2: "{", 3: `{"version":9,"body":{}}`} {
		if err := errors.Join(os.Mkdir(d.Path(id(n)), 0o700), os.WriteFile(filepath.Join(d.Path(id(n)), "doc.json"), []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(d.Path(id(4)), 0o700); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second finds what the first has found
		docs, orphans, damaged, err := d.Read()
		if err != nil || len(docs) != 1 || !slices.Equal(orphans, []string{id(4)}) || len(damaged) != 2 {
			t.Errorf("%v, %v, %v, %v", docs, orphans, damaged, err)
		}
		for _, one := range damaged {
			if _, err := os.Stat(one.File); err != nil {
				t.Error(err)
			}
		}
	}
}

func TestPutThatFailsLeavesNothing(t *testing.T) {
	root := t.TempDir()
	id := strings.Repeat("a", 64)
	unwritable := At[doc](root, "missing/doc.json", 1)
	if err := unwritable.Put(t.Context(), id, &doc{}); err == nil {
		t.Error("a document was written into a directory that is not there")
	}
	d := At[doc](root, "doc.json", 1)
	if left, _ := os.ReadDir(root); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	if err := os.MkdirAll(filepath.Join(d.Path(id), "doc.json"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := d.Put(t.Context(), id, &doc{}); err == nil {
		t.Error("a document took the place of a directory")
	}
	if left, _ := os.ReadDir(d.Path(id)); len(left) != 1 {
		t.Errorf("left beside what was there: %v", left)
	}
}

// A damaged document that cannot be moved aside, as on a full disk, does not
// affect the others either.
func TestDamagedOnAFullDisk(t *testing.T) {
	root := t.TempDir()
	d := open(t, root)
	for n := range 3 {
		if err := d.Put(t.Context(), id(n), &doc{Count: n}); err != nil {
			t.Fatal(err)
		}
	}
	obstacle := filepath.Join(root, "damaged")
	if err := errors.Join(os.WriteFile(d.file(id(1)), []byte("{"), 0o600), os.WriteFile(obstacle, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	docs, orphans, damaged, err := d.All()
	if err != nil || len(docs) != 2 || !slices.Equal(orphans, []string{id(1)}) || len(damaged) != 1 {
		t.Fatalf("%v, orphans %v, damaged %+v, %v", docs, orphans, damaged, err)
	}
	if damaged[0].File != "" || !errors.Is(damaged[0].Err, errSpoiled) || !errors.Is(damaged[0].Err, unix.ENOTDIR) {
		t.Errorf("damaged %+v", damaged[0])
	}
}

// scarceRole makes this program read the documents below a directory with only
// one descriptor.
const scarceRole = "RECORD_TEST_SCARCE"

func TestMain(m *testing.M) {
	if root := os.Getenv(scarceRole); root != "" {
		if err := readWithOneDescriptor(root); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// Documents for which there are no descriptors are not damaged.
func TestReadWithoutDescriptors(t *testing.T) {
	root := t.TempDir()
	d := open(t, root)
	for n := range 50 {
		if err := d.Put(t.Context(), id(n), &doc{Count: n}); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), scarceRole+"="+root)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

func readWithOneDescriptor(root string) error {
	r, w, err := os.Pipe() // with it the Go runtime makes the descriptors that it needs itself
	if err != nil {
		return err
	}
	defer r.Close()
	defer w.Close()
	for last := -1; ; {
		fd, err := unix.Dup(0)
		if err != nil {
			_ = unix.Close(last)
			break
		}
		last = fd
	}
	for range 100 { // usually several documents are read at a time
		docs, orphans, damaged, err := At[doc](root, "doc.json", 1).Read()
		if len(orphans)+len(damaged) > 0 || err == nil && len(docs) != 50 || err != nil && !errors.Is(err, unix.EMFILE) {
			return fmt.Errorf("%d documents, orphans %v, damaged %v, %w", len(docs), orphans, damaged, err)
		}
	}
	return nil
}
