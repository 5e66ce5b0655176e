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
	MaxSignatureSize = 2 << 20 // bytes of all signatures
)

// Blobs returns signatures in the form in which containers/storage and the dir transport keep them:
// a zero byte, the name of the format, a line break and the signature. Its argument is the result
// of UntrustedSignatures of an image.UnparsedImage, whose type has no name outside the library.
// Signatures that are too many, too large or of an unknown format are left out, and counted.
//
// The library accepts signatures of any format in this form from a program's own sources, and
// stores them unchanged.
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

// SigstoreBlob returns the sigstore signature with these parts, in the form of Blobs.
func SigstoreBlob(mimeType string, payload []byte, annotations map[string]string) ([]byte, error) {
	text, err := json.Marshal(struct {
		MIMEType    string            `json:"mimeType"`
		Payload     []byte            `json:"payload"`
		Annotations map[string]string `json:"annotations"`
	}{mimeType, payload, annotations})
	return append([]byte("\x00sigstore-json\n"), text...), err
}

// Union returns first and, within the limits of one image, those of second that are not in first.
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
