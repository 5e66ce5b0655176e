package unpack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/pull/pullerror"
	"github.com/crius-run/crius/test/kit/sockets"
)

// Errors mean the same on both sides of the socket.
func TestErrors(t *testing.T) {
	t.Parallel()
	fetched := errors.New("of the registry")
	fetch := func(n int) error {
		if n == 2 {
			return fetched
		}
		return nil
	}
	for _, err := range append([]error{&fetchError{2, "text"}, errors.New("other")}, carried...) {
		got := failureOf(fmt.Errorf("step: %w", err)).Arrived(fetch)
		if got.Error() != "step: "+err.Error() {
			t.Errorf("%v has become %v", err, got)
		}
		for _, kind := range append([]error{fetched}, carried...) {
			want := errors.Is(err, kind) || errors.Is(kind, fetched) && errors.As(err, new(*fetchError))
			if errors.Is(got, kind) != want {
				t.Errorf("%v is %v: %t", got, kind, !want)
			}
		}
	}
	refused := func(int) error { return fmt.Errorf("layer: %w", &httpError{StatusCode: 503}) }
	if got := (&Failure{Text: "copy: layer", Fetch: 1}).Arrived(refused); !slices.Contains(pullerror.Kinds(got), fault.Unavailable) {
		t.Errorf("the status of the registry's answer is lost: %v", pullerror.Kinds(got))
	}
	if hostile := (&Failure{Kinds: []int{-1, len(carried)}, Fetch: -1}).Arrived(fetch); len(pullerror.Kinds(hostile)) > 0 {
		t.Errorf("%v", pullerror.Kinds(hostile))
	}
}

// httpError has its status where one of the library's types has it.
type httpError struct{ StatusCode int }

func (e *httpError) Error() string { return fmt.Sprint(e.StatusCode) }

// A worker gets a blob in a file that it can read and not write, and learns how much of it
// there is, that it is whole, or why it will not be.
func TestFetchedFile(t *testing.T) {
	t.Parallel()
	conns := sockets.Pair(t, unix.SOCK_SEQPACKET)
	file, err := os.OpenFile(filepath.Join(t.TempDir(), "blob"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if _, err := file.WriteString("first and second, and more than was shown"); err != nil {
		t.Fatal(err)
	}
	shown := func(size uint64) []byte { return binary.BigEndian.AppendUint64([]byte{PacketShown}, size) }
	err = SendFile(conns[0], shown(5), file)
	for _, packet := range [][]byte{shown(16), {PacketWhole}, append([]byte{PacketError}, "text"...), []byte("nonsense")} {
		_, writeErr := conns[0].Write(packet)
		err = errors.Join(err, writeErr)
	}
	if err != nil {
		t.Fatal(err)
	}
	f := &Fetched{conn: conns[1], number: 7, packet: make([]byte, maxPacket)}
	for _, want := range []int64{5, 16} {
		if size, err := f.Next(); size != want || err != nil {
			t.Errorf("%d bytes, %v, want %d", size, err, want)
		}
	}
	if content, err := io.ReadAll(io.NewSectionReader(f.File(), 0, 16)); string(content) != "first and second" || err != nil {
		t.Errorf("%q, %v", content, err)
	}
	if _, err := f.File().WriteAt([]byte("x"), 0); err == nil {
		t.Error("the worker can write to the file")
	}
	if _, err := f.Next(); !errors.Is(err, io.EOF) {
		t.Errorf("%v", err)
	}
	if _, err := f.Next(); err == nil || err.(*fetchError).number != 7 || err.Error() != "text" { //nolint:errorlint // it is that error
		t.Errorf("%v", err)
	}
	if _, err := f.Next(); err == nil || !strings.Contains(err.Error(), "unexpected packet") {
		t.Errorf("%v", err)
	}
	conns[0].Close()
	if _, err := f.Next(); !errors.Is(err, errServerGone) {
		t.Errorf("%v", err)
	}
	if err := errors.Join(f.Close(), f.File().Close()); err != nil {
		t.Error(err)
	}
}
