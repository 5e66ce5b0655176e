package source

import "encoding/json"

// maxAnnotations bounds the annotations of a manifest that are kept in memory, in bytes.
const maxAnnotations = 16 << 10

// AnnotationsOf returns the annotations of a manifest; nil if they are too large.
func AnnotationsOf(manifest []byte) map[string]string {
	var m struct {
		Annotations map[string]string `json:"annotations"`
	}
	if json.Unmarshal(manifest, &m) != nil || Bytes(m.Annotations) > maxAnnotations {
		return nil
	}
	return m.Annotations
}

// Bytes returns approximately the memory that annotations take.
func Bytes(annotations map[string]string) (sum int) {
	for key, value := range annotations {
		sum += len(key) + len(value) + 32 // and their part of the map
	}
	return sum
}
