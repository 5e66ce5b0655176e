package server

import (
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/crius-run/crius/internal/pod"
)

// A kubelet lists pods and containers every second for as long as the node lives,
// and next to none of them has changed since: each is encoded once for every state
// that it gets into, and a list is put together from that.

// entriesField is where lists of CRI, and the messages of their streams, have
// their elements.
const entriesField = 1

// entry is an element of a list as it goes over the wire: tag, length, message.
type entry []byte

func newEntry(m proto.Message) (entry, error) {
	size := proto.Size(m)
	e := make(entry, 0, protowire.SizeTag(entriesField)+protowire.SizeBytes(size))
	e = protowire.AppendTag(e, entriesField, protowire.BytesType)
	e = protowire.AppendVarint(e, uint64(size))
	return proto.MarshalOptions{UseCachedSize: true}.MarshalAppend(e, m)
}

func (e entry) size() int { return len(e) }

// entriesOf are the elements that show views, each as fill fills its message. An
// entry is kept in the memo of its view.
func entriesOf[V, M any, P interface {
	*M
	proto.Message
}](views []*V, memo func(*V) *pod.Memo, fill func(*M, *V)) ([]entry, error) {
	entries := make([]entry, len(views))
	for i, v := range views {
		text, err := memo(v).Get(func() ([]byte, error) {
			m := P(new(M))
			fill(m, v)
			return newEntry(m)
		})
		if err != nil {
			return nil, err
		}
		entries[i] = text
	}
	return entries, nil
}

// listed gives a response its elements, as fields that it does not know: protobuf
// encodes those as they are. Whoever receives it knows them; here, its accessors
// show none.
func listed[R proto.Message](response R, entries []entry) R {
	size := 0
	for _, e := range entries {
		size += len(e)
	}
	text := make([]byte, 0, size)
	for _, e := range entries {
		text = append(text, e...)
	}
	response.ProtoReflect().SetUnknown(text)
	return response
}
