package server

import (
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Messages of every size arrive unchanged, and a large one takes no more memory
// than its size.
func TestCodec(t *testing.T) {
	c := newCodec()
	for _, size := range []int{1, 1000, pooledSize - 10, pooledSize, pooledSize + 1, 100_000, 3 << 20} {
		sent := &cri.ExecSyncResponse{Stdout: []byte(strings.Repeat("x", size)), ExitCode: 3}
		data, err := c.Marshal(sent)
		if err != nil {
			t.Fatal(err)
		}
		if taken := cap(data[0].ReadOnlyData()); data.Len() > pooledSize && taken > data.Len()+data.Len()/8 {
			t.Errorf("a message of %d bytes took %d", data.Len(), taken)
		}
		var got cri.ExecSyncResponse
		if err := c.Unmarshal(data, &got); err != nil || !proto.Equal(sent, &got) {
			t.Errorf("%d bytes became %d: %v", size, len(got.Stdout), err)
		}
		data.Free()
	}
	if _, err := c.Marshal("no message"); err == nil {
		t.Error("what is no message was marshalled")
	}
}
