package shim

import (
	"context"
	"fmt"
	"strings"

	task "github.com/containerd/containerd/api/runtime/task/v2"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/crius-run/crius/internal/fault"
)

// Usage is a container's usage as reported by its shim.
type Usage struct {
	CPU        uint64 // nanoseconds
	Memory     uint64 // bytes
	WorkingSet uint64 // bytes of it that cannot be reclaimed
	Tasks      uint64
}

// Usage asks the shim for the usage. The answer is one of two messages of
// containerd's cgroups module, named for the versions of the kernel's cgroups.
func (c *Client) Usage(ctx context.Context, id string) (Usage, error) {
	var resp task.StatsResponse
	if err := c.call(ctx, "Stats", &task.StatsRequest{ID: id}, &resp); err != nil {
		return Usage{}, err
	}
	return parseUsage(resp.Stats.GetTypeUrl(), resp.Stats.GetValue())
}

// Numbers of the fields, from outer to inner, in metrics.proto of
// github.com/containerd/cgroups/v3/cgroup1/stats and cgroup2/stats.
func parseUsage(typeURL string, metrics []byte) (Usage, error) {
	var u Usage
	var reclaimable uint64
	switch name := typeURL[strings.LastIndex(typeURL, "/")+1:]; name {
	case "io.containerd.cgroups.v1.Metrics":
		u = Usage{CPU: field(metrics, 3, 1, 1), Memory: field(metrics, 4, 33, 2), Tasks: field(metrics, 2, 1)}
		reclaimable = field(metrics, 4, 30)
	case "io.containerd.cgroups.v2.Metrics":
		u = Usage{CPU: 1000 * field(metrics, 2, 1), Memory: field(metrics, 4, 32), Tasks: field(metrics, 1, 1)}
		reclaimable = field(metrics, 4, 13)
	default:
		return u, fmt.Errorf("unsupported type %q of the shim's statistics: %w", typeURL, fault.Unimplemented)
	}
	u.WorkingSet = u.Memory - min(reclaimable, u.Memory)
	return u, nil
}

// field returns a number in nested messages; 0 if it is not set.
func field(message []byte, path ...protowire.Number) uint64 {
	for len(message) > 0 {
		number, kind, n := protowire.ConsumeTag(message)
		if n < 0 {
			return 0
		}
		message = message[n:]
		switch {
		case number == path[0] && kind == protowire.BytesType && len(path) > 1:
			inner, n := protowire.ConsumeBytes(message)
			if n < 0 {
				return 0
			}
			return field(inner, path[1:]...)
		case number == path[0] && kind == protowire.VarintType && len(path) == 1:
			value, n := protowire.ConsumeVarint(message)
			if n < 0 {
				return 0
			}
			return value
		}
		if n = protowire.ConsumeFieldValue(number, kind, message); n < 0 {
			return 0
		}
		message = message[n:]
	}
	return 0
}
