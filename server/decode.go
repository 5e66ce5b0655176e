package server

import (
	"context"
	"fmt"
	"slices"
	"unicode/utf8"

	"google.golang.org/grpc"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/crius-run/crius/internal/fault"
)

// A request that cannot be decoded is the client's mistake, like one with an
// invalid field. gRPC answers it with Internal, which is reserved for bugs of
// crius, and does so before a handler could answer otherwise. So codec reports
// no error to gRPC: it leaves the error in the envelope of the request.

// envelope is a message to decode, with the error if it could not be decoded.
type envelope struct {
	message any
	err     error
}

// Unmarshal decodes into envelopes.
func (c codec) Unmarshal(data mem.BufferSlice, v any) error {
	e, ok := v.(*envelope)
	if !ok {
		return c.CodecV2.Unmarshal(data, v)
	}
	if err := c.CodecV2.Unmarshal(data, e.message); err != nil {
		if m, ok := e.message.(proto.Message); ok {
			if path := notText(m.ProtoReflect().Descriptor(), data.Materialize()); path != "" {
				err = fmt.Errorf("%s is not valid UTF-8", path)
			}
		}
		e.err = fmt.Errorf("request cannot be decoded: %w: %w", err, fault.Invalid)
	}
	return nil
}

// notText returns the path of the first field that is not the text in UTF-8 that it has to be, in
// an encoded message; empty: there is none. The library does not name it.
func notText(of protoreflect.MessageDescriptor, data []byte) string {
	seen := map[protowire.Number]int{}
	for len(data) > 0 {
		number, kind, n := protowire.ConsumeTag(data)
		if n < 0 {
			return ""
		}
		size := protowire.ConsumeFieldValue(number, kind, data[n:])
		if size < 0 {
			return ""
		}
		value, field := data[n:n+size], of.Fields().ByNumber(number)
		data = data[n+size:]
		if field == nil || kind != protowire.BytesType {
			continue
		}
		path := string(field.Name())
		if field.IsList() {
			path += fmt.Sprintf("[%d]", seen[number])
			seen[number]++
		}
		text, _ := protowire.ConsumeBytes(value)
		switch field.Kind() {
		case protoreflect.StringKind:
			if !utf8.Valid(text) {
				return path
			}
		case protoreflect.MessageKind:
			if inner := notText(field.Message(), text); inner != "" {
				return path + "." + inner
			}
		}
	}
	return ""
}

// open decodes a request with a function of gRPC.
func open(decode func(any) error, req any) error {
	e := envelope{message: req}
	if err := decode(&e); err != nil {
		return err
	}
	return e.err
}

// decoded returns a service whose methods take their requests out of envelopes.
// Streams do that in a decodedStream.
func decoded(service grpc.ServiceDesc) grpc.ServiceDesc {
	service.Methods = slices.Clone(service.Methods)
	for i := range service.Methods {
		handler := service.Methods[i].Handler
		service.Methods[i].Handler = func(srv any, ctx context.Context, decode func(any) error, interceptor grpc.UnaryServerInterceptor) (any, error) {
			return handler(srv, ctx, func(req any) error {
				err := statusOf(open(decode, req))
				if err != nil { // and no interceptor sees it
					logCall(ctx, nil, 0, err)
				}
				return err
			}, interceptor)
		}
	}
	return service
}

type decodedStream struct {
	grpc.ServerStream
	unknown *unknownGuard
}

func (s decodedStream) RecvMsg(req any) error {
	if err := open(s.ServerStream.RecvMsg, req); err != nil {
		return err
	}
	return s.unknown.check(s.Context(), req)
}
