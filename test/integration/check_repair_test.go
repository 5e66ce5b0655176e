package integration

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/test/kit/inventory"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/turn"
	"github.com/crius-run/crius/test/kit/wait"
)

// checked is the findings of crius check in its JSON form.
type checked []struct{ Check, Status, Text, Do string }

// check runs crius check in the node's network. It ignores what the test
// machine lacks: only the findings about records count, and the exit code must
// agree with them.
func (w *world) check(t *testing.T, args ...string) checked {
	t.Helper()
	out, err := w.Ask(t, append([]string{"check", "-o", "json"}, args...)...)
	var all, found checked
	exit := new(exec.ExitError)
	said := errors.As(err, &exit)
	if decodeErr := json.Unmarshal(out, &all); decodeErr != nil {
		t.Fatalf("crius check: %v: %v: %s%s", err, decodeErr, out, exit.Stderr)
	}
	failed := false
	for _, f := range all {
		failed = failed || f.Status == "FAIL"
		if f.Check == "node" {
			found = append(found, f)
		}
	}
	if failed != said || failed && exit.ExitCode() != 1 {
		t.Errorf("crius check ends with %v: %s", err, out)
	}
	return found
}

// silent checks that the node matches its records.
func (w *world) silent(t *testing.T, when string) {
	t.Helper()
	if found := w.check(t); len(found) != 1 || found[0].Status != "ok" || !strings.HasPrefix(found[0].Text, "the node matches crius's records") {
		t.Errorf("%s: %+v", when, found)
	}
}

func (c checked) says(words ...string) bool {
	return slices.ContainsFunc(c, func(f struct{ Check, Status, Text, Do string }) bool {
		return !slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(f.Status+" "+f.Text+" -> "+f.Do, word) })
	})
}

func randomID() string {
	id := make([]byte, 32)
	rand.Read(id)
	return hex.EncodeToString(id)
}

// victim is the target of a harm.
type victim struct {
	*container
	ip string
}

// A harm is done to the node behind the server's back.
type harm struct {
	name string
	// up and down: it can be done with the server running, and without.
	up, down bool
	// do returns words that the finding must contain.
	do func(t *testing.T, w *world, c victim) []string
	// ends: the repair ends the container, or the pod.
	ends bool
}

