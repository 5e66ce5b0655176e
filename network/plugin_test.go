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
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/test/kit/wait"
)

const fakeConf = `{"cniVersion": "1.0.0", "name": "fake", "plugins": [{"type": "fake"}]}`

// gives is a plugin that succeeds with one address.
const gives = `cat >/dev/null
[ $CNI_COMMAND = DEL ] || echo '{"cniVersion": "1.0.0", "interfaces": [{"name": "eth0", "sandbox": "x"}], "ips": [{"interface": 0, "address": "10.9.0.2/24"}]}'
`

// alive reports whether the process whose pid is in file is running; it waits
// for the file.
func alive(t *testing.T, file string) bool {
	t.Helper()
	var text []byte
	wait.For(t, "a pid in "+file, func() bool {
		text, _ = os.ReadFile(file)
		return bytes.HasSuffix(text, []byte("\n"))
	})
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
	wait.For(t, "the process of "+file+" to be dead", func() bool { return !alive(t, file) })
}

// endChild kills the process whose pid is in file.
func endChild(t *testing.T, file string) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
		t.Fatal(err)
	}
	dies(t, file)
}

func TestHostilePlugins(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		script string
		want   string // in the error; empty: success
		fault  error
	}{
		"hangs":                               {`: >DIR/hangs; sleep 1000`, "took longer than", fault.Timeout},
		"ignores signals":                     {`trap '' TERM INT HUP PIPE; : >DIR/hangs; while :; do sleep 1; done`, "took longer", fault.Timeout},
		"hangs with a word":                   {`echo waiting for the agent >&2; : >DIR/hangs; sleep 1000`, "waiting for the agent", fault.Timeout},
		"closes its output":                   {`exec >&- 2>&-; : >DIR/hangs; sleep 1000`, "took longer", fault.Timeout},
		"stops itself":                        {`: >DIR/hangs; kill -STOP $$`, "took longer", fault.Timeout},
		"child hangs":                         {`sleep 1000 & echo $! >DIR/pid; : >DIR/hangs; wait`, "took longer", fault.Timeout},
		"child holds output, plugin succeeds": {gives + `sleep 1000 & echo $! >DIR/pid`, "", nil},
		"child holds output, plugin fails":    {`sleep 1000 & echo $! >DIR/pid; exit 3`, "exit status 3", nil},
		"garbage":                             {`echo 'all fine!'`, `printed no CNI result but "all fine!\n"`, nil},
		"nothing":                             {`exit 0`, `printed no CNI result but ""`, nil},
		"binary garbage":                      {`printf '\377\376\000{'`, "printed no CNI result", nil},
		"null":                                {`echo null`, `printed no CNI result but "null\n"`, nil},
		"error, but ends with 0":              {`echo '{"cniVersion": "1.0.0", "code": 11, "msg": "try again later"}'`, "printed no CNI result", nil},
		"list":                                {`echo '[1]'`, "unmarshal", nil},
		"wrong types":                         {`echo '{"cniVersion": "1.0.0", "ips": "many"}'`, "unmarshal", nil},
		"unknown version":                     {`echo '{"cniVersion": "9.0.0"}'`, "9.0.0", nil},
		"deep nesting":                        {`head -c 500000 /dev/zero | tr '\0' '['`, "printed no CNI result", nil},
		"bad interface":                       {`echo '{"cniVersion": "1.0.0", "ips": [{"interface": 4, "address": "10.0.0.1/8"}]}'`, "interface 4", nil},
		"1 GB":                                {`exec head -c 1000000000 /dev/zero`, "output exceeds", nil},
		"endless":                             {`trap '' PIPE; while :; do yes 2>/dev/null; done`, "output exceeds", nil},
		"1 GB of errors":                      {`head -c 300000000 /dev/zero | tr '\0' x >&2; echo the end >&2; exit 1`, "the end", nil},
		"fails":                               {`echo oops >&2; exit 7`, `exit status 7, no CNI error in its output ""; output: "oops"`, nil},
		"killed":                              {`echo oops >&2; kill -9 $$`, `signal: killed, no CNI error in its output ""; output: "oops"`, nil},
		"fails with garbage":                  {`echo boo; exit 1`, `in its output "boo\n"`, nil},
		"fails properly":                      {`echo '{"cniVersion": "1.0.0", "code": 999, "msg": "no route", "details": "to host"}'; exit 1`, "no route; to host (CNI error 999)", nil},
		"wants a retry":                       {`echo '{"code": 11, "msg": "agent starting"}'; exit 1`, "agent starting", fault.Unavailable},
		"long message":                        {`printf '{"code": 5, "msg": "'; head -c 900000 /dev/zero | tr '\0' m; echo '"}'; exit 1`, "mmm", nil},
		"not a program":                       {"", "exec format error", nil},
		"no room for its threads":             {`echo "runtime/cgo: pthread_create failed: Resource temporarily unavailable" >&2; head -c 9000 /dev/zero | tr '\0' 0 >&2; exit 2`, "pids.max", fault.Exhausted},
		"no room for another plugin":          {`echo '{"code": 999, "msg": "fork/exec /opt/cni/bin/host-local: resource temporarily unavailable"}'; exit 1`, "pids.max", fault.Exhausted},
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
			p := n.pod()
			planned := n.plan(p)
			var a *Attachment
			var took time.Duration // of the last try
			attach := func() (err error) {
				start := time.Now()
				a, err = n.tryAttach(p, planned)
				took = time.Since(start)
				return err
			}
			var err error
			if errors.Is(c.fault, fault.Timeout) {
				err = n.hung(attach, func() {})
			} else {
				err = attach()
			}
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
			if took > n.cfg.Timeout/2 { // a child that holds the output would take as long as a plugin
				t.Errorf("took %v", took)
			}
			switch name {
			case "child hangs":
				dies(t, n.dir+"/pid")
			case "child holds output, plugin succeeds":
				if !alive(t, n.dir+"/pid") {
					t.Error("the child of a plugin that succeeded was killed")
				}
				endChild(t, n.dir+"/pid")
			case "child holds output, plugin fails":
				endChild(t, n.dir+"/pid")
			}
		})
	}
}

