package gunzip

import (
	"bytes"
	"compress/flate"
	"compress/gzip"
	"errors"
	"io"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/iotest"
)

// contents are contents of several kinds, the larger ones of some blocks.
func contents() map[string][]byte {
	const size = 2*room + 1<<16
	noise, text := make([]byte, size), []byte(nil)
	_, _ = rand.NewChaCha8([32]byte{}).Read(noise) // never fails
	random := rand.New(rand.NewPCG(1, 2))
	for len(text) < len(noise) { // words at all distances
		at := random.IntN(1 << 15)
		text = append(text, noise[at:at+1+random.IntN(300)]...)
	}
	skewed := make([]byte, size) // codes of all sizes
	for i := range skewed {
		skewed[i] = byte(min(255, random.ExpFloat64()*20))
	}
	var mixed []byte
	for i := range size >> 14 {
		mixed = append(mixed, [][]byte{noise, text, skewed}[i%3][i<<14:][:1<<14]...)
	}
	return map[string][]byte{
		"nothing": nil, "a byte": {1}, "noise": noise, "text": text, "skewed": skewed, "mixed": mixed,
		"zeros": make([]byte, size), "pattern": bytes.Repeat([]byte("pattern"), size/7), "two": bytes.Repeat([]byte("ab"), 1<<10),
	}
}

func packed(t testing.TB, level int, content []byte) []byte {
	t.Helper()
	var blob bytes.Buffer
	w, err := gzip.NewWriterLevel(&blob, level)
	if err != nil {
		t.Fatal(err)
	}
	w.Header = gzip.Header{Name: "name", Comment: "comment", Extra: []byte("extra")}
	if _, err := w.Write(content); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return blob.Bytes()
}

// read returns what a source decompresses to.
func read(t testing.TB, source io.Reader) ([]byte, error) {
	t.Helper()
	r := NewReader(source)
	content, err := io.ReadAll(r)
	if err := r.Close(); err != nil {
		t.Error(err)
	}
	return content, err
}

// What gzip has packed is unpacked, however its bytes come.
func TestReader(t *testing.T) {
	t.Parallel()
	for name, content := range contents() {
		for _, level := range []int{gzip.NoCompression, gzip.BestSpeed, gzip.DefaultCompression, gzip.BestCompression, gzip.HuffmanOnly} {
			blob := packed(t, level, content)
			for way, source := range map[string]io.Reader{
				"whole": bytes.NewReader(blob), "bytes": iotest.OneByteReader(bytes.NewReader(blob)),
				"error with data": iotest.DataErrReader(bytes.NewReader(blob)), "halves": iotest.HalfReader(bytes.NewReader(blob)),
			} {
				if got, err := read(t, source); err != nil || !bytes.Equal(got, content) {
					t.Errorf("%s, level %d, %s: %d of %d bytes, %v", name, level, way, len(got), len(content), err)
				}
			}
		}
	}
}

// Members follow each other, and something else the last one. The source is read to its end.
func TestMembers(t *testing.T) {
	t.Parallel()
	texts := contents()
	text := texts["text"]
	whole := packed(t, 6, text)
	data := string(whole[10+2+len("extra")+len("name")+1+len("comment")+1:])
	for name, blob := range map[string][]byte{
		"two":            bytes.Join([][]byte{packed(t, 6, text[:1<<18]), packed(t, 1, text[1<<18:])}, nil),
		"empty ones":     bytes.Join([][]byte{packed(t, 6, nil), packed(t, 6, text), packed(t, 6, nil), packed(t, 6, nil)}, nil),
		"a byte":         append(packed(t, 6, text), 0),
		"half a header":  append(packed(t, 6, text), "\x1f\x8b\x08"...),
		"no header":      append(packed(t, 6, text), "something else"...),
		"zeros":          append(packed(t, 6, text), make([]byte, 3*buffered)...),
		"a header's sum": []byte("\x1f\x8b\x08\x02\x00\x00\x00\x00\x00\xff??" + data),
		"much extra":     []byte("\x1f\x8b\x08\x04\x00\x00\x00\x00\x00\xff\xff\xff" + strings.Repeat("?", 1<<16-1) + data),
		"a long name":    []byte("\x1f\x8b\x08\x08\x00\x00\x00\x00\x00\xff" + strings.Repeat("?", 2*buffered) + "\x00" + data),
	} {
		source := bytes.NewReader(blob)
		if got, err := read(t, source); err != nil || !bytes.Equal(got, text) || source.Len() > 0 {
			t.Errorf("%s: %d of %d bytes, %v, %d not read", name, len(got), len(text), err, source.Len())
		}
	}
}

