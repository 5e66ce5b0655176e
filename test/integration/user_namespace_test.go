package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/testkit/kubelet"
	"github.com/crius-run/crius/internal/testkit/node"
	"github.com/crius-run/crius/internal/testkit/tools"
)

// mappable is a node with a handler "runc-current" beside Debian's runc, which
// knows no id-mapped mounts.
func mappable(t *testing.T) *world {
	t.Helper()
	runc, err := tools.Runc(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return private(t, node.Options{Config: fmt.Sprintf("[runtime.handlers.runc-current]\npath = %q\n", runc)})
}

// usersFrom gives a pod a user namespace whose ids begin with first.
func usersFrom(first uint32) podChange {
	return func(c *cri.PodSandboxConfig) {
		ids := []*cri.IDMapping{{HostId: first, ContainerId: 0, Length: 65536}}
		c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = &cri.UserNamespace{Mode: cri.NamespaceMode_POD, Uids: ids, Gids: ids}
	}
}

func owner(t *testing.T, path string) string {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(&os.PathError{Op: "stat", Path: path, Err: err})
	}
	return fmt.Sprintf("%d:%d", st.Uid, st.Gid)
}

// The volume of a pod in a user namespace keeps its owners on disk: what root
// of the pod writes there is root's, and what is root's belongs to root of the
// pod, although that is an ordinary user on the node.
func TestVolumesOfUserNamespaces(t *testing.T) {
	t.Parallel()
	w := mappable(t)
	for name, network := range map[string]podChange{"own network": nil, "node's network": kubelet.HostNetwork} {
		t.Run(name, func(t *testing.T) {
			p := w.run(t, "runc-current", usersFrom(200000), func(c *cri.PodSandboxConfig) {
				if network != nil {
					network(c)
				}
			})
			volume := w.dir(t)
			put(t, filepath.Join(volume, "old"), "of root")
			if err := os.Chmod(filepath.Join(volume, "old"), 0o600); err != nil {
				t.Fatal(err)
			}
			ids := p.config.Linux.SecurityContext.NamespaceOptions.UsernsOptions.Uids
			c := p.start(t, "sleep", withMounts(
				&cri.Mount{ContainerPath: "/mapped", HostPath: volume, UidMappings: ids, GidMappings: ids, MountOptions: []string{"noexec"}},
				&cri.Mount{ContainerPath: "/plain", HostPath: volume},
			))
			equal(t, "uid_map", strings.Join(strings.Fields(c.exec(t, "cat /proc/self/uid_map")), " "), "0 200000 65536")
			equal(t, "a file of root's", c.exec(t, "cat /mapped/old"), "of root")
			for _, file := range []string{"/mapped/new", "/in-the-image", "/etc/passwd", "/dev/shm/x", "/etc/resolv.conf"} {
				c.exec(t, "write "+file+" x")
			}
			equal(t, "owner of a new file on the volume", owner(t, filepath.Join(volume, "new")), "0:0")
			if r := c.execResult(t, "cat /plain/old"); r.ExitCode == 0 {
				t.Error("through a mount without mappings the file is still root's alone, but it could be read")
			}
			if text := c.exec(t, "cat /proc/self/mountinfo"); !regexp.MustCompile(` /mapped rw,noexec\S*idmapped `).MatchString(text) {
				t.Errorf("mount table:\n%s", text)
			}
		})
	}
}

// Debian's runc and crun have no id-mapped mounts, or wrong ones.
func TestUserNamespaceNeedsIDMappedMounts(t *testing.T) {
	t.Parallel()
	w := mappable(t)
	for _, handler := range handlers {
		config := w.podConfig(t, usersFrom(200000))
		_, err := w.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: config, RuntimeHandler: handler})
		wantCode(t, err, codes.Unimplemented)
	}
	status, err := w.Runtime().Status(t.Context(), &cri.StatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range status.RuntimeHandlers {
		equal(t, "user namespaces with "+h.Name, h.Features.UserNamespaces, h.Name == "runc-current")
	}
}
