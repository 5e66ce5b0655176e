package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
)

// evictions are what Kubernetes' own tests check only on dedicated machines:
// pods that exceed their disk limits. The kubelet learns that from the runtime.
var evictions = []struct {
	name, says string // a part of the pod's message
	container  map[string]any
	volumes    []any
}{
	{
		name: "writable-layer", says: "ephemeral",
		container: map[string]any{
			"command":   []any{"sh", "-c", "dd if=/dev/zero of=/file bs=1M count=20 && sleep 1000"},
			"resources": map[string]any{"limits": map[string]any{"ephemeral-storage": "10Mi"}},
		},
	},
	{
		name: "log", says: "ephemeral",
		container: map[string]any{
			"command":   []any{"sh", "-c", "yes | head -c 10000000 && sleep 1000"},
			"resources": map[string]any{"limits": map[string]any{"ephemeral-storage": "5Mi"}},
		},
	},
	{
		name: "empty-dir", says: "exceeds the limit",
		container: map[string]any{
			"command":      []any{"sh", "-c", "dd if=/dev/zero of=/volume/file bs=1M count=20 && sleep 1000"},
			"volumeMounts": []any{map[string]any{"name": "volume", "mountPath": "/volume"}},
		},
		volumes: []any{map[string]any{"name": "volume", "emptyDir": map[string]any{"sizeLimit": "10Mi"}}},
	},
}

// evict has the kubelet evict each of these pods.
func (c *cluster) evict(ctx context.Context, image string, r *result) {
	for _, e := range evictions {
		e.container["image"] = image
		name := "[own] eviction by " + e.name
		err := c.api.createPod(ctx, e.name, e.container, e.volumes...)
		if err == nil {
			evicted := c.api.awaitPod(ctx, e.name, func(s podStatus) bool {
				return s.Phase == "Failed" && s.Reason == "Evicted" && strings.Contains(s.Message, e.says)
			})
			err = errors.Join(evicted, c.api.removePod(ctx, e.name))
		}
		if err != nil {
			r.fail(name, fmt.Errorf("the kubelet has not evicted the pod: %w", err))
			continue
		}
		r.passed = append(r.passed, spec{name: name})
	}
}