func harms() []harm {
	return []harm{
		{"network namespace unpinned", true, true, func(t *testing.T, w *world, c victim) []string {
			pin := w.Path("ns", "netns", "crius-"+c.pod.id)
			must(t, unix.Unmount(pin, unix.MNT_DETACH), os.Remove(pin))
			return []string{"pod " + c.pod.id, pin, "the kubelet recreates it"}
		}, true},
		{"interface deleted", true, true, func(t *testing.T, w *world, c victim) []string {
			must(t, ns.Do(w.Path("ns", "netns", "crius-"+c.pod.id), func() error { return exec.Command("ip", "link", "delete", "eth0").Run() }))
			return []string{"pod " + c.pod.id, "eth0 is gone"}
		}, true},
		{"address not reserved", true, true, func(t *testing.T, w *world, c victim) []string {
			lease := w.Path("cni", "leases", "pods", c.ip)
			must(t, os.Remove(lease))
			return []string{"pod " + c.pod.id, "no longer reserved", lease}
		}, true},
		{"record lost", true, false, func(t *testing.T, w *world, c victim) []string {
			record := filepath.Join(w.StateRoot(), "containers", c.id, "container.json")
			// Until a record is on disk, its previous version stands beside it.
			wait.For(t, record+" to reach the disk", func() bool { _, err := os.Stat(record + ".last"); return errors.Is(err, os.ErrNotExist) })
			must(t, os.Remove(record))
			return []string{"container " + c.id, "record on disk", "rewrite the record"}
		}, false},
		{"record damaged", false, true, func(t *testing.T, w *world, c victim) []string {
			record := filepath.Join(w.StateRoot(), "containers", c.id, "container.json")
			put(t, record, "{")
			must(t, os.RemoveAll(record+".last")) // the server was perhaps killed before the record was on the disk
			return []string{"container " + c.id, "cannot be read", "move the record aside"}
		}, true},
		{"host port element deleted", true, true, func(t *testing.T, w *world, c victim) []string {
			_, err := w.Run(t.Context(), "nft", "delete", "element", "ip", "crius-hostports", "ports", "{ 6 . "+fmt.Sprint(c.pod.config.PortMappings[0].HostPort)+" }")
			must(t, err)
			return []string{"host ports", "is missing", "rebuild the rules"}
		}, false},
		{"monitor killed", false, true, func(t *testing.T, w *world, c victim) []string {
			for _, pid := range w.monitors(t, c.id) {
				must(t, unix.Kill(pid, unix.SIGKILL))
			}
			wait.For(t, "the monitor to die", func() bool { return len(w.monitors(t, c.id)) == 0 })
			return []string{"container " + c.id, "monitor died without recording"}
		}, true},
		{"record deleted, container running", false, true, func(t *testing.T, w *world, c victim) []string {
			must(t, os.RemoveAll(filepath.Join(w.StateRoot(), "containers", c.id)))
			return []string{"orphan " + c.id, "monitor, process"}
		}, true},
		{"bundle and record deleted, container running", false, true, func(t *testing.T, w *world, c victim) []string {
			must(t, unix.Unmount(filepath.Join(w.RunRoot(), "containers", c.id, "rootfs"), unix.MNT_DETACH),
				os.RemoveAll(filepath.Join(w.RunRoot(), "containers", c.id)), os.RemoveAll(filepath.Join(w.StateRoot(), "containers", c.id)))
			return []string{"orphan " + c.id, "cgroup " + w.CgroupParent()}
		}, true},
	}
}

// strayHarms leave objects without a record.
func strayHarms() []harm {
	return []harm{
		{"bundle with a mount", true, true, func(t *testing.T, w *world, _ victim) []string {
			point := filepath.Join(w.RunRoot(), "containers", randomID(), "rootfs")
			must(t, os.MkdirAll(point, 0o700), unix.Mount("none", point, "tmpfs", 0, ""))
			return []string{"orphan", "mount " + point}
		}, false},
		{"state", true, true, func(t *testing.T, w *world, _ victim) []string {
			dir := filepath.Join(w.StateRoot(), "pods", randomID())
			must(t, os.MkdirAll(filepath.Join(dir, "cni"), 0o700))
			return []string{"orphan", "directory " + dir}
		}, false},
		{"cgroup", true, true, func(t *testing.T, w *world, _ victim) []string {
			name := w.CgroupParent() + "/crius-" + randomID()
			for _, h := range []string{"/sys/fs/cgroup/memory", "/sys/fs/cgroup/pids", "/sys/fs/cgroup"} {
				if _, err := os.Stat(h + w.CgroupParent()); err == nil {
					must(t, os.Mkdir(h+name, 0o755))
				}
			}
			return []string{"orphan", "cgroup " + name}
		}, false},
		{"namespaces", true, true, func(t *testing.T, w *world, _ victim) []string {
			set, err := ns.Create(ns.Spec{Dir: w.Path("ns"), Name: "crius-" + randomID(), Net: true, IPC: true})
			must(t, err)
			return []string{"orphan", "namespace " + set.IPC}
		}, false},
		{"reservation", true, true, func(t *testing.T, w *world, _ victim) []string {
			file := w.Path("cni", "leases", "pods", "10.99.200.200")
			put(t, file, randomID()+"\r\neth0")
			old := time.Now().Add(-time.Hour)
			must(t, os.Chtimes(file, old, old))
			return []string{"orphan", "10.99.200.200, reserved in " + file}
		}, false},
		{"firewall element", true, true, func(t *testing.T, w *world, _ victim) []string {
			_, err := w.Run(t.Context(), "nft", "add", "element", "ip", "crius-hostports", "ports", "{ 6 . 9999 : 10.99.200.201 . 9 }")
			must(t, err)
			return []string{"host ports", "ports { 6 . 9999 : 10.99.200.201 . 9 } belongs to no pod"}
		}, false},
	}
}

