package main

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	protocodec "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// arrival is ListContainers until the answer has arrived: it excludes the
// client's decoding of a long list, which takes longer than the server's
// sending.
func (s *server) arrival(count int) call {
	return call{"ListContainers, not decoded", func(ctx context.Context) error {
		var got elements
		err := s.conn.Invoke(ctx, cri.RuntimeService_ListContainers_FullMethodName, &cri.ListContainersRequest{}, &got,
			grpc.ForceCodecV2(counting{encoding.GetCodecV2(protocodec.Name)}))
		return wrong(err, int(got), count, 1)
	}}
}

// elements is the number of fields in a message; nothing else of it is read.
type elements int

// counting is gRPC's codec, except that answers are only counted.
type counting struct{ encoding.CodecV2 }

func (c counting) Unmarshal(data mem.BufferSlice, v any) error {
	n, ok := v.(*elements)
	if !ok {
		return c.CodecV2.Unmarshal(data, v)
	}
	text := data.Materialize()
	for len(text) > 0 {
		_, _, size := protowire.ConsumeField(text)
		if size < 0 {
			return protowire.ParseError(size)
		}
		text = text[size:]
		*n++
	}
	return nil
}
