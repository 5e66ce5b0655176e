package foreign

import (
	"errors"
	"strings"
	"testing"
	"time"

	cstorage "go.podman.io/storage"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/durable"
)

// Only metadata that names a pod is CRI-O's, whatever else it says.
func TestDescribe(t *testing.T) {
	created := time.Unix(1700000000, 0)
	for metadata, want := range map[string]Container{
		`{"pod-name":"k8s_web_shop_5e0c_0","pod-id":"p","name":"k8s_a_web_shop_5e0c_0","metadata-name":"a"}`: {Name: "a", Runtime: CRIO, Pod: "shop/web", PodID: "p"},
		`{"pod-name":"k8s_web_shop_5e0c_0","pod-id":"p","metadata-name":"web","pod":true}`:                   {Name: "POD", Runtime: CRIO, Pod: "shop/web", PodID: "p"},
		`{"pod-name":"by-hand","pod-id":"p","name":"b"}`:                                                     {Name: "b", Runtime: CRIO, Pod: "by-hand", PodID: "p"},
		`{"image-name":"x","name":"toolbox","pod-id":""}`:                                                    {Name: "called"},
		`{"pod-name":7,"pod-id":"p"}`:                                                                        {Name: "called"},
		`removed`:                                                                                            {Name: "called"},
		``:                                                                                                   {Name: "called"},
	} {
		want.ID, want.Layer, want.Created = "i", "l", created
		got := describe(&cstorage.Container{ID: "i", LayerID: "l", Names: []string{"called"}, Metadata: metadata, Created: created})
		if got != want {
			t.Errorf("%s: %+v, want %+v", metadata, got, want)
		}
	}
}

func TestSelect(t *testing.T) {
	one, two, other := strings.Repeat("1", 64), strings.Repeat("1", 63)+"2", strings.Repeat("3", 64)
	list := []Container{{ID: one, Name: "POD", Runtime: CRIO}, {ID: two, Name: "POD", Runtime: CRIO}, {ID: other, Name: "toolbox"}}
	for names, want := range map[string]struct {
		ids string
		err error
	}{
		"":                         {one + " " + two, nil}, // never podman's
		"toolbox":                  {other, nil},
		other[:12]:                 {other, nil},
		other[:11]:                 {"", fault.NotFound},
		two + " toolbox":           {two + " " + other, nil},
		"toolbox " + other:         {other, nil},
		"POD":                      {"", fault.Invalid},
		one[:20]:                   {"", fault.Invalid},
		"toolbox " + "nonexisting": {"", fault.NotFound},
	} {
		chosen, err := Select(list, strings.Fields(names))
		var ids []string
		for _, c := range chosen {
			ids = append(ids, c.ID)
		}
		if got := strings.Join(ids, " "); got != want.ids || !errors.Is(err, want.err) {
			t.Errorf("%q: %q, %v", names, got, err)
		}
	}
}

// fakeStore has one container.
type fakeStore struct {
	cstorage.Store
	mounted int
	deleted bool
}

func (s *fakeStore) Mounted(string) (int, error)  { return s.mounted, nil }
func (s *fakeStore) DeleteContainer(string) error { s.deleted = true; return nil }

// What has been mounted since it was listed stays: the library would unmount it.
func TestRemoveLooksAgain(t *testing.T) {
	store := &fakeStore{mounted: 1}
	a := &Containers{Store: store, Locks: durable.NewLocks(durable.Roots{Graph: t.TempDir(), Run: t.TempDir()})}
	if why := a.remove(t.Context(), "x"); why == "" || store.deleted {
		t.Errorf("removed: %v, %q", store.deleted, why)
	}
	store.mounted = 0
	if why := a.remove(t.Context(), "x"); why != "" || !store.deleted {
		t.Errorf("removed: %v, %q", store.deleted, why)
	}
}
