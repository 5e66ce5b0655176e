package worker

import (
	"encoding/binary"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/storage/unpack/wire"
	"github.com/crius-run/crius/test/kit/sockets"
)

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
	shown := func(size uint64) []byte { return binary.BigEndian.AppendUint64([]byte{wire.PacketShown}, size) }
	err = wire.SendFile(conns[0], shown(5), file)
	for _, packet := range [][]byte{shown(16), {wire.PacketWhole}, append([]byte{wire.PacketError}, "text"...), []byte("nonsense")} {
		_, writeErr := conns[0].Write(packet)
		err = errors.Join(err, writeErr)
	}
	if err != nil {
		t.Fatal(err)
	}
	f := &Fetched{conn: conns[1], number: 7, packet: make([]byte, wire.MaxPacket)}
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
	if _, err := f.Next(); err == nil || err.(*wire.FetchError).Number != 7 || err.Error() != "text" { //nolint:errorlint // it is that error
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
