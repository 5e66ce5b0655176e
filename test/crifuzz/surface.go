package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	protocodec "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	_ "k8s.io/cri-api/pkg/apis/runtime/v1" // registers the descriptors
)

// rpc is one method of CRI, from its descriptor. Methods that a later cri-api
// adds are included automatically.
type rpc struct {
	service, name     string
	request, response protoreflect.MessageType
	streams           bool
}

// endless is the one RPC that the client ends.
const endless = "GetContainerEvents"

// surface returns all RPCs of both services.
func surface() ([]*rpc, error) {
	var all []*rpc
	for _, service := range []protoreflect.FullName{"runtime.v1.RuntimeService", "runtime.v1.ImageService"} {
		found, err := protoregistry.GlobalFiles.FindDescriptorByName(service)
		if err != nil {
			return nil, err
		}
		methods := found.(protoreflect.ServiceDescriptor).Methods()
		for i := range methods.Len() {
			m := methods.Get(i)
			r := &rpc{service: string(service.Name()), name: string(m.Name()), streams: m.IsStreamingServer()}
			var errs [2]error
			r.request, errs[0] = protoregistry.GlobalTypes.FindMessageByName(m.Input().FullName())
			r.response, errs[1] = protoregistry.GlobalTypes.FindMessageByName(m.Output().FullName())
			if err := errors.Join(errs[:]...); err != nil {
				return nil, fmt.Errorf("%s: %w", m.FullName(), err)
			}
			all = append(all, r)
		}
	}
	return all, nil
}

func (r *rpc) new() proto.Message { return r.request.New().Interface() }

// raw is a request in wire format: it need not be one that protobuf would
// encode.
type raw []byte

// rawCodec sends raw unchanged.
type rawCodec struct{ encoding.CodecV2 }

func newRawCodec() rawCodec { return rawCodec{encoding.GetCodecV2(protocodec.Name)} }

func (c rawCodec) Marshal(v any) (mem.BufferSlice, error) {
	if wire, ok := v.(raw); ok {
		return mem.BufferSlice{mem.SliceBuffer(wire)}, nil
	}
	return c.CodecV2.Marshal(v)
}

// invoke sends a request under one of the names of CRI and returns the complete
// answer.
func (r *rpc) invoke(ctx context.Context, conn *grpc.ClientConn, api string, wire raw) ([]proto.Message, error) {
	method := "/runtime." + api + "." + r.service + "/" + r.name
	codec := grpc.ForceCodecV2(newRawCodec())
	if !r.streams {
		reply := r.response.New().Interface()
		if err := conn.Invoke(ctx, method, wire, reply, codec); err != nil {
			return nil, err
		}
		return []proto.Message{reply}, nil
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, method, codec)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(stream.SendMsg(wire), stream.CloseSend()); err != nil && !errors.Is(err, io.EOF) { // RecvMsg has the status
		return nil, err
	}
	if r.name == endless {
		if header, err := stream.Header(); err != nil || header != nil {
			return nil, err
		}
	}
	var replies []proto.Message
	for {
		reply := r.response.New().Interface()
		switch err := stream.RecvMsg(reply); {
		case errors.Is(err, io.EOF):
			return replies, nil
		case err != nil:
			return nil, err
		}
		replies = append(replies, reply)
	}
}
