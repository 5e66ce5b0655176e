package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/tools"
)

// key is where containers see a key of the node.
const key = "/run/secrets/etc-pki-entitlement/key.pem"

// entitled is a node whose mounts.conf lists a directory of secrets.
func entitled(t *testing.T, config ...string) (w *world, secrets string) {
	t.Helper()
	dir := t.TempDir()
	secrets = filepath.Join(dir, "secrets")
	must(t, os.MkdirAll(filepath.Join(dir, "pki"), 0o755))
	must(t, os.Mkdir(secrets, 0o755))
	put(t, filepath.Join(dir, "pki", "key.pem"), "entitled")
	must(t, os.Symlink("../pki", filepath.Join(secrets, "etc-pki-entitlement")))
	conf := filepath.Join(dir, "mounts.conf")
	put(t, conf, secrets+":/run/secrets\n"+secrets+"/missing:/missing\n")
	return private(t, node.Options{Config: fmt.Sprintf("[pod]\nmounts_files = [%q]\n", conf) + strings.Join(config, "")}), secrets
}

// Each container gets its own copies of what the node's mounts.conf lists.
func TestMountsConf(t *testing.T) {
	t.Parallel()
	w, secrets := entitled(t)
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		a, b := p.start(t, "sleep"), p.start(t, "sleep", readOnlyRoot)
		for _, c := range []*container{a, b} {
			equal(t, "key", c.exec(t, "cat "+key), "entitled")
			mounts := c.procfs(t, "mountinfo")
			if line, _, _ := strings.Cut(mounts[strings.Index(mounts, " /run/secrets "):], "\n"); !strings.Contains(line, "size=16384k") {
				t.Errorf("the copies are not bounded: %s", line)
			}
		}
		a.exec(t, "write "+key+" changed")
		equal(t, "key of the other container", b.exec(t, "cat "+key), "entitled")
		equal(t, "key of the node", read(t, filepath.Join(secrets, "etc-pki-entitlement", "key.pem")), "entitled")
		equal(t, "key of a later container", p.start(t, "sleep").exec(t, "cat "+key), "entitled")

		volume := w.dir(t)
		put(t, filepath.Join(volume, "token"), "token")
		at := func(place string) containerChange {
			return withMounts(&cri.Mount{ContainerPath: place, HostPath: volume, Readonly: true})
		}
		in := p.start(t, "sleep", at("/run/secrets/kubernetes.io/serviceaccount"))
		equal(t, "mount among the copies", in.exec(t, "cat /run/secrets/kubernetes.io/serviceaccount/token ; cat "+key), "tokenentitled")
		instead := p.start(t, "sleep", at("/run/secrets"))
		equal(t, "mount in place of the copies", instead.exec(t, "ls /run/secrets"), "token\n")
		if missing := a.execResult(t, "ls /missing"); missing.ExitCode == 0 {
			t.Errorf("what the node does not have is there: %q", missing.Stdout)
		}

		dir := filepath.Join(w.RunRoot(), "containers", a.id)
		a.stop(t, 0)
		a.remove(t)
		if _, err := os.Lstat(dir); err == nil {
			t.Errorf("%s has outlived the container", dir)
		}
	})
}

// The root of a pod's user namespace owns the copies.
func TestMountsConfInUserNamespace(t *testing.T) {
	t.Parallel()
	runc, err := tools.Runc(t.Context())
	must(t, err)
	w, _ := entitled(t, fmt.Sprintf("[runtime.handlers.runc]\npath = %q\n", runc))
	ids := []*cri.IDMapping{{HostId: 1 << 20, Length: 1 << 16}}
	users := &cri.UserNamespace{Mode: cri.NamespaceMode_POD, Uids: ids, Gids: ids}
	p := w.run(t, "runc", func(c *cri.PodSandboxConfig) { c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = users })
	c := p.start(t, "sleep", func(c *cri.ContainerConfig) { c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = users })
	equal(t, "copy", c.exec(t, "cat "+key+" ; write "+key+" changed ; cat "+key), "entitledchanged")
}

// A link of the image does not lead the copies into /proc, where they would
// replace the kernel's files.
func TestMountsConfAndHostileImage(t *testing.T) {
	t.Parallel()
	w, _ := entitled(t)
	hostile := w.image(t, nil, image.Dir("run"), image.Symlink("run/secrets", "/proc/self/attr"))
	each(t, func(t *testing.T, handler string) {
		_, err := w.run(t, handler).try(t.Context(), steps("sleep"), ofImage(hostile))
		wantCode(t, err, codes.InvalidArgument, "/run/secrets")
	})
}
