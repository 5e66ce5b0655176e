package server

import (
	"google.golang.org/grpc/encoding"
	protocodec "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"
)

// pooledSize is the largest message for which gRPC has a buffer of about its
// size. For a larger one gRPC takes 1 MiB, and keeps that for a while: waiting
// for the next list would then cost more memory than all else in a server with
// a hundred pods.
const pooledSize = 32 << 10

// codec is gRPC's own codec, but gives a large message only the memory that it
// needs, and a listing none, and computes the size of a message once: for maps
// that takes as long as to encode them.
type codec struct{ encoding.CodecV2 }

func newCodec() codec { return codec{encoding.GetCodecV2(protocodec.Name)} }

func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	if l, ok := v.(listing); ok {
		return l.encoded(), nil
	}
	message, ok := v.(proto.Message)
	if !ok {
		return c.CodecV2.Marshal(v)
	}
	size := proto.Size(message)
	marshal := proto.MarshalOptions{UseCachedSize: true} // computed just now
	if size > pooledSize || mem.IsBelowBufferPoolingThreshold(size) {
		data, err := marshal.Marshal(message)
		if err != nil {
			return nil, err
		}
		return mem.BufferSlice{mem.SliceBuffer(data)}, nil
	}
	pool := mem.DefaultBufferPool()
	buffer := pool.Get(size)
	if _, err := marshal.MarshalAppend((*buffer)[:0], message); err != nil {
		pool.Put(buffer)
		return nil, err
	}
	return mem.BufferSlice{mem.NewBuffer(buffer, pool)}, nil
}
