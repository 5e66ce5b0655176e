// The promises of CRI that critest leaves out, tested from outside: what the
// comments of its api.proto, the KEPs and the kubelet expect, on a real server
// with the real runc and crun. Each file tests one promise and is named after
// it. Package test/scene is their kit.
package main_test

import (
	"context"
	"flag"
	"os"
	"slices"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/tools"
	"github.com/crius-run/crius/test/scene"
)

// commons is a plain node, modern one with a current runc besides Debian's.
var (
	commons scene.Commons
	modern  = scene.Commons{Also: []string{current}, Prepare: func(ctx context.Context) (node.Options, error) {
		runc, err := tools.Runc(ctx)
		return node.Options{Config: "[runtime.handlers." + current + "]\npath = \"" + runc + "\"\n"}, err
	}}
)

// current is the handler of that runc.
const current = "runc-current"

func TestMain(m *testing.M) {
	// A test mostly waits, so more run at once than there are CPUs.
	flag.Set("test.parallel", "6")
	os.Exit(scene.Run(m, &commons, &modern))
}

// nodeStatus calls Status.
func nodeStatus(t *testing.T, w *scene.World) *cri.StatusResponse {
	t.Helper()
	resp, err := w.Runtime().Status(t.Context(), &cri.StatusRequest{})
	if err != nil {
		t.Fatalf("Status: %v", err)
	}
	return resp
}

// features returns Status's features of a handler.
func features(t *testing.T, w *scene.World, handler string) *cri.RuntimeHandlerFeatures {
	t.Helper()
	resp := nodeStatus(t, w)
	i := slices.IndexFunc(resp.RuntimeHandlers, func(h *cri.RuntimeHandler) bool { return h.Name == handler })
	if i < 0 {
		t.Fatalf("Status does not name the handler %s: %v", handler, resp.RuntimeHandlers)
	}
	return resp.RuntimeHandlers[i].Features
}

// asUser runs a container as a user of the test images.
func asUser(uid, gid int64) scene.ContainerChange {
	return func(c *cri.ContainerConfig) {
		c.Linux.SecurityContext.RunAsUser = &cri.Int64Value{Value: uid}
		c.Linux.SecurityContext.RunAsGroup = &cri.Int64Value{Value: gid}
	}
}

// mounted adds mounts.
func mounted(mounts ...*cri.Mount) scene.ContainerChange {
	return func(c *cri.ContainerConfig) { c.Mounts = append(c.Mounts, mounts...) }
}
