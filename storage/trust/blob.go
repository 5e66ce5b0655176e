package trust

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
)

// Limits of the signatures of one image.
const (
	maxSignatures    = 128
	maxSignatureSize = 2 << 20 // bytes of all
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
		if err != nil || len(blobs) == maxSignatures || size+len(one) > maxSignatureSize {
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
		text, err := json.Marshal(struct {
			MIMEType    string            `json:"mimeType"`
			Payload     []byte            `json:"payload"`
			Annotations map[string]string `json:"annotations"`
		}{s.UntrustedMIMEType(), s.UntrustedPayload(), s.UntrustedAnnotations()})
		return append([]byte("\x00sigstore-json\n"), text...), err
	}
	return nil, fmt.Errorf("signature of type %T: its format is unknown", signature)
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
		if known || len(union) >= maxSignatures || size+len(one) > maxSignatureSize {
			continue
		}
		union = append(union, one)
		size += len(one)
	}
	return union
}
