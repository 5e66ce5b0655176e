package network

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/ns"
)

// tryReclaim releases what plugins hold for a pod of which only p is left.
func (n *node) tryReclaim(p Pod, dirs ...string) error {
	n.Helper()
	leases, _, err := n.Leases(dirs, nil)
	if err != nil {
		n.Fatal(err)
	}
	leases = slices.DeleteFunc(leases, func(l Lease) bool { return l.Owner != p.ID })
	return n.do(func() error { return n.Reclaim(context.Background(), p, leases, dirs) })
}

// lost returns what is left of a pod without its record.
func lost(p Pod) Pod { return Pod{ID: p.ID, NetNS: p.NetNS, CacheDir: p.CacheDir} }

// Whatever is left of a pod without a record, the plugins remove everything that
// they have made for it.
func TestReclaim(t *testing.T) {
	t.Parallel()
	for name, lose := range map[string]func(n *node, p Pod){
		"nothing": func(*node, Pod) {},
		"the configuration": func(n *node, _ Pod) {
			if err := os.RemoveAll(n.confs); err != nil {
				n.Fatal(err)
			}
		},
		"libcni's record": func(n *node, p Pod) {
			if err := os.RemoveAll(p.CacheDir); err != nil {
				n.Fatal(err)
			}
		},
		"the content of libcni's record": func(n *node, p Pod) {
			for _, text := range n.records(p) {
				if err := os.Truncate(text, 10); err != nil {
					n.Fatal(err)
				}
			}
		},
		"libcni's record, a named pipe now": func(n *node, p Pod) {
			for _, record := range n.records(p) {
				if err := errors.Join(os.Remove(record), unix.Mkfifo(record, 0o600)); err != nil {
					n.Fatal(err)
				}
			}
		},
		"libcni's record, larger than the memory": func(n *node, p Pod) {
			for _, record := range n.records(p) {
				if err := os.Truncate(record, 1<<40); err != nil {
					n.Fatal(err)
				}
			}
		},
		"the interface in libcni's record": func(n *node, p Pod) {
			for _, record := range n.records(p) {
				text, err := os.ReadFile(record)
				if err == nil {
					text = bytes.ReplaceAll(text, []byte(`"ifName":"eth0"`), []byte(`"ifName":"../eth0"`))
					err = os.WriteFile(record, text, 0o600)
				}
				if err != nil {
					n.Fatal(err)
				}
			}
		},
		"the addresses, taken by the pod's own kernel": flush,
		"the addresses, and the lease": func(n *node, p Pod) {
			flush(n, p)
			for _, lease := range n.leased() {
				if err := os.Remove(filepath.Join(n.leases, "pods", lease)); err != nil {
					n.Fatal(err)
				}
			}
		},
		"the addresses, and libcni's record": func(n *node, p Pod) {
			flush(n, p)
			if err := os.RemoveAll(p.CacheDir); err != nil {
				n.Fatal(err)
			}
		},
		"libcni's record and the lease": func(n *node, p Pod) {
			for _, lease := range n.leased() {
				if err := os.Remove(filepath.Join(n.leases, "pods", lease)); err != nil {
					n.Fatal(err)
				}
			}
			if err := os.RemoveAll(p.CacheDir); err != nil {
				n.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, map[string]string{"10-pods.conflist": bridgeConf(range4)})
			before := n.warmUp()
			p := n.pod()
			p.PortMappings = []*cri.PortMapping{{ContainerPort: 80, HostPort: 8080}}
			p.Annotations = map[string]string{ingressBandwidth: "10M"}
			n.attach(p)
			n.restart()
			lose(n, p)
			if err := n.tryReclaim(lost(p)); err != nil {
				t.Error(err)
			}
			n.forget(p)
			n.settle(before)
			if left := append(n.leased(), n.records(p)...); len(left) > 0 {
				t.Errorf("left: %q", left)
			}
		})
	}
}

// flush removes the addresses from the pod's interface.
func flush(n *node, p Pod) {
	n.Helper()
	if err := ns.Do(p.NetNS, func() error { return exec.Command("ip", "addr", "flush", "dev", "eth0").Run() }); err != nil {
		n.Fatal(err)
	}
}

