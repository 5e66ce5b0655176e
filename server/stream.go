package server

import "google.golang.org/protobuf/proto"

const (
	// clientMessageSize is the largest message that the kubelet and crictl
	// receive.
	clientMessageSize = 16 << 20
	// messageOverhead is more than the field headers of a message take that
	// holds a few large fields.
	messageOverhead = 64
	// chunkSize is about how many bytes of a list travel in one message of a
	// stream: small enough to be built and sent at once, large enough for the
	// lists of most nodes.
	chunkSize = 256 << 10
)

// inChunks hands items to send in order, in slices of about chunkSize bytes
// and of at least one item; never an empty one.
func inChunks[T any](items []T, sizeOf func(T) int, send func([]T) error) error {
	start, size := 0, 0
	for i, item := range items {
		n := sizeOf(item)
		if i > start && size+n > chunkSize {
			if err := send(items[start:i]); err != nil {
				return err
			}
			start, size = i, 0
		}
		size += n
	}
	if start == len(items) {
		return nil
	}
	return send(items[start:])
}

func messageSize[M proto.Message](m M) int { return proto.Size(m) }

// matching is those of views that filter lets pass.
func matching[V, F any](views []*V, filter F, matches func(F, *V) bool) []*V {
	var found []*V
	for _, v := range views {
		if matches(filter, v) {
			found = append(found, v)
		}
	}
	return found
}

// translated makes a message of each view. All of them lie in one block of
// memory, which a kubelet that lists every second is worth.
func translated[V, M any](views []*V, fill func(*M, *V)) []*M {
	block := make([]M, len(views))
	messages := make([]*M, len(views))
	for i, v := range views {
		messages[i] = &block[i]
		fill(messages[i], v)
	}
	return messages
}
