package worker

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"

	"github.com/crius-run/crius/storage/unpack/layers"
	"github.com/crius-run/crius/storage/unpack/wire"
)

// store implements layers.Store: the server has the store, and answers.
type store struct {
	mu   sync.Mutex // one question at a time
	to   *json.Encoder
	from *json.Decoder
	asks int
}

// openStore returns the store that the server has.
func openStore() (*store, error) {
	socket := os.NewFile(wire.StoreFD, "store")
	defer socket.Close()
	conn, err := net.FileConn(socket)
	if err != nil {
		return nil, err
	}
	return &store{to: json.NewEncoder(conn), from: json.NewDecoder(conn)}, nil
}

// ask asks the server. A failure comes with what the answer has.
func (s *store) ask(q wire.Question) (answer wire.Answer, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asks++
	if err = s.to.Encode(q); err == nil {
		err = s.from.Decode(&answer)
	}
	if err != nil {
		return wire.Answer{}, fmt.Errorf("%w (%w)", errServerGone, err)
	}
	if answer.Failed != nil {
		err = &wire.QuestionError{Number: s.asks, Err: answer.Failed.Arrived(func(*wire.Failure) error { return nil })}
	}
	return answer, err
}

// Has implements layers.Store.
func (s *store) Has(id string) (bool, error) {
	answer, err := s.ask(wire.Question{Has: id})
	return answer.Has, err
}

// Dirs implements layers.Store.
func (s *store) Dirs(id string) ([]string, error) {
	answer, err := s.ask(wire.Question{Dirs: id})
	return answer.Dirs, err
}

// Add implements layers.Store.
func (s *store) Add(all []layers.Unpacked) (added []layers.Place, err error) {
	var q wire.Question
	for _, l := range all {
		u := wire.Unpacked{ID: l.ID, Size: l.Size, UIDs: l.UIDs, GIDs: l.GIDs, Usage: l.Usage}
		if l.Dir != "" {
			u.Name = filepath.Base(l.Dir)
		}
		q.Add = append(q.Add, u)
	}
	answer, err := s.ask(q)
	return answer.Added[:min(len(answer.Added), len(all))], err
}