// What is not gzip, or not whole, is refused.
func TestInvalid(t *testing.T) {
	t.Parallel()
	text := contents()["text"][:1000]
	blob := packed(t, 6, text)
	changed := func(at int, to byte) []byte {
		b := bytes.Clone(blob)
		b[(at+len(b))%len(b)] ^= to
		return b
	}
	var before bytes.Buffer // refers to what is in front of it
	w, err := flate.NewWriterDict(&before, flate.BestCompression, text)
	if err == nil {
		_, err = w.Write(text)
	}
	if err := errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		blob string
		want error
	}{
		"nothing":                 {"", io.ErrUnexpectedEOF},
		"text":                    {"no header at all", gzip.ErrHeader},
		"other checksum":          {string(changed(-8, 1)), gzip.ErrChecksum},
		"other size":              {string(changed(-1, 1)), gzip.ErrChecksum},
		"block of no type":        {header + "\x07", errInvalid},
		"sizes that differ":       {header + "\x01\x01\x00\x00\x00", errInvalid},
		"in front of the content": {header + before.String(), errInvalid},
		"in the member before":    {string(blob) + header + before.String(), errInvalid},
		"too many symbols":        {header + "\xfd\x00\x00", errInvalid},
	} {
		if got, err := read(t, strings.NewReader(test.blob)); !errors.Is(err, test.want) {
			t.Errorf("%s: %d bytes, %v, want %v", name, len(got), err, test.want)
		}
	}
	for size := range blob {
		if got, err := read(t, bytes.NewReader(blob[:size])); !errors.Is(err, io.ErrUnexpectedEOF) || !bytes.HasPrefix(text, got) {
			t.Errorf("%d of %d bytes: %d bytes, %v", size, len(blob), len(got), err)
		}
	}
}

// The error of a source is told, also where the content ends.
func TestSourceFails(t *testing.T) {
	t.Parallel()
	text := contents()["text"]
	blob := packed(t, 6, text)
	failure := errors.New("failure")
	for _, size := range []int{0, 5, 100, len(blob) / 2, len(blob) - 1, len(blob)} {
		source := io.MultiReader(bytes.NewReader(blob[:size]), iotest.ErrReader(failure))
		if got, err := read(t, source); !errors.Is(err, failure) || !bytes.HasPrefix(text, got) {
			t.Errorf("after %d bytes: %d bytes, %v", size, len(got), err)
		}
	}
}

// A reader is used again wherever the one before it has stopped.
func TestReaderAfterAnother(t *testing.T) {
	t.Parallel()
	text := contents()["text"]
	blob := packed(t, 6, text)
	for _, size := range []int64{0, 1, room, room + window, room + window + 1, int64(len(text)) - 1, int64(len(text)), int64(len(text)) + 1} {
		for range 3 {
			r := NewReader(bytes.NewReader(blob))
			got, err := io.ReadAll(io.LimitReader(r, size))
			if err := errors.Join(err, r.Close()); err != nil || !bytes.HasPrefix(text, got) || len(got) != min(int(size), len(text)) {
				t.Errorf("%d bytes: %d, %v", size, len(got), err)
			}
			if got, err := read(t, bytes.NewReader(packed(t, 1, text[:10]))); err != nil || !bytes.Equal(got, text[:10]) {
				t.Errorf("after %d bytes: %q, %v", size, got, err)
			}
		}
	}
}

