package pullerror

import (
	"bytes"
	"encoding/json"
	"fmt"
)

// MaxHead is how many bytes of an answer Instead looks at.
const MaxHead = 4 << 10

// Instead says what has come with status 200 instead of a manifest, a config, a layer or a file, and what to do
// about it. It judges by the first bytes of the answer, which has so many in total. what is empty if they say nothing.
// It may only be asked about what is not as it should be: some files are web pages.
func Instead(head []byte, total int64) (what, do string) {
	const inItsPlace = "check whether a proxy, a login page or a broken registry answers in its place"
	var document struct {
		Errors         []json.RawMessage `json:"errors"`
		Error, Message json.RawMessage
	}
	switch {
	case total == 0:
		return "is empty", inItsPlace
	case bytes.HasPrefix(bytes.TrimSpace(head), []byte("<")):
		return fmt.Sprintf("is a web page and begins with %.60q", head), inItsPlace
	case total > int64(len(head)) || total > MaxHead || json.Unmarshal(head, &document) != nil:
		return "", ""
	}
	for _, text := range append(document.Errors, document.Error, document.Message) { // of the specification, or of gateways
		if len(text) > 0 && !bytes.Equal(text, []byte("null")) {
			return fmt.Sprintf("is an error with status 200, %.200s", text), "see the log of the registry, or what answers in its place"
		}
	}
	return "", ""
}
