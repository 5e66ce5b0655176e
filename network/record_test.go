package network

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
)

// What plugins get at ADD, and exactly the same at DEL.
func TestArguments(t *testing.T) {
	t.Parallel()
	n := newNode(t, map[string]string{"10-fake.conflist": askingConf})
	n.recorder(gives)
	if err := n.SetPodCIDR("10.9.0.0/24,fd09::/64"); err != nil {
		t.Fatal(err)
	}
	p := n.pod()
	p.PortMappings = []*cri.PortMapping{
		{Protocol: cri.Protocol_TCP, ContainerPort: 80, HostPort: 8080, HostIp: "127.0.0.1"},
		{Protocol: cri.Protocol_UDP, ContainerPort: 53, HostPort: 53, HostIp: "0:0::1"},
		{Protocol: cri.Protocol_SCTP, ContainerPort: 9, HostPort: 9},
		{Protocol: cri.Protocol_TCP, ContainerPort: 81},
	}
	p.Annotations = map[string]string{ingressBandwidth: "1.5M", egressBandwidth: "2Mi", "x": "y"}
	p.DNS = &cri.DNSConfig{Servers: []string{"10.96.0.10"}, Searches: []string{"svc"}, Options: []string{"ndots:5"}}
	a := n.attach(p)

	n.restart()
	os.RemoveAll(n.confs)
	os.RemoveAll(p.CacheDir)
	later := Pod{ID: p.ID, NetNS: p.NetNS, CacheDir: p.CacheDir} // a caller may not remember the rest
	n.detach(later, a)

	calls := n.calls()
	if len(calls) != 2 || calls[0].Command != "ADD" || calls[1].Command != "DEL" {
		t.Fatalf("calls %+v", calls)
	}
	wantArgs := "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;K8S_POD_INFRA_CONTAINER_ID=" + p.ID + ";K8S_POD_UID=2f6c0b1e"
	wantConfig := `{"bandwidth":{"ingressRate":1500000,"ingressBurst":2147483647,"egressRate":2097152,"egressBurst":2147483647},` +
		`"cgroupPath":"/kubepods/pod2f6c0b1e",` +
		`"dns":{"servers":["10.96.0.10"],"searches":["svc"],"options":["ndots:5"]},` +
		`"io.kubernetes.cri.pod-annotations":{"kubernetes.io/egress-bandwidth":"2Mi","kubernetes.io/ingress-bandwidth":"1.5M","x":"y"},` +
		`"ipRanges":[[{"subnet":"10.9.0.0/24"}],[{"subnet":"fd09::/64"}]],` +
		`"portMappings":[{"hostPort":8080,"containerPort":80,"protocol":"tcp","hostIP":"127.0.0.1"},` +
		`{"hostPort":53,"containerPort":53,"protocol":"udp","hostIP":"::1"},{"hostPort":9,"containerPort":9,"protocol":"sctp"}]}`
	for _, c := range calls {
		if c.ID != p.ID || c.NetNS != p.NetNS || c.IfName != "eth0" || c.Args != wantArgs || c.Path != strings.Join(n.cfg.PluginDirs, ":") {
			t.Errorf("%s: id %s netns %s ifname %s args %s path %s", c.Command, c.ID, c.NetNS, c.IfName, c.Args, c.Path)
		}
		var config bytes.Buffer
		if err := json.Compact(&config, c.Conf["runtimeConfig"]); err != nil || config.String() != wantConfig {
			t.Errorf("%s: runtimeConfig %v\n%s\nwant\n%s", c.Command, err, config.String(), wantConfig)
		}
		if string(c.Conf["own"]) != "7" || string(c.Conf["name"]) != `"fake"` || string(c.Conf["cniVersion"]) != `"1.0.0"` {
			t.Errorf("%s: conf %s", c.Command, c.Conf)
		}
	}
	if len(calls[0].Conf["prevResult"]) != 0 || !strings.Contains(string(calls[1].Conf["prevResult"]), "10.9.0.2/24") {
		t.Errorf("prevResult at ADD %s, at DEL %s", calls[0].Conf["prevResult"], calls[1].Conf["prevResult"])
	}
}

// Every ADD has exactly one DEL that succeeds, however many fail before it.
func TestDetachIsRetried(t *testing.T) {
	t.Parallel()
	n := newNode(t, map[string]string{"10-fake.conflist": fakeConf})
	n.recorder(gives)
	p := n.pod()
	a := n.attach(p)
	n.answer(`exit 1`)
	for range 3 {
		if err := n.tryDetach(p, a); err == nil {
			t.Error("a failed DEL is no error")
		}
	}
	n.answer(``)
	n.detach(p, a)
	calls := n.calls()
	if len(calls) != 5 {
		t.Fatalf("%d calls", len(calls))
	}
	for _, c := range calls[1:] {
		if c.Command != "DEL" || c.NetNS != p.NetNS || len(c.Conf["prevResult"]) == 0 {
			t.Errorf("call %+v", c)
		}
	}
}

