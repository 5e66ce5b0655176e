package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	task "github.com/containerd/containerd/api/runtime/task/v2"
	eventservice "github.com/containerd/containerd/api/services/ttrpc/events/v1"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/ttrpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/conmon/shim"
	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/test/kit/program"
)

// A program started by hand says what it is for and exits.
func TestByHand(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{nil, {"--help"}, {"create", "x"}, {"wait", "--dir=/x", "--shim=/y"}, {"start", "x"}, {"fly", "--dir=/x", "--shim=/y", "x"}} {
		if err := run(t.Context(), args); !errors.Is(err, errUsage) || !strings.Contains(err.Error(), "nternal helper of crius") {
			t.Errorf("%q: %v", args, err)
		}
	}
	err := run(t.Context(), []string{"create", "--dir=/x", "--shim=/y", "--option=--No=1", "x"})
	if err == nil || !strings.Contains(err.Error(), `unknown runtime option "No"`) {
		t.Error(err)
	}
}

// neighbours makes the bundles of two containers and of a pod.
func neighbours(t testing.TB) (first, second, pod string) {
	t.Helper()
	root := t.TempDir()
	first, second, pod = filepath.Join(root, "containers", "c1"), filepath.Join(root, "containers", "c2"), filepath.Join(root, "pods", "p", "infra")
	for _, dir := range []string{first, second, pod} {
		bundle(t, dir, "unix:///one", "")
	}
	return first, second, pod
}

