package extract

import (
	"bytes"
	"hash/crc64"
	"math/rand/v2"
	"testing"

	tarsplit "github.com/vbatts/tar-split/tar/storage"
)

func TestChecksum(t *testing.T) {
	t.Parallel()
	content := make([]byte, 300)
	_, _ = rand.NewChaCha8([32]byte{}).Read(content)
	for size := range len(content) + 1 {
		want := crc64.New(tarsplit.CRCTable)
		_, _ = want.Write(content[:size])
		for first := range size + 1 { // in two parts
			if got := checksum(0).with(content[:first]).with(content[first:size]).bytes(); !bytes.Equal(got, want.Sum(nil)) {
				t.Fatalf("of %d bytes and %d more it is %x, want %x", first, size-first, got, want.Sum(nil))
			}
		}
	}
}

func BenchmarkChecksum(b *testing.B) {
	content := make([]byte, 32<<10)
	b.SetBytes(int64(len(content)))
	for b.Loop() {
		checksum(0).with(content)
	}
}