// A crash after ADD, before its result was recorded: libcni's record in the
// pod's own directory still has it.
func TestResultFromCache(t *testing.T) {
	t.Parallel()
	n := newNode(t, map[string]string{"10-fake.conflist": fakeConf})
	n.recorder(gives)
	p := n.pod()
	planned := n.plan(p)
	if _, err := n.tryAttach(p, planned); err != nil {
		t.Fatal(err)
	}
	n.restart()
	n.detach(p, planned)
	if calls := n.calls(); len(calls) != 2 || !strings.Contains(string(calls[1].Conf["prevResult"]), "10.9.0.2/24") {
		t.Errorf("calls %+v", calls)
	}
}

// cri-o#2849: what is at the recorded path now may be somebody else's.
func TestNetNSOfAnotherPod(t *testing.T) {
	t.Parallel()
	n := newNode(t, map[string]string{"10-fake.conflist": fakeConf})
	n.recorder(gives)
	p := n.pod()
	a := n.attach(p)
	stranger := n.pod()
	p.NetNS = stranger.NetNS
	n.detach(p, a)
	n.forget(stranger)
	n.detach(p, a)
	if err := os.WriteFile(p.NetNS, nil, 0o600); err != nil { // a leftover of the pin
		t.Fatal(err)
	}
	n.detach(p, a)
	for i, c := range n.calls() {
		if i > 0 && (c.Command != "DEL" || c.NetNS != "") {
			t.Errorf("%s with network namespace %q", c.Command, c.NetNS)
		}
	}
}

func TestPluginMissing(t *testing.T) {
	t.Parallel()
	n := newNode(t, map[string]string{"10-pods.conflist": `{"cniVersion": "1.0.0", "name": "pods", "plugins":
		[{"type": "fake"}, {"type": "second", "ipam": {"type": "third"}}]}`})
	n.recorder(gives)
	n.plugin("second", "cat")
	n.plugin("third", "cat")
	p := n.pod()
	planned := n.plan(p)

	check := func(missing string) {
		t.Helper()
		for verb, err := range map[string]error{
			"Ready":  n.Ready(t.Context()),
			"Plan":   func() error { _, err := n.Plan(p); return err }(),
			"Detach": n.tryDetach(p, planned),
			"Attach": func() error { _, err := n.tryAttach(p, planned); return err }(),
		} {
			if !errors.Is(err, fault.Unavailable) || !strings.Contains(err.Error(), strconv.Quote(missing)) || !strings.Contains(err.Error(), n.plugins+", /opt/cni/bin, /usr/lib/cni") {
				t.Errorf("%s without %s: %v", verb, missing, err)
			}
		}
		if calls := n.calls(); len(calls) != 0 {
			t.Errorf("plugins were run although one is missing: %+v", calls)
		}
	}
	os.Chmod(filepath.Join(n.plugins, "second"), 0o644)
	check("second")
	os.Remove(filepath.Join(n.plugins, "second"))
	os.Mkdir(filepath.Join(n.plugins, "second"), 0o755)
	check("second")
	os.Remove(filepath.Join(n.plugins, "second"))
	n.plugin("second", "cat")
	os.Remove(filepath.Join(n.plugins, "third"))
	check("third")
	n.plugin("third", "cat")
	if err := n.Ready(t.Context()); err != nil {
		t.Errorf("complete again: %v", err)
	}
	n.detach(p, planned)
}

func TestStatus(t *testing.T) {
	t.Parallel()
	n := newNode(t, map[string]string{"10-fake.conflist": strings.Replace(fakeConf, "1.0.0", "1.1.0", 1)})
	for name, c := range map[string]struct{ answer, want string }{
		"ready":     {``, ""},
		"not ready": {`echo '{"cniVersion": "1.1.0", "code": 50, "msg": "no BGP session yet"}'; exit 1`, "no BGP session yet"},
		"limited":   {`echo '{"cniVersion": "1.1.0", "code": 51, "msg": "old pods only"}'; exit 1`, "old pods only"},
		"hangs":     {`: >` + n.dir + `/hangs; sleep 1000`, "took longer"},
	} {
		n.recorder(c.answer)
		ready := func() error { return n.Ready(t.Context()) }
		var err error
		if name == "hangs" {
			err = n.hung(ready, func() { n.calls() })
		} else {
			err = ready()
		}
		if c.want == "" && err != nil || c.want != "" && (!errors.Is(err, fault.Unavailable) || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %v", name, err)
		}
		if calls := n.calls(); len(calls) != 1 || calls[0].Command != "STATUS" {
			t.Errorf("%s: calls %+v", name, calls)
		}
	}
	n.conf("10-fake.conflist", fakeConf)
	n.answer(`exit 1`)
	if err := n.Ready(t.Context()); err != nil || len(n.calls()) != 0 {
		t.Errorf("version 1.0.0 has no STATUS: %v", err)
	}
}