// Cancelling the context ends the plugin like the time limit, but is not a
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

// recorderScript logs its calls, one JSON document per call, and does what the
// file "answer" says.
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

// calls returns the calls since the last time.
func (n *node) calls() []call {
	n.Helper()
	text, err := os.ReadFile(filepath.Join(n.dir, "calls"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		n.Fatal(err)
	}
	text = text[n.read : bytes.LastIndexByte(text, '\n')+1] // a plugin may be writing
	n.read += len(text)
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

// A plugin must not continue after crius has died: the ADD of the old crius
// would overtake the DEL of the new one.
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

// attachForever is the crius process that is killed.
func attachForever(args []string) {
	cfg := Options{Config: DefaultConfig()}
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

// It is tried for as long as libcni waits, and then named with its path.
func TestBusyPluginIsTriedForAsLongAsWithLibcni(t *testing.T) {
	t.Parallel()
	const path = "/opt/cni/bin/bridge"
	busy := &os.PathError{Op: "fork/exec", Path: path, Err: unix.ETXTBSY}
	for name, c := range map[string]struct {
		installed, leaves time.Duration // after the first try
		took              time.Duration
		words             string
		is                error
	}{
		"installed soon":      {installed: 30 * time.Millisecond, took: 30 * time.Millisecond},
		"installed late":      {installed: 4900 * time.Millisecond, took: 5 * time.Second},
		"never":               {installed: time.Hour, took: 5 * time.Second, words: `"bridge": ` + path + " has been open for writing for 5s", is: fault.Unavailable},
		"the caller has left": {installed: time.Hour, leaves: time.Second, took: time.Second, words: `"bridge"`, is: context.Canceled},
	} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			if c.leaves > 0 {
				time.AfterFunc(c.leaves, cancel)
			}
			begin := time.Now()
			out, err := whileBusy(ctx, path, func() ([]byte, error) {
				if time.Since(begin) < c.installed {
					return nil, busy
				}
				return []byte("{}"), nil
			})
			if took := time.Since(begin); took < min(c.installed, c.took) || took > c.took {
				t.Errorf("%s: took %s", name, took)
			}
			if c.is == nil && (err != nil || string(out) != "{}") {
				t.Errorf("%s: %s, %v", name, out, err)
			}
			if c.is != nil && (!errors.Is(err, c.is) || !errors.Is(err, unix.ETXTBSY) || !strings.Contains(err.Error(), c.words)) {
				t.Errorf("%s: %v", name, err)
			}
		})
	}
}

// An error must contain the plugin's message unchanged, for callers that decide
// by it.
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
