package stream

import (
	"bytes"
	"testing"

	"github.com/moby/spdystream/spdy"
)

// A client reads the recorded replies of a connection, in their order, as its own stream's.
func TestRepliesAreUnderstood(t *testing.T) {
	t.Parallel()
	var sent bytes.Buffer
	for _, reply := range replies() {
		sent.Write(reply)
	}
	client, err := spdy.NewFramer(&sent, &sent)
	if err != nil {
		t.Fatal(err)
	}
	for i := range mostStreams {
		frame, err := client.ReadFrame()
		reply, ok := frame.(*spdy.SynReplyFrame)
		if err != nil || !ok || reply.StreamId != 1 || len(reply.Headers) != 0 {
			t.Errorf("reply %d: %+v, %v", i, frame, err)
		}
	}
}
