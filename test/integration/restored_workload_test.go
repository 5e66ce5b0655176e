package integration

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/wait"
)

// echoes sends a line to an echo server, and reads it back.
func echoes(t *testing.T, conn net.Conn) {
	t.Helper()
	_, err := fmt.Fprintln(conn, "ping")
	must(t, err)
	text, err := bufio.NewReader(conn).ReadString('\n')
	must(t, err)
	equal(t, "echo", text, "ping\n")
}

// established counts the TCP connections in a container's network.
func (c *container) established(t *testing.T) (n int) {
	t.Helper()
	const state = 3
	for _, file := range []string{"net/tcp", "net/tcp6"} {
		for line := range strings.Lines(c.procfs(t, file)) {
			if fields := strings.Fields(line); fields[state] == "01" {
				n++
			}
		}
	}
	return n
}

// A server goes on with its connection after a checkpoint. In a restored pod, which has an address of its own, it
// listens as before, and the connection is closed.
func TestRestoredServer(t *testing.T) {
	t.Parallel()
	w, ok := dumps(t)
	if !ok {
		return
	}
	p := w.run(t, "runc")
	c := p.start(t, "tcp :9000 echo ; sleep", func(c *cri.ContainerConfig) {
		c.Envs = append(c.Envs, &cri.KeyValue{Key: "GODEBUG", Value: []byte("multipathtcp=0")}) // which criu cannot dump
	})
	c.says(t, "listening")
	dial := func(p *pod) net.Conn {
		t.Helper()
		conn, err := w.Dial(t.Context(), "tcp", net.JoinHostPort(p.status(t).Network.Ip, "9000"))
		must(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		return conn
	}
	conn := dial(p)
	echoes(t, conn)
	equal(t, "connections", c.established(t), 1)
	dir := p.checkpointed(t, c)
	echoes(t, conn)
	p.stop(t)

	q, all := w.restore(t, w.restoring(t, dir, c))
	all[0].start(t)
	equal(t, "connections after the restore", all[0].established(t), 0)
	echoes(t, dial(q))
}

// A container with a terminal is restored with a terminal, at which it is read and written as before.
func TestRestoredTerminal(t *testing.T) {
	t.Parallel()
	w, ok := dumps(t)
	if !ok {
		return
	}
	p := w.run(t, "runc")
	c := p.start(t, "write /dev/own text ; echo ready ; line ; exit 3", terminal) // /dev is a tmpfs of the container
	c.says(t, "ready")
	dir := p.checkpointed(t, c)
	p.stop(t)
	_, all := w.restore(t, w.restoring(t, dir, c))
	r := all[0]
	r.start(t)
	equal(t, "file in a tmpfs", r.exec(t, "cat /dev/own"), "text")
	session := r.attach(t, w.spdy(), attachInput)
	typed(t, session, "hello\n")
	shows(t, session, `got "hello"`)
	equal(t, "exit code", r.wait(t).ExitCode, 3)
	r.says(t, `got "hello"`)
}

// Containers that take turns at a number in the pod's /dev/shm are restored as they were at one moment: no one has
// seen a number that another has not written, and no turn is lost.
func TestRestoredPodIsOfOneMoment(t *testing.T) {
	t.Parallel()
	w, ok := dumps(t)
	if !ok {
		return
	}
	p := w.run(t, "runc")
	const members = 3
	var all []*container
	for i := range members {
		all = append(all, p.start(t, fmt.Sprintf("ring /dev/shm/number %d %d", i, members)))
	}
	all[2].says(t, "turn "+strconv.Itoa(2+10*members))
	dir := p.checkpointed(t, all...)
	p.stop(t)
	_, restored := w.restore(t, w.restoring(t, dir, all...))
	for _, c := range restored {
		c.start(t)
	}
	low, high := 0, 0
	for i, c := range restored {
		wait.For(t, "some turns", func() bool { return len(c.log(t)) > 5 })
		equal(t, "state", c.status(t).State, cri.ContainerState_CONTAINER_RUNNING)
		for k, r := range c.log(t) {
			number, err := strconv.Atoi(strings.TrimPrefix(r.Content, "turn "))
			if err != nil {
				t.Fatalf("container %d: %q", i, r.Content)
			}
			if k > 0 {
				break
			}
			if i == 0 {
				low, high = number, number
			}
			low, high = min(low, number), max(high, number)
		}
	}
	if low < 2+10*members-members || high-low > members {
		t.Errorf("the first turns after the restore are %d to %d", low, high)
	}
}

// What people expect of a restored container is that it is the new pod's: its hostname, its /etc/hosts, its log and its
// statistics are, and commands run in it.
func TestRestoredContainerBelongsToItsPod(t *testing.T) {
	t.Parallel()
	w, ok := dumps(t)
	if !ok {
		return
	}
	hosts := func(name string) containerChange {
		file := filepath.Join(w.dir(t), "hosts")
		must(t, os.WriteFile(file, []byte("127.0.0.1 localhost "+name+"\n"), 0o644))
		return func(c *cri.ContainerConfig) {
			c.Mounts = []*cri.Mount{{ContainerPath: "/etc/hosts", HostPath: file}}
		}
	}
	p := w.run(t, "runc", func(c *cri.PodSandboxConfig) { c.Hostname = "old" })
	c := p.start(t, "alloc 16 ; lines 1000000000 20ms", hosts("old"))
	c.says(t, "line 1")
	req := w.restoring(t, p.checkpointed(t, c), c)
	p.stop(t)
	req.Config.Hostname = "new"
	hosts("new")(req.ContainerConfigs[0])
	q, all := w.restore(t, req)
	r := all[0]
	r.start(t)
	r.number(t)
	equal(t, "/etc/hosts", r.exec(t, "cat /etc/hosts"), "127.0.0.1 localhost new\n")
	equal(t, "hostname", r.facts(t).Hostname, "new")
	if used := r.stats(t).GetMemory().GetWorkingSetBytes().GetValue(); used < 16*mib {
		t.Errorf("the restored container uses %d bytes of memory, and has 16 MiB", used)
	}

	// A container that ends is replaced by a new one, from its image.
	r.stop(t, 0)
	r.remove(t)
	next := q.start(t, "lines 3 1ms", func(c *cri.ContainerConfig) {
		c.Metadata = &cri.ContainerMetadata{Name: r.config.Metadata.Name, Attempt: 1}
	})
	next.says(t, "line 3")
}

// Volumes that show the same directory, or one below another's, are read-only after a restore if they were before,
// though criu restores them writable; the others can be written.
func TestRestoredVolumesOfOneDirectory_criu_2632(t *testing.T) {
	t.Parallel()
	w, ok := dumps(t)
	if !ok {
		return
	}
	volume := w.dir(t)
	below := filepath.Join(volume, "below")
	must(t, os.Mkdir(below, 0o755))
	p := w.run(t, "runc")
	c := p.start(t, "lines 1000000000 20ms", func(c *cri.ContainerConfig) {
		c.Mounts = []*cri.Mount{
			{ContainerPath: "/all", HostPath: volume},
			{ContainerPath: "/read", HostPath: volume, Readonly: true},
			{ContainerPath: "/below", HostPath: below, Readonly: true},
		}
	})
	c.says(t, "line 1")
	dir := p.checkpointed(t, c)
	p.stop(t)
	_, all := w.restore(t, w.restoring(t, dir, c))
	all[0].start(t)
	all[0].number(t)
	all[0].exec(t, "write /all/new text")
	for _, at := range []string{"/read", "/read/below", "/below"} {
		all[0].refusesToWrite(t, at+"/other")
	}
}

// The source of a volume may be another file than the one that the container was dumped with: an update of a
// ConfigMap replaces the files behind its sub paths, and a rename those of a hostPath. The restored container has
// the file that is there now.
func TestRestoreWithReplacedVolumes_criu_9(t *testing.T) {
	t.Parallel()
	w, ok := dumps(t)
	if !ok {
		return
	}
	volume := w.dir(t)
	file, directory := filepath.Join(volume, "file"), filepath.Join(volume, "directory")
	put(t, file, "old")
	must(t, os.Mkdir(directory, 0o755))
	p := w.run(t, "runc")
	c := p.start(t, "lines 1000000000 20ms", withMounts(
		&cri.Mount{ContainerPath: "/file", HostPath: file}, &cri.Mount{ContainerPath: "/directory", HostPath: directory}))
	c.says(t, "line 1")
	put(t, file+".new", "new")
	must(t, os.Rename(file+".new", file))
	must(t, os.Remove(directory))
	must(t, os.Mkdir(directory, 0o755))
	put(t, filepath.Join(directory, "inside"), "new")
	equal(t, "file before the checkpoint", c.exec(t, "cat /file"), "old")
	dir := p.checkpointed(t, c)
	p.stop(t)
	_, all := w.restore(t, w.restoring(t, dir, c))
	all[0].start(t)
	all[0].number(t)
	equal(t, "file", all[0].exec(t, "cat /file"), "new")
	equal(t, "file of the directory", all[0].exec(t, "cat /directory/inside"), "new")
	equal(t, "file on the node", read(t, file), "new")
}
