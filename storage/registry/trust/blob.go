package trust

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
)

// Limits of the signatures of one image.
const (
	MaxSignatures    = 128
	MaxSignatureSize = 2 << 20 // bytes of all
)

// Blobs are signatures in the form in which containers/storage and the dir transport
// keep them: a zero byte, the name of the format, a line break and the signature.
// They are what UntrustedSignatures of an image.UnparsedImage returned, whose type has
// no name outside the library. Those that are too many, too large or of an unknown
// format are left out and counted.
//
// The library takes signatures of any format from sources of the program's own if
// they are in this form, and keeps them as they are.
func Blobs[S any](signatures []S) (blobs [][]byte, dropped int) {
	size := 0
	for _, s := range signatures {
		one, err := blob(s)
		if err != nil || len(blobs) == MaxSignatures || size+len(one) > MaxSignatureSize {
			dropped++
			continue
		}
		blobs = append(blobs, one)
		size += len(one)
	}
	return blobs, dropped
}

func blob(signature any) ([]byte, error) {
	switch s := signature.(type) {
	case interface{ UntrustedSignature() []byte }:
		return append([]byte("\x00simple-signing\n"), s.UntrustedSignature()...), nil
	case interface {
		UntrustedMIMEType() string
		UntrustedPayload() []byte
		UntrustedAnnotations() map[string]string
	}:
		return SigstoreBlob(s.UntrustedMIMEType(), s.UntrustedPayload(), s.UntrustedAnnotations())
	}
	return nil, fmt.Errorf("signature of type %T: its format is unknown", signature)
}

// SigstoreBlob is the sigstore signature of these parts in the form of Blobs.
func SigstoreBlob(mimeType string, payload []byte, annotations map[string]string) ([]byte, error) {
	text, err := json.Marshal(struct {
		MIMEType    string            `json:"mimeType"`
		Payload     []byte            `json:"payload"`
		Annotations map[string]string `json:"annotations"`
	}{mimeType, payload, annotations})
	return append([]byte("\x00sigstore-json\n"), text...), err
}

// Union is first, and of second what first does not have and what the limits of one
// image leave room for.
func Union(first, second [][]byte) [][]byte {
	union := slices.Clone(first)
	size := 0
	for _, one := range first {
		size += len(one)
	}
	for _, one := range second {
		known := slices.ContainsFunc(union, func(other []byte) bool { return bytes.Equal(one, other) })
		if known || len(union) >= MaxSignatures || size+len(one) > MaxSignatureSize {
			continue
		}
		union = append(union, one)
		size += len(one)
	}
	return union
}
