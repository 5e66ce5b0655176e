package integration

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/wait"
)

// inodeOf returns for a file of the node what the probe's inode returns for a
// file in a container.
func inodeOf(t *testing.T, path string) string {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%d:%d\n", st.Dev, st.Ino)
}

func asUser(uid int64) containerChange {
	return func(c *cri.ContainerConfig) {
		c.Linux.SecurityContext.RunAsUser, c.Linux.SecurityContext.RunAsGroup = &cri.Int64Value{Value: uid}, &cri.Int64Value{Value: uid}
	}
}

func mountAt(dir, path string) containerChange {
	return func(c *cri.ContainerConfig) {
		c.Mounts = append(c.Mounts, &cri.Mount{HostPath: dir, ContainerPath: path})
	}
}

// A process may change the mode and the owner of any file that it has open:
// standard input must not be the node's /dev/null. With a volume at /dev runc
// does not replace it.
func TestStandardInputIsNotTheNodes_podman_24894_runc_3674_crun_1845(t *testing.T) {
	t.Parallel()
	w := shared(t)
	null := inodeOf(t, os.DevNull)
	const look = "inode /proc/self/fd/0 ; chown /proc/self/fd/0 2000 2000"
	own := func(t *testing.T, whose, text string) {
		t.Helper()
		if text == null || !strings.Contains(text, ":") {
			t.Errorf("standard input of %s is %q, the node's /dev/null %q", whose, text, null)
		}
	}
	devices := w.dir(t)
	if err := unix.Mknod(devices+"/null", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))); err != nil {
		t.Fatal(err)
	}
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		for name, change := range map[string]containerChange{
			"a container": asUser(0), "a user's container": asUser(2000), "a container with a volume at /dev": mountAt(devices, "/dev"),
		} {
			own(t, name, p.finish(t, "inode /proc/self/fd/0", change))
			c := p.start(t, "sleep", change)
			own(t, "ExecSync in "+name, c.exec(t, "inode /proc/self/fd/0"))
			s := c.session(t, w.spdy(), "inode /proc/self/fd/0")
			if err := s.Wait(wait.Limit); err != nil {
				t.Fatal(err)
			}
			own(t, "Exec in "+name, s.Stdout.String())
		}
		// Only once it is known to be another device.
		if !t.Failed() {
			p.start(t, "sleep").exec(t, look)
			p.finish(t, look)
			p.start(t, "sleep", asUser(2000)).exec(t, "echo") // crun gives it to the user by itself
		}
		var st unix.Stat_t
		if err := unix.Stat(os.DevNull, &st); err != nil {
			t.Fatal(err)
		}
		equal(t, "owner and mode of the node's /dev/null", fmt.Sprintf("%d:%d %o", st.Uid, st.Gid, st.Mode&0o7777), "0:0 666")
	})
}

// namedStreams writes to the standard streams by name, like servers that log to
// /dev/stdout, and reads standard input by name.
const namedStreams = "write /dev/stdout named-out ; write /dev/stderr named-err ; open /dev/stdin r"

// The container's user can open the standard streams by name, even a user of a
// user namespace, where the node's root has no ownership.
func TestStandardStreamsOpenByName_containerd_10598(t *testing.T) {
	t.Parallel()
	w := fixed(t)
	ofPod, ofContainer := inUserNamespace()
	for _, handler := range []string{"runc", "crun"} {
		for name, user := range map[string]containerChange{"root": asUser(0), "user": asUser(1000), "last": asUser(65535)} {
			for where, change := range map[string]podChange{"node": nil, "own": ofPod} {
				if handler == "crun" && change != nil { // Debian 12's cannot
					continue
				}
				t.Run(handler+"/"+name+"/"+where, func(t *testing.T) {
					t.Parallel()
					changes := []containerChange{user}
					var pod []podChange
					if change != nil {
						pod, changes = []podChange{change}, append(changes, ofContainer)
					}
					testNamedStreams(t, w, w.run(t, handler, pod...), changes)
				})
			}
		}
	}
}

func testNamedStreams(t *testing.T, w *world, p *pod, changes []containerChange) {
	c := p.start(t, namedStreams, changes...)
	equal(t, "exit code", c.wait(t).ExitCode, 0)
	equal(t, "standard output", c.output(t), "named-outok\n")
	equal(t, "standard error", kubelet.Text(c.log(t), "stderr"), "named-err")
	c = p.start(t, namedStreams+" ; cat", append(changes, stdin)...)
	c.says(t, "ok")
	s := c.attach(t, w.spdy(), attachInput)
	meet(t, s)

	c = p.start(t, "sleep", changes...)
	r := c.execResult(t, namedStreams)
	equal(t, "ExecSync", fmt.Sprintf("%d %s %s", r.ExitCode, r.Stdout, r.Stderr), "0 named-outok\n named-err")
	for name, change := range map[string][]execChange{"Exec": nil, "Exec with input": {withInput}} {
		s := c.session(t, w.spdy(), namedStreams, change...)
		if err := s.Wait(wait.Limit); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		equal(t, name, s.Stdout.String()+s.Stderr.String(), "named-outok\nnamed-err")
	}
	s = c.session(t, w.spdy(), namedStreams, withTerminal)
	shows(t, s, "named-outnamed-errok")
	c = p.start(t, namedStreams+" ; sleep", append(changes, terminal)...)
	c.says(t, "named-outnamed-errok")
}
