package network

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/test/kit/wait"
)

// live returns pods that stay; a lease of any other is ours if its id begins
// with "ours".
func live(ids ...string) Live {
	return Live{
		Attached: func() (map[string]string, error) {
			attached := map[string]string{}
			for _, id := range ids {
				attached[id] = ifName
			}
			return attached, nil
		},
		Ours: func(id string) bool { return strings.HasPrefix(id, "ours") },
	}
}

// collectable is a network of version 1.1.0 with addresses from host-local.
const collectable = `{"cniVersion": "1.1.0", "name": "fake", "plugins": [{"type": "fake", "ipam": {"type": "host-local", "dataDir": "LEASES"}}]}`

func (n *node) lease(address, owner string) {
	n.Helper()
	dir := filepath.Join(n.leases, "fake")
	if err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, address), []byte(owner+"\r\neth0"), 0o600)); err != nil {
		n.Fatal(err)
	}
}

// Plugins get exactly the existing pods, in each configured network.
func TestCollect(t *testing.T) {
	t.Parallel()
	n := newNode(t, map[string]string{"10-fake.conflist": collectable, "other/10-fake.conflist": strings.Replace(statusConf, `"name": "fake"`, `"name": "second"`, 1)})
	n.recorder(``)
	n.lease("10.9.0.2", "live1")
	n.lease("10.9.0.3", "ours-and-gone")
	if err := n.Collect(t.Context(), []string{filepath.Join(n.confs, "other"), filepath.Join(n.dir, "nowhere")}, live("live1", "live2")); err != nil {
		t.Error(err)
	}
	calls := n.calls()
	if len(calls) != 2 {
		t.Fatalf("calls %+v", calls)
	}
	for i, name := range []string{`"fake"`, `"second"`} {
		var valid []struct{ ContainerID, IfName string }
		if err := json.Unmarshal(calls[i].Conf["cni.dev/valid-attachments"], &valid); err != nil || len(valid) != 2 {
			t.Errorf("attachments %s", calls[i].Conf["cni.dev/valid-attachments"])
		}
		for _, a := range valid {
			if !strings.HasPrefix(a.ContainerID, "live") || a.IfName != "eth0" {
				t.Errorf("attachment %+v", a)
			}
		}
		if calls[i].Command != "GC" || string(calls[i].Conf["name"]) != name {
			t.Errorf("call %+v", calls[i])
		}
	}
	if err := os.RemoveAll(n.leases); err != nil {
		t.Fatal(err)
	}
	if err := n.Collect(t.Context(), nil, live()); err != nil || string(n.calls()[0].Conf["cni.dev/valid-attachments"]) != "[]" {
		t.Errorf("without pods: %v", err)
	}
}

// Collect skips a network if the plugins do not know GC, if its configuration
// forbids it, and if another runtime has a pod in it.
func TestCollectLeavesNetworksAlone(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ conf, owner string }{
		"version 1.0.0": {strings.Replace(collectable, "1.1.0", "1.0.0", 1), "ours"},
		"disableGC":     {strings.Replace(collectable, `"name"`, `"disableGC": true, "name"`, 1), "ours"},
		"shared":        {collectable, "podman"},
		"none":          {`{`, "ours"},
	} {
		n := newNode(t, map[string]string{"10-fake.conflist": c.conf})
		n.recorder(``)
		n.lease("10.9.0.3", c.owner)
		if err := n.Collect(t.Context(), nil, live("live")); err != nil || len(n.calls()) != 0 {
			t.Errorf("%s: %v, or plugins were run", name, err)
		}
	}
}

// A plugin that fails is named, and the others are run nevertheless; without a
// list of the pods none is.
func TestCollectFails(t *testing.T) {
	t.Parallel()
	n := newNode(t, map[string]string{"10-fake.conflist": `{"cniVersion": "1.1.0", "name": "fake", "plugins": [{"type": "bad"}, {"type": "fake"}]}`})
	n.recorder(``)
	n.plugin("bad", `echo '{"cniVersion": "1.1.0", "code": 4, "msg": "what is GC?"}'; exit 1`)
	if err := n.Collect(t.Context(), nil, live()); err == nil || !strings.Contains(err.Error(), "what is GC?") || len(n.calls()) != 1 {
		t.Errorf("%v", err)
	}
	unreadable := Live{Attached: func() (map[string]string, error) { return nil, fault.Unavailable }}
	if err := n.Collect(t.Context(), nil, unreadable); !errors.Is(err, fault.Unavailable) || len(n.calls()) != 0 {
		t.Errorf("unreadable records: %v", err)
	}
}

// A pod attached while plugins collect would look like garbage to them: Attach
// waits, but no longer than its caller.
func TestAttachWaitsForCollect(t *testing.T) {
	t.Parallel()
	n := newNode(t, map[string]string{"10-fake.conflist": statusConf})
	hang := filepath.Join(n.dir, "hang")
	if err := os.WriteFile(hang, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	n.recorder(`case $CNI_COMMAND in GC) while [ -e ` + hang + ` ]; do sleep 0.02; done;; *) ` + strings.Replace(strings.TrimPrefix(gives, "cat >/dev/null\n"), "1.0.0", "1.1.0", 1) + `;; esac`)
	collected := make(chan error, 1)
	asked := make(chan struct{})
	pods := live()
	pods.Attached = func() (map[string]string, error) { close(asked); return nil, nil }
	go func() { collected <- n.Collect(context.Background(), nil, pods) }()
	<-asked
	p := n.pod()
	planned := n.plan(p)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := n.do(func() error { _, err := n.Attach(ctx, p, planned); return err }); !errors.Is(err, context.Canceled) {
		t.Errorf("a caller that has gone: %v", err)
	}
	attached := make(chan error, 1)
	go func() { _, err := n.tryAttach(p, planned); attached <- err }()
	wait.For(t, "the plugin to collect", func() bool { return len(n.calls()) == 1 })
	select {
	case err := <-attached:
		t.Fatalf("attached while plugins collect: %v", err)
	default:
	}
	if err := os.Remove(hang); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(<-collected, <-attached); err != nil {
		t.Error(err)
	}
	if calls := n.calls(); len(calls) != 1 || calls[0].Command != "ADD" {
		t.Errorf("calls %+v", calls)
	}
}
