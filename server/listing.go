package server

import (
	"context"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/pod/view"
)

// A kubelet lists pods and containers every second for as long as the node
// lives, and almost none of them has changed since the last list: each is
// encoded once for every state that it enters, and lists are assembled from
// these encodings (docs/decisions/0014-lists.md).

// listing is a CRI list, or a message of its stream, as codec sends it: without
// making a message or a copy.
type listing []entry

// entry is an element of a list as sent over the wire: tag, length, message.
type entry []byte

// entriesField is the field of CRI's lists, and of the messages of their
// streams, that holds the elements.
const entriesField = 1

func newEntry(m proto.Message) (entry, error) {
	size := proto.Size(m)
	e := make(entry, 0, protowire.SizeTag(entriesField)+protowire.SizeBytes(size))
	e = protowire.AppendTag(e, entriesField, protowire.BytesType)
	e = protowire.AppendVarint(e, uint64(size))
	return proto.MarshalOptions{UseCachedSize: true}.MarshalAppend(e, m)
}

func (e entry) size() int { return len(e) }

// listingOf returns a listing of views, whose messages fill fills. The memo of
// each view keeps its entry.
func listingOf[V, M any, P interface {
	*M
	proto.Message
}](views []*V, memo func(*V) *view.Memo, fill func(*M, *V)) (listing, error) {
	l := make(listing, len(views))
	for i, v := range views {
		text, err := memo(v).Get(func() ([]byte, error) {
			m := P(new(M))
			fill(m, v)
			return newEntry(m)
		})
		if err != nil {
			return nil, err
		}
		l[i] = text
	}
	return l, nil
}

func (l listing) encoded() mem.BufferSlice {
	pieces := make(mem.BufferSlice, len(l))
	for i, e := range l {
		pieces[i] = mem.SliceBuffer(e)
	}
	return pieces
}

// send sends l over the stream of a list.
func (l listing) send(out grpc.ServerStream) error {
	return inChunks(l, entry.size, func(chunk []entry) error { return out.SendMsg(listing(chunk)) })
}

// withListings returns the RuntimeService of v1 with listings as its longest
// lists, for which the generated code has no type.
func withListings(v1 grpc.ServiceDesc) grpc.ServiceDesc {
	v1.Methods = slices.Clone(v1.Methods)
	for i := range v1.Methods {
		m := &v1.Methods[i]
		switch m.MethodName {
		case "ListPodSandbox":
			m.Handler = listingHandler(cri.RuntimeService_ListPodSandbox_FullMethodName, func(s *runtimeService, req *cri.ListPodSandboxRequest) (listing, error) {
				return s.sandboxList(req.GetFilter())
			})
		case "ListContainers":
			m.Handler = listingHandler(cri.RuntimeService_ListContainers_FullMethodName, func(s *runtimeService, req *cri.ListContainersRequest) (listing, error) {
				return s.containerList(req.GetFilter())
			})
		}
	}
	return v1
}

// listingHandler does what the generated handlers do.
func listingHandler[Req any](method string, list func(*runtimeService, *Req) (listing, error)) grpc.MethodHandler {
	return func(srv any, ctx context.Context, decode func(any) error, interceptor grpc.UnaryServerInterceptor) (any, error) {
		req := new(Req)
		if err := decode(req); err != nil {
			return nil, err
		}
		handler := func(_ context.Context, req any) (any, error) { return list(srv.(*runtimeService), req.(*Req)) }
		if interceptor == nil {
			return handler(ctx, req)
		}
		return interceptor(ctx, req, &grpc.UnaryServerInfo{Server: srv, FullMethod: method}, handler)
	}
}
