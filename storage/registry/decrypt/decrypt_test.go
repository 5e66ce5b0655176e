package decrypt

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hmac"
	"crypto/sha256"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/types"
)

// A blob is decrypted in whatever pieces it comes, and io.EOF is returned only after it was found
// to be whole.
func TestOpen(t *testing.T) {
	t.Parallel()
	content := []byte(strings.Repeat("content ", 1000))
	l := Layer{key: make([]byte, 32), nonce: make([]byte, aes.BlockSize)}
	block, err := aes.NewCipher(l.key)
	if err != nil {
		t.Fatal(err)
	}
	blob := make([]byte, len(content))
	cipher.NewCTR(block, l.nonce).XORKeyStream(blob, content)
	mac := hmac.New(sha256.New, l.key)
	mac.Write(blob)
	l.mac = mac.Sum(nil)
	l.blob = types.BlobInfo{Digest: digest.FromBytes(blob), Size: int64(len(blob))}
	for name, stream := range map[string]io.Reader{
		"at once": bytes.NewReader(blob), "by bytes": iotest.OneByteReader(bytes.NewReader(blob)), "with its end": iotest.DataErrReader(bytes.NewReader(blob)),
		"with more behind it": io.MultiReader(bytes.NewReader(blob), strings.NewReader("more")),
	} {
		if got, err := io.ReadAll(l.Open(io.NopCloser(stream))); err != nil || !bytes.Equal(got, content) {
			t.Errorf("%s: %d bytes, %v", name, len(got), err)
		}
	}
	changed := bytes.Clone(blob)
	changed[0]++
	otherMAC := l
	otherMAC.mac = make([]byte, sha256.Size)
	for name, opened := range map[string]io.Reader{
		"another blob": l.Open(io.NopCloser(bytes.NewReader(changed))), "another HMAC": otherMAC.Open(io.NopCloser(bytes.NewReader(blob))),
	} {
		got := make([]byte, len(blob)) // as whoever reads no further than the size
		if n, err := io.ReadFull(opened, got); err == nil || n == len(blob) {
			t.Errorf("%s: %d bytes, %v", name, n, err)
		}
	}
	short, err := io.ReadAll(l.Open(io.NopCloser(bytes.NewReader(blob[1:]))))
	if err != nil || len(short) != len(blob)-1 {
		t.Errorf("a blob that breaks off: %d bytes, %v", len(short), err)
	}
}
