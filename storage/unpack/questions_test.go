package unpack

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/opencontainers/go-digest"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/unpack/layers"
	"github.com/crius-run/crius/storage/unpack/wire"
)

// noted is a store that notes what is added to it.
type noted struct {
	layers.Store
	added []layers.Unpacked
}

// Add implements layers.Store.
func (s *noted) Add(all []layers.Unpacked) ([]layers.Place, error) {
	s.added = append(s.added, all...)
	return make([]layers.Place, len(all)), nil
}

// unlocked is free of a store that nobody has locked.
func unlocked(context.Context) error { return nil }

// askedBy returns a function that asks the questions of a worker.
func askedBy(t *testing.T, q *questions) (ask func(wire.Question) (wire.Answer, error)) {
	t.Helper()
	conn, err := net.FileConn(q.theirs)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	from := json.NewDecoder(bufio.NewReader(conn))
	return func(question wire.Question) (answer wire.Answer, err error) {
		err = json.NewEncoder(conn).Encode(question)
		return answer, errors.Join(err, from.Decode(&answer))
	}
}

// Whatever a worker says, a layer is added in its own place, and with digests and the size of a blob that the manifest or
// the store have.
func TestAddedIsWhatTheServerKnows(t *testing.T) {
	t.Parallel()
	missing := layers.NewMissing([]layers.Layer{
		{Blob: digest.FromString("a"), Size: 10, DiffID: digest.FromString("A")},
		{Blob: digest.FromString("b"), Size: 20, DiffID: digest.FromString("B")},
	})
	missing[1].Stored = &layers.Stored{BlobSize: 22}
	staging := layers.Staging{Dir: "/staging", Splits: "/splits"}
	store := &noted{}
	q, err := openQuestions(store, staging)
	if err != nil {
		t.Fatal(err)
	}
	defer q.close()
	q.expect(missing, unlocked)
	ask := askedBy(t, q)
	q.answer(t.Context())
	answer, err := ask(wire.Question{Add: []wire.Unpacked{{ID: missing[0].ID, Name: "7", Size: 5}, {ID: missing[1].ID}}})
	if err != nil || answer.Failed != nil || len(answer.Added) != 2 {
		t.Fatalf("%+v, %v", answer, err)
	}
	q.close()
	want := []layers.Unpacked{
		{
			ID: missing[0].ID, Record: layers.Record{Blob: digest.FromString("a"), Size: 10, Content: digest.FromString("A")},
			Dir: filepath.Join(staging.Dir, "7"), Split: staging.SplitOf("7"), Size: 5,
		},
		{ID: missing[1].ID, Parent: missing[0].ID, Record: layers.Record{Blob: digest.FromString("b"), Size: 22, Content: digest.FromString("B")}},
	}
	if !reflect.DeepEqual(store.added, want) {
		t.Errorf("added: %+v, want %+v", store.added, want)
	}
}

// While another program has locked the store, an answer waits as long as the pull does, and no longer.
func TestAnswerWaitsForLocks(t *testing.T) {
	t.Parallel()
	missing := layers.NewMissing([]layers.Layer{{Blob: digest.FromString("a"), DiffID: digest.FromString("A")}})
	for _, cancelled := range []bool{false, true} {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		waits := 0
		free := func(ctx context.Context) error {
			if waits++; waits == 3 {
				if !cancelled {
					return nil
				}
				cancel()
			}
			return errors.Join(fmt.Errorf("locked: %w", fault.Timeout), context.Cause(ctx))
		}
		store := &noted{}
		q, err := openQuestions(store, layers.Staging{})
		if err != nil {
			t.Fatal(err)
		}
		defer q.close()
		q.expect(missing, free)
		ask := askedBy(t, q)
		q.answer(ctx)
		answer, err := ask(wire.Question{Add: []wire.Unpacked{{ID: missing[0].ID}}})
		if err != nil || (answer.Failed != nil) != cancelled {
			t.Errorf("%+v, %v", answer, err)
		}
		q.close()
		if added := len(store.added) > 0; added == cancelled || waits != 3 {
			t.Errorf("cancelled: %t; added: %t after %d waits", cancelled, added, waits)
		}
	}
}

// A worker that goes on asking, or asks what is no question, gets no more answers.
func TestQuestionsEnd(t *testing.T) {
	t.Parallel()
	missing := layers.NewMissing([]layers.Layer{{Blob: digest.FromString("a"), DiffID: digest.FromString("A")}})
	q, err := openQuestions(&noted{}, layers.Staging{})
	if err != nil {
		t.Fatal(err)
	}
	defer q.close()
	q.expect(missing, unlocked)
	ask := askedBy(t, q)
	q.answer(t.Context())
	for range q.most {
		if _, err := ask(wire.Question{Add: []wire.Unpacked{{ID: missing[0].ID}}}); err != nil {
			t.Fatal(err)
		}
	}
	if answer, err := ask(wire.Question{Add: []wire.Unpacked{{ID: missing[0].ID}}}); err == nil {
		t.Errorf("one more: %+v", answer)
	}
}

// The error of a question is the server's own, by which pulls are repeated, and not what the worker says of it.
func TestErrorOfAQuestionIsTheOriginal(t *testing.T) {
	t.Parallel()
	gone := errors.New("gone")
	w := &process{questions: &questions{number: 2, failed: gone}}
	if err := w.original(&wire.Failure{Question: 2}); !errors.Is(err, gone) {
		t.Errorf("%v", err)
	}
	for _, other := range []int{1, 3} {
		if err := w.original(&wire.Failure{Question: other}); err != nil {
			t.Errorf("question %d: %v", other, err)
		}
	}
}
