package layers

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/opencontainers/go-digest"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/test/kit/wait"
)

// fakeStore unpacks nothing, and fails as often as the test wants. It is a Target.
type fakeStore struct {
	mu     sync.Mutex
	fails  []error // of Stage or Add, in turn
	late   bool    // it is Add that fails
	puts   []string
	staged int // that were neither added nor dropped
	added  map[string]bool

	blobs []int64 // what Stage was told, for each layer
}

func (s *fakeStore) Has(id string) (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.added[id], nil
}

func (s *fakeStore) CheckRepeat(digest.Digest) error { return nil }

func (s *fakeStore) Stage(_ context.Context, content io.Reader, blobs func() (int64, error)) (Staged, error) {
	text, err := io.ReadAll(content)
	if err != nil {
		return nil, err
	}
	sum, err := blobs()
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil { // only layers with many holes ask
		s.blobs = append(s.blobs, sum)
	}
	s.puts = append(s.puts, string(text))
	if len(s.fails) > 0 && !s.late {
		err, s.fails = s.fails[0], s.fails[1:]
		return nil, err
	}
	s.staged++
	return &fakeStaged{fakeStore: s}, nil
}

// fakeStaged is a layer that fakeStore has not unpacked.
type fakeStaged struct {
	*fakeStore
	gone bool
}

func (s *fakeStore) Add(_ context.Context, layers []Addition) (added []Place, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range layers {
		if len(s.fails) > 0 {
			err, s.fails = s.fails[0], s.fails[1:]
			return added, err
		}
		if l.Record.Blob == "" || l.Record.Content == "" {
			return added, errors.New("it has no digests")
		}
		if staged, is := l.Staged.(*fakeStaged); is {
			s.added[l.ID] = true
			s.staged--
			staged.gone = true
		}
		added = append(added, Place{Files: l.ID}) // which does not exist
	}
	return added, nil
}

func (s *fakeStaged) Drop() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.gone {
		s.staged--
	}
	s.gone = true
	return nil
}

func TestPut(t *testing.T) {
	t.Parallel()
	const text = "content, not compressed"
	layer := Layer{Blob: digest.FromString(text), Size: int64(len(text)), DiffID: digest.FromString(text)}
	swept := &fs.PathError{Op: "mkdir", Path: "tempdirs/1", Err: fs.ErrNotExist}
	cut, broken := errors.New("connection cut"), errors.New("no tar")
	for name, test := range map[string]struct {
		sends string
		fetch error // after that
		fails []error
		puts  int
		want  error // nil: the layer is added
	}{
		"good":           {sends: text, puts: 1},
		"swept":          {sends: text, fails: []error{swept, swept}, puts: 3},
		"swept for ever": {sends: text, fails: []error{swept, swept, swept, swept}, puts: 3, want: fs.ErrNotExist},
		"broken":         {sends: text, fails: []error{broken}, puts: 1, want: broken},
		"cut":            {sends: text[:10], fetch: cut, want: cut},
		"something else": {sends: strings.ToUpper(text), want: fault.Invalid},
	} {
		for _, late := range []bool{false, true} {
			store := &fakeStore{fails: test.fails, late: late, added: map[string]bool{}}
			var added []Layer
			in := Intake{
				Into: store, Dir: t.TempDir(), Parallel: 1, Unpack: 1,
				Fetch: func(Layer) (Arrival, error) { return arrive(t, test.sends, test.fetch), nil },
				Added: func(l Layer) { added = append(added, l) },
			}
			err := in.Put(t.Context(), NewMissing([]Layer{layer}))
			good := test.want == nil
			if !errors.Is(err, test.want) {
				t.Errorf("%s: %v", name, err)
			}
			if len(store.puts) != test.puts || slices.ContainsFunc(store.puts, func(put string) bool { return put != text }) {
				t.Errorf("%s: the store was given %q", name, store.puts)
			}
			if good != (len(added) == 1) {
				t.Errorf("%s: added %v", name, added)
			}
			if store.staged != 0 {
				t.Errorf("%s: %d staged layers were left", name, store.staged)
			}
		}
	}
}