// records returns the paths of libcni's records of a pod.
func (n *node) records(p Pod) []string {
	n.Helper()
	paths, err := filepath.Glob(filepath.Join(p.CacheDir, "results", "*"))
	if err != nil {
		n.Fatal(err)
	}
	return paths
}

// By libcni's record the plugins get at DEL what they have got at ADD, until
// the DEL succeeds.
func TestReclaimByTheRecordOfLibcni(t *testing.T) {
	t.Parallel()
	n := newNode(t, map[string]string{"10-fake.conflist": askingConf})
	n.recorder(gives)
	p := n.pod()
	p.PortMappings = []*cri.PortMapping{{ContainerPort: 80, HostPort: 8080}}
	n.attach(p)
	add := n.calls()[0]
	n.restart()
	n.conf("10-fake.conflist", strings.Replace(askingConf, `"own": 7`, `"own": 8`, 1))
	n.answer(`exit 1`)
	if err := n.tryReclaim(lost(p)); err == nil {
		t.Error("a failed DEL is no error")
	}
	n.answer(``)
	if err := n.tryReclaim(lost(p)); err != nil {
		t.Error(err)
	}
	calls := n.calls()
	if len(calls) != 2 {
		t.Fatalf("calls %+v", calls)
	}
	for _, del := range calls {
		if del.Command != "DEL" || del.ID != p.ID || del.NetNS != p.NetNS || del.IfName != "eth0" || del.Args != add.Args {
			t.Errorf("call %+v, ADD %+v", del, add)
		}
		if string(del.Conf["own"]) != "7" || !strings.Contains(string(del.Conf["runtimeConfig"]), `"hostPort":8080`) || !strings.Contains(string(del.Conf["prevResult"]), "10.9.0.2/24") {
			t.Errorf("configuration at DEL %s, at ADD %s", del.Conf, add.Conf)
		}
	}
}

// Without any record the networks in force are asked, of which one is the pod's,
// and only if the pod had a network.
func TestReclaimWithoutRecords(t *testing.T) {
	t.Parallel()
	n := newNode(t, map[string]string{"10-fake.conflist": askingConf, "other/10-fake.conflist": strings.Replace(askingConf, `"name": "fake"`, `"name": "second"`, 1)})
	n.recorder(``)
	if err := n.SetPodCIDR("10.9.0.0/24"); err != nil {
		t.Fatal(err)
	}
	p := lost(n.pod())
	dirs := []string{filepath.Join(n.confs, "other"), filepath.Join(n.dir, "nowhere")}
	if err := n.tryReclaim(p, dirs...); err != nil || len(n.calls()) != 0 {
		t.Errorf("a pod that had no network: %v", err)
	}
	if err := ns.Do(p.NetNS, func() error {
		return exec.Command("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "other").Run()
	}); err != nil {
		t.Fatal(err)
	}
	if err := n.tryReclaim(p, dirs...); err != nil {
		t.Error(err)
	}
	calls := n.calls()
	if len(calls) != 2 {
		t.Fatalf("calls %+v", calls)
	}
	for i, name := range []string{`"fake"`, `"second"`} {
		c := calls[i]
		if c.Command != "DEL" || c.NetNS != p.NetNS || string(c.Conf["name"]) != name || !strings.Contains(c.Args, "K8S_POD_INFRA_CONTAINER_ID="+p.ID) {
			t.Errorf("call %+v", c)
		}
		// host-local needs ranges, and portmap a port, to remove anything.
		for _, want := range []string{`"ipRanges"`, `"10.9.0.0/24"`, `"portMappings"`} {
			if !strings.Contains(string(c.Conf["runtimeConfig"]), want) {
				t.Errorf("%s: runtimeConfig %s lacks %s", name, c.Conf["runtimeConfig"], want)
			}
		}
	}
	// Until there is a network, nothing that may be the pod's is forgotten.
	if err := os.RemoveAll(n.confs); err != nil {
		t.Fatal(err)
	}
	if err := n.tryReclaim(p, dirs...); !errors.Is(err, fault.Unavailable) || !strings.Contains(err.Error(), "eth0") || !strings.Contains(err.Error(), n.confs+": install a network add-on") {
		t.Errorf("without any network: %v", err)
	}
}