// A reader that is closed while its source is read is not used again.
func TestCloseWhileSourceIsRead(t *testing.T) {
	t.Parallel()
	noise := contents()["noise"]
	blob := packed(t, gzip.NoCompression, noise)
	from, to := io.Pipe()
	r := NewReader(from)
	written := make(chan error)
	go func() {
		_, err := to.Write(blob[:len(blob)-1])
		written <- err
	}()
	if _, err := io.ReadFull(r, make([]byte, window+room+1)); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(<-written, r.Close()); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if got, err := read(t, bytes.NewReader(blob)); err != nil || !bytes.Equal(got, noise) {
			t.Errorf("%d bytes, %v", len(got), err)
		}
	}
	if err := to.Close(); err != nil {
		t.Error(err)
	}
}

// FuzzInflate holds the inflater to what Go's own makes of the same data.
func FuzzInflate(f *testing.F) {
	for _, content := range contents() {
		for _, level := range []int{gzip.NoCompression, gzip.BestSpeed, gzip.BestCompression, gzip.HuffmanOnly} {
			var data bytes.Buffer
			w, err := flate.NewWriter(&data, level)
			if err == nil {
				_, err = w.Write(content[:min(len(content), 5000)])
			}
			if err := errors.Join(err, w.Close()); err != nil {
				f.Fatal(err)
			}
			f.Add(data.Bytes())
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) { likeGo(t, data) })
}

// likeGo compares what the inflater makes of data, whole or byte by byte, with what Go's own makes of them: the content, how many
// bytes are left behind it, and whether and why they are refused. It returns the content.
func likeGo(t *testing.T, data []byte) []byte {
	t.Helper()
	const limit = 4 * room
	var got []byte
	rest := bytes.NewReader(data)
	want, wrong := io.ReadAll(io.LimitReader(flate.NewReader(rest), limit))
	for _, wrap := range []func(io.Reader) io.Reader{func(r io.Reader) io.Reader { return r }, iotest.OneByteReader} {
		source := bytes.NewReader(data)
		var d inflater
		d.start(wrap(source))
		var err error
		got = nil
		b, last := new(block), new(block)
		for ended := false; !ended && err == nil && len(got) < limit; {
			last, b = b, last
			before := max(0, last.end-window)
			d.oldest -= min(before, d.oldest)
			b.begin = copy(b.data[:], last.data[before:last.end])
			b.end = b.begin
			ended, err = d.inflate(b)
			got = append(got, b.data[b.begin:b.end]...)
		}
		if len(want) == limit && len(got) >= limit {
			err, got = nil, got[:limit]
		}
		switch truncated := errors.Is(err, io.ErrUnexpectedEOF); {
		case (err == nil) != (wrong == nil) || truncated && !errors.Is(wrong, io.ErrUnexpectedEOF):
			t.Fatalf("%d bytes, %v, want %d, %v", len(got), err, len(want), wrong)
		case !bytes.HasPrefix(want, got[:min(len(got), len(want))]) || err == nil && len(got) != len(want) || truncated && len(got) < len(want)-spare:
			t.Fatalf("%d bytes differ from %d", len(got), len(want))
		}
		if left := source.Len() + d.size - d.at; err == nil && len(want) < limit && left != rest.Len() {
			t.Errorf("%d bytes left, want %d", left, rest.Len())
		}
	}
	return got
}

func BenchmarkReader(b *testing.B) {
	for name, content := range contents() {
		blob := packed(b, gzip.BestCompression, content) // others store "skewed"
		for what, open := range map[string]func() (io.ReadCloser, error){
			"this": func() (io.ReadCloser, error) { return NewReader(bytes.NewReader(blob)), nil },
			"go":   func() (io.ReadCloser, error) { return gzip.NewReader(bytes.NewReader(blob)) },
		} {
			b.Run(name+"/"+what, func(b *testing.B) {
				b.SetBytes(int64(len(content)))
				for b.Loop() {
					r, err := open()
					if err == nil {
						_, err = io.Copy(io.Discard, r)
					}
					if err := errors.Join(err, r.Close()); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
