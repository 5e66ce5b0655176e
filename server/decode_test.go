package server

import (
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/types/known/emptypb"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// bytesCodec sends bytes unchanged.
type bytesCodec struct{ encoding.CodecV2 }

func (bytesCodec) Marshal(v any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(v.([]byte))}, nil
}

// A message that is not protobuf is the client's mistake. gRPC answers
// Internal, which is reserved for bugs of crius.
func TestUndecodableRequestsAreInvalid(t *testing.T) {
	t.Parallel()
	n := start(t)
	codec := grpc.ForceCodecV2(bytesCodec{newCodec()})
	for name, request := range map[string][]byte{"no tag": {0xff}, "cut": {0x0a, 0x05, 'a'}} {
		for _, service := range []grpc.ServiceDesc{cri.RuntimeService_ServiceDesc, cri.ImageService_ServiceDesc} {
			for _, api := range []string{packageV1, packageAlpha} {
				prefix := "/" + strings.Replace(service.ServiceName, packageV1, api, 1) + "/"
				for _, m := range service.Methods {
					err := n.conn.Invoke(t.Context(), prefix+m.MethodName, request, &emptypb.Empty{}, codec)
					wantUndecodable(t, name+": "+prefix+m.MethodName, err)
				}
				for _, s := range service.Streams {
					stream, err := n.conn.NewStream(t.Context(), &s, prefix+s.StreamName, codec)
					if err == nil {
						err = stream.SendMsg(request)
					}
					if err == nil {
						err = stream.RecvMsg(&emptypb.Empty{})
					}
					wantUndecodable(t, name+": "+prefix+s.StreamName, err)
				}
			}
		}
	}
	handler := []byte{0x12, 0x01, 0xff} // which is not UTF-8
	wantUndecodable(t, "handler", n.conn.Invoke(t.Context(), cri.RuntimeService_RunPodSandbox_FullMethodName, handler, &emptypb.Empty{}, codec))
}

// A path may be any bytes for the kernel, and an argument or a label for a careless client, but CRI
// cannot say them. The answer names the field.
func TestTextThatIsNotUTF8IsRefusedByName(t *testing.T) {
	t.Parallel()
	n := start(t)
	field := func(number protowire.Number, parts ...string) string {
		return string(protowire.AppendString(protowire.AppendTag(nil, number, protowire.BytesType), strings.Join(parts, "")))
	}
	good, wrong := field(1, "/x"), "/v\xe9"
	for method, requests := range map[string]map[string]string{
		cri.RuntimeService_CreateContainer_FullMethodName: {
			"config.args[1]":             field(2, field(4, "a"), field(4, wrong)),
			"config.working_dir":         field(2, field(5, wrong)),
			"config.envs[1].key":         field(2, field(6, good), field(6, field(1, wrong))),
			"config.mounts[0].host_path": field(2, field(7, good, field(2, wrong))),
			"config.labels.value":        field(2, field(9, field(1, "k"), field(2, wrong))),
			"config.annotations.key":     field(2, field(10, field(1, wrong))),
		},
		cri.RuntimeService_RunPodSandbox_FullMethodName: {"runtime_handler": field(2, "\xff"), "config.hostname": field(1, field(2, wrong))},
		cri.RuntimeService_ExecSync_FullMethodName:      {"cmd[1]": field(2, "cat") + field(2, wrong)},
	} {
		for path, request := range requests {
			err := n.conn.Invoke(t.Context(), method, []byte(request), &emptypb.Empty{}, grpc.ForceCodecV2(bytesCodec{newCodec()}))
			wantUndecodable(t, path, err)
			if !strings.Contains(err.Error(), ": "+path+" is not valid UTF-8") {
				t.Errorf("%s: %v", path, err)
			}
		}
	}
}

func wantUndecodable(t *testing.T, what string, err error) {
	t.Helper()
	if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "cannot be decoded") {
		t.Errorf("%s: %v", what, err)
	}
}