func must(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// crius check finds harm that was done to a node behind the server's back,
// without touching it, and repairs it when told to, with and without a server;
// an uninvolved pod never notices.
func TestCheckFindsAndRepairs(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"server up", "server down"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			up := mode == "server up"
			w := private(t, node.Options{})
			must(t, w.Write("cni/net.d/10-p.conflist", portless))
			bystander := w.run(t, "crun").start(t, "sleep")
			harms := slices.DeleteFunc(harms(), func(h harm) bool { return up && !h.up || !up && !h.down })
			var victims []victim
			for i := range harms {
				c := w.run(t, handlers[i%2], func(c *cri.PodSandboxConfig) {
					c.Metadata.Name += fmt.Sprint(i)
					c.PortMappings = []*cri.PortMapping{{HostPort: int32(32000 + i), ContainerPort: 80}}
				}).start(t, "sleep")
				victims = append(victims, victim{c, c.pod.status(t).Network.Ip})
			}
			w.silent(t, "before")
			if !up {
				must(t, w.Kill())
				w.silent(t, "without a server")
			}
			var wanted [][]string
			for i, h := range harms {
				wanted = append(wanted, h.do(t, w, victims[i]))
			}
			turn.SeeAddresses(t)
			for _, h := range strayHarms() {
				wanted = append(wanted, h.do(t, w, victim{}))
			}

			if up { // which removes the previous version of each record once that is on disk
				wait.For(t, "records to reach the disk", func() bool {
					last, err := filepath.Glob(filepath.Join(w.StateRoot(), "*", "*", "*.last"))
					return err == nil && len(last) == 0
				})
			}
			before := mustInventory(t, w)
			found := w.check(t)
			if left := inventory.Diff(before, mustInventory(t, w)); !left.Empty() {
				t.Errorf("looking has changed\n%s", left)
			}
			for _, words := range wanted {
				if !found.says(append(words, "FAIL")...) {
					t.Errorf("nothing about %q", words)
				}
			}
			if t.Failed() {
				t.Logf("found: %+v", found)
			}

			repaired := w.check(t, "--repair")
			for _, f := range repaired {
				if f.Status != "ok" {
					t.Errorf("not repaired: %+v", f)
				}
			}
			w.silent(t, "afterwards")
			if !up {
				must(t, w.Start(t.Context()))
				w.silent(t, "with the server again")
			}
			bystander.exec(t, "echo alive")
			for i, h := range harms {
				if !h.ends {
					equal(t, h.name+": state of the container", victims[i].status(t).State, cri.ContainerState_CONTAINER_RUNNING)
				}
			}
			os.RemoveAll(filepath.Join(w.StateRoot(), "containers", "damaged")) // left to a person
		})
	}
}

// A problem that only a person can fix is reported, and left alone.
func TestCheckLeavesAloneWhatItCannotRepair(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	p := w.run(t, "crun")
	c, other := p.start(t, "sleep"), p.start(t, "sleep")
	must(t, unix.Unmount(filepath.Join(w.RunRoot(), "containers", c.id, "rootfs"), unix.MNT_DETACH))
	for _, repair := range []string{"--repair=false", "--repair"} {
		if found := w.check(t, repair); len(found) != 1 || !found.says("FAIL", "container "+c.id, "nothing is mounted at", "restart the container") {
			t.Errorf("%s: %+v", repair, found)
		}
	}
	equal(t, "state of the container", c.status(t).State, cri.ContainerState_CONTAINER_RUNNING)
	c.stop(t, 0)
	c.remove(t)
	w.silent(t, "without the container")
	other.exec(t, "echo alive")
}