// bundle makes the bundle of a container whose shim is at the address. A container with a
// sandbox runs in that.
func bundle(t testing.TB, dir, address, sandbox string) {
	t.Helper()
	config := fmt.Sprintf(`{"annotations":{"io.kubernetes.cri.sandbox-id":%q}}`, sandbox)
	err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, "config.json"), []byte(config), 0o600))
	if err == nil {
		err = shim.Record{Endpoint: shim.Endpoint{Address: address, Version: 2}}.Write(dir)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// Events of a guest about containers outside of it are ignored.
func TestOOMOfOthers(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	for i, c := range []struct {
		address, sandbox           string // of the sender
		otherAddress, otherSandbox string // of the container in the event
		heard                      bool
	}{
		{"unix:///a", "p", "unix:///a", "p", true},
		{"unix:///a", "", "unix:///a", "", true},
		{"unix:///a", "p", "unix:///b", "p", true},
		{"unix:///a", "p", "unix:///b", "q", false},
		{"unix:///a", "", "unix:///b", "", false},
		{"", "", "", "", false},
	} {
		speaker, other := filepath.Join(root, fmt.Sprint("s", i)), filepath.Join(root, fmt.Sprint("o", i))
		bundle(t, speaker, c.address, c.sandbox)
		bundle(t, other, c.otherAddress, c.otherSandbox)
		err := noteOOM(speaker, oomEvent(filepath.Base(other)).Value)
		if (err == nil) != c.heard || marked(other) != c.heard || marked(speaker) {
			t.Errorf("%+v: %v, marked: %v", c, err, marked(other))
		}
	}
}

// oomEvent is an OOM event for a container, as shims send it.
func oomEvent(id string) *anypb.Any {
	return &anypb.Any{TypeUrl: "containerd.events.TaskOOM", Value: append([]byte{10, byte(len(id))}, id...)}
}

func marked(dir string) bool {
	_, err := os.Lstat(filepath.Join(dir, wire.OOMFile))
	return err == nil
}

// An event of a guest, whatever it contains, can only mark a container of the same shim.
func FuzzOOMEvent(f *testing.F) {
	for _, id := range []string{"c2", "c1", ".", "..", "../c2", "c2/", "stranger", "", "\xff", strings.Repeat("c", 127)} {
		f.Add(oomEvent(id).Value)
	}
	f.Add([]byte{10, 200, 1, 'c'})
	f.Add([]byte{8, 1})
	f.Fuzz(func(t *testing.T, event []byte) {
		first, second, pod := neighbours(t)
		stranger := filepath.Join(filepath.Dir(first), "stranger")
		bundle(t, stranger, "unix:///other", "")
		err := noteOOM(pod, event)
		id, parseErr := containerOf(event)
		if parseErr != nil && err == nil {
			t.Errorf("%x: an event that cannot be read is no error", event)
		}
		if marked(first) != (err == nil && id == "c1") || marked(second) != (err == nil && id == "c2") || marked(stranger) {
			t.Errorf("%x about %q: %v, marked: %v, %v, %v", event, id, err, marked(first), marked(second), marked(stranger))
		}
		root := filepath.Dir(filepath.Dir(first))
		marks := 0
		_ = filepath.WalkDir(root, func(_ string, d os.DirEntry, err error) error {
			if err == nil && d.Name() == wire.OOMFile {
				marks++
			}
			return nil
		})
		if marks > 1 || marks == 1 && !marked(first) && !marked(second) {
			t.Errorf("%x: %d marks", event, marks)
		}
	})
}

// A shim runs its publisher with the flags in containerd's order.
func TestPublish(t *testing.T) {
	first, second, pod := neighbours(t)
	t.Chdir(pod)
	text, err := proto.Marshal(oomEvent("c2"))
	if err != nil {
		t.Fatal(err)
	}
	stdin := filepath.Join(t.TempDir(), "event")
	if err := os.WriteFile(stdin, text, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(stdin)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := publish("/tasks/exit", f); err != nil || marked(second) {
		t.Errorf("an event that nobody needs: %v", err)
	}
	old := os.Stdin
	os.Stdin = f
	defer func() { os.Stdin = old }()
	if err := run(t.Context(), []string{"--address", "/run/x", "publish", "--topic", "/tasks/oom", "--namespace", "k8s.io"}); err != nil {
		t.Error(err)
	}
	if !marked(second) || marked(first) || marked(pod) {
		t.Errorf("marked: %v %v %v", marked(first), marked(second), marked(pod))
	}
	for _, bad := range [][]byte{nil, {10}, {10, 200, 1}, {16, 1}, append([]byte{10, 5}, "../c1"...), {10, 0}} {
		if err := noteOOM(pod, bad); err == nil {
			t.Errorf("%q is taken for an event", bad)
		}
	}
	if err := publish(oomTopic, bytes.NewReader([]byte{0xff})); err == nil {
		t.Error("no message is taken for an event")
	}
}

// A shim sends its events to one listener after the other.
func TestEvents(t *testing.T) {
	t.Parallel()
	first, second, _ := neighbours(t)
	send := func(topic, id string) error {
		conn, err := net.Dial("unix", filepath.Join(first, eventSocket))
		if err != nil {
			return err
		}
		client := ttrpc.NewClient(conn)
		defer client.Close()
		_, err = eventservice.NewTTRPCEventsClient(client).Forward(context.Background(),
			&eventservice.ForwardRequest{Envelope: &types.Envelope{Topic: topic, Event: oomEvent(id)}})
		return err
	}
	for range 2 {
		stop, err := serveEvents(t.Context(), first)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(send("/tasks/start", "c1"), send(oomTopic, "c2"), send(oomTopic, "gone")); err != nil {
			t.Error(err)
		}
		stop()
	}
	if marked(first) || !marked(second) {
		t.Errorf("marked: %v %v", marked(first), marked(second))
	}
}

// A container whose shim is dead has ended, and the shim's program cleans up.
func TestWaitForADeadShim(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "shim")
	if err := program.Write(path, []byte("#!/bin/sh\nprintf '\\020\\011' ; touch buried")); err != nil {
		t.Fatal(err)
	}
	p := shim.Program{Path: path, ID: filepath.Base(dir), Dir: dir, Publisher: "/bin/true"}
	r := shim.Record{Endpoint: shim.Endpoint{Address: "unix://" + dir + "/none", Version: 2}}
	status, err := waitFor(t.Context(), r, p)
	if err != nil || status != 9 {
		t.Errorf("%d, %v", status, err)
	}
	if _, err := os.Stat(filepath.Join(dir, "buried")); err != nil {
		t.Error(err)
	}
	p.Path = "/no/such/shim"
	for _, guest := range []bool{false, true} {
		r.Sandboxed, r.Leader = guest, true
		own, inDir := sleeper(t, "/"), sleeper(t, dir)
		processes := wire.AppendProcesses(nil, wire.Process{}, own, nil)
		if err := os.WriteFile(filepath.Join(dir, wire.Processes), processes, 0o600); err != nil {
			t.Fatal(err)
		}
		if status, err := waitFor(t.Context(), r, p); err != nil || status != killed {
			t.Errorf("without a program: %d, %v", status, err)
		}
		if conmon.Alive(own) != guest || conmon.Alive(inDir) == guest {
			t.Errorf("guest %v: the container's process lives: %v, who works in its directory: %v", guest, conmon.Alive(own), conmon.Alive(inDir))
		}
	}
}

// sleeper starts a process with this working directory.
func sleeper(t *testing.T, dir string) wire.Process {
	t.Helper()
	cmd := exec.Command("sleep", "600")
	cmd.Dir = dir
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	process, err := wire.Find(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	return process
}

// The program fails without a record when it is run as the monitor runs it.
func TestWaitWithoutRecord(t *testing.T) {
	t.Parallel()
	program := filepath.Join(t.TempDir(), "crius-conmon-shim")
	if text, err := exec.Command("go", "build", "-o", program, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	text, err := exec.Command(program, "wait", "--shim=/x", "--dir="+t.TempDir(), "c1").CombinedOutput()
	if err == nil || !strings.Contains(string(text), "no shim record") {
		t.Errorf("%v: %s", err, text)
	}
}

// An invalid pid of a container or of a shim is refused. For a guest any pid of a container
// will do, but not of the shim itself.
func TestPIDs(t *testing.T) {
	t.Parallel()
	own := uint32(os.Getpid())
	for _, c := range []struct {
		guest           bool
		container, shim uint32
		right           bool
	}{
		{false, own, own, true}, {false, 0, own, false}, {false, 1, own, false}, {false, 1<<22 + 1, own, false},
		{true, 1, own, true}, {true, 0, own, true}, {true, own, 1, false}, {true, own, 0, false},
	} {
		dir := t.TempDir()
		serveTask(t, filepath.Join(dir, "shim.sock"), map[string]ttrpc.Method{
			"Create": func(context.Context, func(any) error) (any, error) {
				return &task.CreateTaskResponse{Pid: c.container}, nil
			},
			"Connect": func(context.Context, func(any) error) (any, error) {
				return &task.ConnectResponse{ShimPid: c.shim}, nil
			},
		})
		path := filepath.Join(dir, "shim")
		if err := program.Write(path, []byte("#!/bin/sh\nprintf unix://"+dir+"/shim.sock")); err != nil {
			t.Fatal(err)
		}
		a := arguments{guest: c.guest, pidFile: filepath.Join(dir, "pid"), program: shim.Program{Path: path, ID: "c1", Dir: dir, Publisher: "/bin/true"}}
		err := a.create(t.Context())
		_, noPID := os.Stat(a.pidFile)
		if (err == nil) != c.right || (noPID == nil) != c.right || err != nil && !strings.Contains(err.Error(), "invalid pid") {
			t.Errorf("%+v: %v", c, err)
		}
	}
}