// Layers that the store has but cannot rebuild are downloaded, with one note of the reason: layers
// that existed when the pull began, and layers that an earlier layer of the image has brought. A
// layer that cannot be written is an error: a download would fail in the same way.
func TestPutDownloadsWhatTheStoreCannotGive(t *testing.T) {
	t.Parallel()
	const text = "content, not compressed"
	layer := Layer{Blob: digest.FromString(text), Size: int64(len(text)), DiffID: digest.FromString(text)}
	for name, test := range map[string]struct {
		image   []Layer
		stored  int // of them, by other layers
		fetched int
		lost    int
	}{
		"removed meanwhile":        {[]Layer{layer}, 1, 1, 1},
		"twice":                    {[]Layer{layer, layer}, 0, 2, 1},
		"often, and there already": {[]Layer{layer, layer, layer}, 3, 3, 3},
	} {
		store := &fakeStore{}
		missing := NewMissing(test.image)
		for i := range test.stored {
			missing[i].Stored = &Stored{ID: "stored", Place: Place{Files: t.TempDir()}, Content: layer.DiffID}
		}
		store.added = map[string]bool{}
		var added, fetched []Layer
		var lost []error
		var mu sync.Mutex
		in := Intake{
			Into: store, Dir: t.TempDir(), Parallel: 1, Unpack: 2,
			Fetch: func(l Layer) (Arrival, error) {
				mu.Lock()
				defer mu.Unlock()
				fetched = append(fetched, l)
				return arrive(t, text, nil), nil
			},
			Added: func(l Layer) { added = append(added, l) },
			Lost:  func(_ Layer, err error) { lost = append(lost, err) },
		}
		if err := in.Put(t.Context(), missing); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if len(fetched) != test.fetched || len(added) != test.fetched || len(store.puts) != len(test.image) {
			t.Errorf("%s: %d were fetched, %d of them added, %d unpacked; want %d, %[5]d, %d", name, len(fetched), len(added), len(store.puts), test.fetched, len(test.image))
		}
		if len(lost) != test.lost || slices.ContainsFunc(lost, func(err error) bool { return !errors.Is(err, ErrNotRebuilt) }) {
			t.Errorf("%s: %v", name, lost)
		}
	}
}

// arrival brings a text in two steps, and then err or, where that is nil, the end.
type arrival struct {
	file *os.File
	left []int64
	err  error
}

func arrive(t *testing.T, text string, err error) *arrival {
	t.Helper()
	file, createErr := os.Create(filepath.Join(t.TempDir(), "blob"))
	if createErr == nil {
		_, createErr = file.WriteString(text)
	}
	if createErr != nil {
		t.Fatal(createErr)
	}
	return &arrival{file, []int64{1, int64(len(text))}, cmp.Or(err, io.EOF)}
}

func (a *arrival) Next() (size int64, err error) {
	if len(a.left) == 0 {
		return 0, a.err
	}
	size, a.left = a.left[0], a.left[1:]
	return size, nil
}

func (a *arrival) File() *os.File { return a.file }
func (a *arrival) Close() error   { return nil }

