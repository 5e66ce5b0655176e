package network

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
)

const fakeConf = `{"cniVersion": "1.0.0", "name": "fake", "plugins": [{"type": "fake"}]}`

// gives is a plugin that succeeds with one address.
const gives = `cat >/dev/null
[ $CNI_COMMAND = DEL ] || echo '{"cniVersion": "1.0.0", "interfaces": [{"name": "eth0", "sandbox": "x"}], "ips": [{"interface": 0, "address": "10.9.0.2/24"}]}'
`

// alive tells whether the process whose pid is in file, once it is there, runs.
func alive(t *testing.T, file string) bool {
	t.Helper()
	var text []byte
	for range 500 {
		if text, _ = os.ReadFile(file); bytes.HasSuffix(text, []byte("\n")) {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		t.Fatalf("no pid in %s: %q", file, text)
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !strings.Contains(string(stat), ") Z ")
}

// dies waits for the end of the process.
func dies(t *testing.T, file string) {
	t.Helper()
	for range 500 {
		if !alive(t, file) {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Errorf("the process of %s lives on", file)
}

func TestHostilePlugins(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		script string
		want   string // in the error; empty: success
		fault  error
		within time.Duration
	}{
		"hangs":                               {`sleep 1000`, "took longer than 1s", fault.Timeout, 4 * time.Second},
		"ignores signals":                     {`trap '' TERM INT HUP PIPE; while :; do sleep 1; done`, "took longer", fault.Timeout, 4 * time.Second},
		"hangs with a word":                   {`echo waiting for the agent >&2; sleep 1000`, "waiting for the agent", fault.Timeout, 4 * time.Second},
		"closes its output":                   {`exec >&- 2>&-; sleep 1000`, "took longer", fault.Timeout, 4 * time.Second},
		"stops itself":                        {`kill -STOP $$`, "took longer", fault.Timeout, 4 * time.Second},
		"child hangs":                         {`sleep 1000 & echo $! >DIR/pid; wait`, "took longer", fault.Timeout, 4 * time.Second},
		"child holds output, plugin succeeds": {gives + `sleep 3 & echo $! >DIR/pid`, "", nil, 2900 * time.Millisecond},
		"child holds output, plugin fails":    {`sleep 3 & echo $! >DIR/pid; exit 3`, "exit status 3", nil, 2900 * time.Millisecond},
		"garbage":                             {`echo 'all fine!'`, `did not print a CNI result but "all fine!\n"`, nil, 2 * time.Second},
		"nothing":                             {`exit 0`, `did not print a CNI result but ""`, nil, 2 * time.Second},
		"binary garbage":                      {`printf '\377\376\000{'`, "did not print a CNI result", nil, 2 * time.Second},
		"null":                                {`echo null`, "no address of eth0", nil, 2 * time.Second},
		"list":                                {`echo '[1]'`, "unmarshal", nil, 2 * time.Second},
		"wrong types":                         {`echo '{"cniVersion": "1.0.0", "ips": "many"}'`, "unmarshal", nil, 2 * time.Second},
		"unknown version":                     {`echo '{"cniVersion": "9.0.0"}'`, "9.0.0", nil, 2 * time.Second},
		"deep nesting":                        {`head -c 500000 /dev/zero | tr '\0' '['`, "did not print a CNI result", nil, 2 * time.Second},
		"no address":                          {`echo '{"cniVersion": "1.0.0"}'`, "no address of eth0", nil, 2 * time.Second},
		"bad interface":                       {`echo '{"cniVersion": "1.0.0", "ips": [{"interface": 4, "address": "10.0.0.1/8"}]}'`, "interface 4", nil, 2 * time.Second},
		"1 GB":                                {`exec head -c 1000000000 /dev/zero`, "printed more than", nil, 4 * time.Second},
		"endless":                             {`trap '' PIPE; while :; do yes 2>/dev/null; done`, "printed more than", nil, 4 * time.Second},
		"1 GB of errors":                      {`head -c 300000000 /dev/zero | tr '\0' x >&2; echo the end >&2; exit 1`, "the end", nil, 10 * time.Second},
		"fails":                               {`echo oops >&2; exit 7`, `exit status 7, without a CNI error but ""; it said "oops"`, nil, 2 * time.Second},
		"killed":                              {`echo oops >&2; kill -9 $$`, `signal: killed, without a CNI error but ""; it said "oops"`, nil, 2 * time.Second},
		"fails with garbage":                  {`echo boo; exit 1`, `but "boo\n"`, nil, 2 * time.Second},
		"fails properly":                      {`echo '{"cniVersion": "1.0.0", "code": 999, "msg": "no route", "details": "to host"}'; exit 1`, "no route; to host (CNI error 999)", nil, 2 * time.Second},
		"wants a retry":                       {`echo '{"code": 11, "msg": "agent starting"}'; exit 1`, "agent starting", fault.Unavailable, 2 * time.Second},
		"long message":                        {`printf '{"code": 5, "msg": "'; head -c 900000 /dev/zero | tr '\0' m; echo '"}'; exit 1`, "mmm", nil, 2 * time.Second},
		"not a program":                       {"", "exec format error", nil, 2 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, map[string]string{"10-fake.conflist": fakeConf})
			n.plugin("fake", strings.ReplaceAll(c.script, "DIR", n.dir))
			if c.script == "" {
				if err := os.WriteFile(filepath.Join(n.plugins, "fake"), []byte("\x00\x01"), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			n.cfg.Timeout = time.Second
			if strings.HasPrefix(name, "1 GB") {
				n.cfg.Timeout = 10 * time.Second
			}
			n.restart()
			p := n.pod()
			planned := n.plan(p)
			start := time.Now()
			a, err := n.tryAttach(p, planned)
			took := time.Since(start)
			if c.want == "" {
				if err != nil || len(a.IPs) != 1 {
					t.Errorf("%+v, %v", a, err)
				}
			} else if err == nil || !strings.Contains(err.Error(), c.want) || len(err.Error()) > 6000 {
				t.Errorf("error of %d bytes: %.2000v\nwant in it: %s", len(fmt.Sprint(err)), err, c.want)
			}
			if c.fault != nil && !errors.Is(err, c.fault) {
				t.Errorf("%v is not %v", err, c.fault)
			}
			if took > c.within {
				t.Errorf("took %v", took)
			}
			switch name {
			case "child hangs":
				dies(t, n.dir+"/pid")
			case "child holds output, plugin succeeds":
				if !alive(t, n.dir+"/pid") {
					t.Error("the child of a plugin that succeeded was killed")
				}
				dies(t, n.dir+"/pid")
			}
		})
	}
}

// Cancelling the context ends the plugin as the time limit does, but is no
// time-out.
func TestCancel(t *testing.T) {
	t.Parallel()
	n := newNode(t, map[string]string{"10-fake.conflist": fakeConf})
	n.plugin("fake", `echo $$ >`+n.dir+`/pid; sleep 1000`)
	p := n.pod()
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		alive(t, n.dir+"/pid")
		cancel()
	}()
	_, err := n.Attach(ctx, p, n.plan(p))
	if !errors.Is(err, context.Canceled) || errors.Is(err, fault.Timeout) {
		t.Errorf("error %v", err)
	}
	dies(t, n.dir+"/pid")
}

// recorderScript logs how it is called, one JSON document a call, and does what
// the file named "answer" says.
const recorderScript = `conf=$(cat)
printf '{"command":"%s","id":"%s","netns":"%s","ifname":"%s","args":"%s","path":"%s","conf":%s}\n' \
	"$CNI_COMMAND" "$CNI_CONTAINERID" "$CNI_NETNS" "$CNI_IFNAME" "$CNI_ARGS" "$CNI_PATH" "$conf" >>DIR/calls
. DIR/answer
`

type call struct {
	Command, ID, NetNS, IfName, Args, Path string
	Conf                                   map[string]json.RawMessage
}

func (n *node) recorder(answer string) {
	n.Helper()
	n.plugin("fake", strings.ReplaceAll(recorderScript, "DIR", n.dir))
	n.answer(answer)
}

func (n *node) answer(script string) {
	n.Helper()
	if err := os.WriteFile(filepath.Join(n.dir, "answer"), []byte(strings.TrimPrefix(script, "cat >/dev/null\n")), 0o600); err != nil {
		n.Fatal(err)
	}
}

// calls are those since the last time.
func (n *node) calls() []call {
	n.Helper()
	file := filepath.Join(n.dir, "calls")
	text, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		n.Fatal(err)
	}
	os.Remove(file)
	var all []call
	for line := range strings.Lines(string(text)) {
		var c call
		if err := json.Unmarshal([]byte(line), &c); err != nil {
			n.Fatalf("%v: %s", err, line)
		}
		all = append(all, c)
	}
	return all
}

const askingConf = `{"cniVersion": "1.0.0", "name": "fake", "plugins": [{"type": "fake", "own": 7, "capabilities":
	{"portMappings": true, "bandwidth": true, "dns": true, "ipRanges": true, "cgroupPath": true,
	 "io.kubernetes.cri.pod-annotations": true, "mac": true, "aliases": false}}]}`

// What plugins are told, at ADD and, the very same, at DEL.
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
func TestDebtIsRetried(t *testing.T) {
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
func TestForeignNetNS(t *testing.T) {
	t.Parallel()
	n := newNode(t, map[string]string{"10-fake.conflist": fakeConf})
	n.recorder(gives)
	p := n.pod()
	a := n.attach(p)
	stranger := n.pod()
	p.NetNS = stranger.NetNS
	n.detach(p, a)
	if _, err := n.tryAttach(p, a); !errors.Is(err, fault.Precondition) {
		t.Errorf("attached to a foreign namespace: %v", err)
	}
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

// A plugin must not run on when crius has died: the ADD of the old crius would
// overtake the DEL of the new one.
func TestPluginDiesWithCrius(t *testing.T) {
	t.Parallel()
	n := newNode(t, map[string]string{"10-fake.conflist": fakeConf})
	n.plugin("fake", `echo $$ >`+n.dir+`/pid; exec sleep 1000`)
	p := n.pod()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), victim+"="+strings.Join([]string{n.confs, n.plugins, p.NetNS, p.CacheDir}, " "))
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if !alive(t, n.dir+"/pid") {
		t.Fatal("the plugin does not run")
	}
	cmd.Process.Kill()
	cmd.Wait()
	dies(t, n.dir+"/pid")
}

// attachForever is the crius that is killed.
func attachForever(args []string) {
	cfg := DefaultConfig()
	cfg.ConfDir, cfg.PluginDirs = args[0], args[1:2]
	n := New(cfg)
	p := Pod{ID: "1", NetNS: args[2], CacheDir: args[3]}
	a, err := n.Plan(p)
	if err == nil {
		_, err = n.Attach(context.Background(), p, a)
	}
	fmt.Println(err)
	os.Exit(1)
}

// A plugin that is just being installed (its file open for writing) is tried
// again.
func TestTextFileBusy(t *testing.T) {
	t.Parallel()
	n := newNode(t, map[string]string{"10-fake.conflist": fakeConf})
	binary, err := os.ReadFile("/bin/false")
	if err != nil {
		t.Fatal(err)
	}
	busy, err := os.OpenFile(filepath.Join(n.plugins, "fake"), os.O_CREATE|os.O_WRONLY, 0o755)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := busy.Write(binary); err != nil {
		t.Fatal(err)
	}
	timer := time.AfterFunc(100*time.Millisecond, func() { busy.Close() })
	defer timer.Stop()
	p := n.pod()
	_, err = n.tryAttach(p, n.plan(p))
	if err == nil || errors.Is(err, unix.ETXTBSY) || !strings.Contains(err.Error(), "exit status 1") {
		t.Errorf("error %v", err)
	}
}

func TestStatus(t *testing.T) {
	t.Parallel()
	n := newNode(t, map[string]string{"10-fake.conflist": strings.Replace(fakeConf, "1.0.0", "1.1.0", 1)})
	for name, c := range map[string]struct{ answer, want string }{
		"ready":     {``, ""},
		"not ready": {`echo '{"cniVersion": "1.1.0", "code": 50, "msg": "no BGP session yet"}'; exit 1`, "no BGP session yet"},
		"limited":   {`echo '{"cniVersion": "1.1.0", "code": 51, "msg": "old pods only"}'; exit 1`, "old pods only"},
		"hangs":     {`sleep 1000`, "took longer"},
	} {
		n.cfg.Timeout = time.Second
		n.restart()
		n.recorder(c.answer)
		err := n.Ready(t.Context())
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

func TestTail(t *testing.T) {
	t.Parallel()
	var one, many tail
	text := bytes.Repeat([]byte("0123456789"), 1000)
	one.Write(text)
	for chunk := range slices.Chunk(text, 7) {
		many.Write(chunk)
	}
	want := text[len(text)-maxTail:]
	if !bytes.Equal(one.text, want) || !bytes.Equal(many.text, want) {
		t.Errorf("kept %d and %d bytes, or the wrong ones", len(one.text), len(many.text))
	}
}

// An error must stay what the plugin said, for whoever decides by it.
func TestPluginErrorIsKept(t *testing.T) {
	t.Parallel()
	n := newNode(t, map[string]string{"10-fake.conflist": fakeConf})
	n.plugin("fake", `echo '{"code": 7, "msg": "m"}'; exit 1`)
	p := n.pod()
	_, err := n.tryAttach(p, n.plan(p))
	var told *types.Error
	if !errors.As(err, &told) || told.Code != 7 {
		t.Errorf("error %v", err)
	}
}