// A pull that is called off waits for no download that will not begin.
func TestPutIsCancelled(t *testing.T) {
	t.Parallel()
	var image []Layer
	for i := range 20 {
		text := fmt.Sprintf("layer %d: something", i)
		image = append(image, Layer{Blob: digest.FromString(text), Size: int64(len(text)), DiffID: digest.FromString(text)})
	}
	ctx, cancel := context.WithCancel(t.Context())
	store := &fakeStore{added: map[string]bool{}}
	in := Intake{Into: store, Dir: t.TempDir(), Parallel: 1, Unpack: 2, Fetch: func(l Layer) (Arrival, error) {
		cancel()
		return arrive(t, fmt.Sprintf("layer %d: something", slices.Index(image, l)), nil), nil
	}}
	if err := in.Put(ctx, NewMissing(image)); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

// Only the layers above existing ones are downloaded, and none is added after one that failed.
// What the blobs of an image allow is the same for each of its layers, in whatever order these are
// unpacked: what the layers have is counted for all of them together.
func TestBlobsOfAllLayersCount(t *testing.T) {
	t.Parallel()
	var image []Layer
	sum := int64(0)
	for _, text := range []string{"small", "of middle size", "the largest of the three"} {
		image = append(image, Layer{Blob: digest.FromString(text), Size: int64(len(text)), DiffID: digest.FromString(text)})
		sum += int64(len(text))
	}
	for _, parallel := range []int{1, 3} {
		store := &fakeStore{added: map[string]bool{}}
		in := Intake{Into: store, Dir: t.TempDir(), Parallel: parallel, Unpack: parallel, Fetch: func(l Layer) (Arrival, error) {
			return arrive(t, []string{"small", "of middle size", "the largest of the three"}[slices.Index(image, l)], nil), nil
		}}
		if err := in.Put(t.Context(), NewMissing(image)); err != nil {
			t.Fatal(err)
		}
		if want := []int64{sum, sum, sum}; !slices.Equal(store.blobs, want) {
			t.Errorf("%d at a time: %v, want %v", parallel, store.blobs, want)
		}
	}
}

// A layer that no retry makes good ends the pull, however long a lower one takes to come.
func TestInvalidLayerIsReportedAtOnce(t *testing.T) {
	t.Parallel()
	var image []Layer
	for _, text := range []string{"comes", "what it should be"} {
		image = append(image, Layer{Blob: digest.FromString(text), Size: int64(len(text)), DiffID: digest.FromString(text)})
	}
	store := &fakeStore{added: map[string]bool{}}
	slow := &endless{arrival: arrive(t, "comes", nil), closed: make(chan struct{})}
	in := Intake{Into: store, Dir: t.TempDir(), Parallel: 2, Unpack: 2, Fetch: func(l Layer) (Arrival, error) {
		if l == image[0] {
			return slow, nil
		}
		return arrive(t, "what it is instead", nil), nil
	}}
	ended := make(chan error, 1)
	go func() { ended <- in.Put(t.Context(), NewMissing(image)) }()
	wait.For(t, "the end of the pull", func() bool { return len(ended) > 0 })
	if err := <-ended; !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), image[1].Blob.String()) {
		t.Errorf("%v", err)
	}
	if store.staged != 0 || len(store.added) != 0 {
		t.Errorf("added are %v, and %d are left unpacked", store.added, store.staged)
	}
}

// endless is a blob of which no more comes after some bytes.
type endless struct {
	*arrival
	closed chan struct{}
	once   sync.Once
}

func (e *endless) Next() (int64, error) {
	if len(e.left) == 2 {
		return e.arrival.Next()
	}
	<-e.closed
	return 0, errors.New("closed")
}

func (e *endless) Close() error {
	e.once.Do(func() { close(e.closed) })
	return nil
}

func TestPutInOrder(t *testing.T) {
	t.Parallel()
	var image []Layer
	for _, text := range []string{"layer 0: something", "layer 1: something", "layer 2: something", "layer 3: something"} {
		image = append(image, Layer{Blob: digest.FromString(text), Size: int64(len(text)), DiffID: digest.FromString(text)})
	}
	store := &fakeStore{added: map[string]bool{layerID("", image[0].DiffID): true}}
	failure := errors.New("failure")
	in := Intake{Into: store, Dir: t.TempDir(), Parallel: 2, Unpack: 1, Fetch: func(l Layer) (Arrival, error) {
		i := slices.Index(image, l)
		if i == 2 {
			return nil, failure
		}
		return arrive(t, fmt.Sprintf("layer %d: something", i), nil), nil
	}}
	if err := in.Put(t.Context(), NewMissing(image)[1:]); !errors.Is(err, failure) || !strings.Contains(err.Error(), image[2].Blob.String()) {
		t.Errorf("%v", err)
	}
	if len(store.added) != 2 || store.staged != 0 {
		t.Errorf("added are %v, and %d are left unpacked", store.added, store.staged)
	}
}
