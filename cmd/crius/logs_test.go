package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/criserver"
	"github.com/crius-run/crius/test/kit/terminal"
	"github.com/crius-run/crius/test/kit/wait"
)

// logServer has pods and containers that share one log file.
type logServer struct {
	cri.UnimplementedRuntimeServiceServer
	log    string
	exited atomic.Bool
	away   atomic.Bool
	asked  atomic.Int32 // number of calls for states
}

func (s *logServer) ListPodSandbox(context.Context, *cri.ListPodSandboxRequest) (*cri.ListPodSandboxResponse, error) {
	pod := func(id, namespace, name string) *cri.PodSandbox {
		return &cri.PodSandbox{Id: id, Metadata: &cri.PodSandboxMetadata{Namespace: namespace, Name: name}}
	}
	return &cri.ListPodSandboxResponse{Items: []*cri.PodSandbox{
		pod("aa11", "default", "web"), pod("aa22", "default", "web"), pod("bbb", "default", "db"), pod("ccc", "kube-system", "db"), pod("aa3", "default", "bbb1"),
	}}, nil
}

func (s *logServer) ListContainers(context.Context, *cri.ListContainersRequest) (*cri.ListContainersResponse, error) {
	container := func(id, pod, name string, created int64) *cri.Container {
		return &cri.Container{Id: id, PodSandboxId: pod, Metadata: &cri.ContainerMetadata{Name: name}, CreatedAt: created}
	}
	return &cri.ListContainersResponse{Containers: []*cri.Container{
		container("new", "aa22", "main", 7), container("old", "aa11", "main", 5), container("db1", "bbb", "main", 1), container("db2", "bbb", "sidecar", 1),
	}}, nil
}

func (s *logServer) ContainerStatus(_ context.Context, r *cri.ContainerStatusRequest) (*cri.ContainerStatusResponse, error) {
	s.asked.Add(1)
	if s.away.Load() {
		return nil, grpcstatus.Error(codes.Unavailable, "restarting")
	}
	state := cri.ContainerState_CONTAINER_RUNNING
	if s.exited.Load() {
		state = cri.ContainerState_CONTAINER_EXITED
	}
	path := s.log
	if r.ContainerId == "old" || r.ContainerId == "db2" {
		path = ""
	}
	return &cri.ContainerStatusResponse{Status: &cri.ContainerStatus{LogPath: path, State: state}}, nil
}

func startLogServer(t *testing.T, log string) (s *logServer, socket string) {
	t.Helper()
	s = &logServer{log: write(t, "log", log)}
	return s, criserver.Serve(t, s, nil)
}

func TestLogs(t *testing.T) {
	t.Parallel()
	const log = "T1 stdout F one\nT2 stderr F error\nT3 stdout P two \nT4 stderr F between\nT5 stdout F parts\nnot ours\nT6 stdout F \nT7 stdout F last"
	_, socket := startLogServer(t, log+"\n")
	for _, c := range []struct{ args, out, errs string }{
		{"default/web", "one\ntwo parts\nnot ours\n\nlast\n", "error\nbetween\n"},
		{"web main", "one\ntwo parts\nnot ours\n\nlast\n", "error\nbetween\n"},
		{"aa2", "one\ntwo parts\nnot ours\n\nlast\n", "error\nbetween\n"},
		{"-t web", "T1 one\nT3 two parts\nnot ours\nT6 \nT7 last\n", "T2 error\nT4 between\n"},
		{"--tail 2 web", "\nlast\n", ""},
		{"--tail 0 web", "", ""},
		{"--tail 100 web", "one\ntwo parts\nnot ours\n\nlast\n", "error\nbetween\n"},
		{"bbb main", "one\ntwo parts\nnot ours\n\nlast\n", "error\nbetween\n"},
	} {
		code, out, errs := crius(t, append([]string{"--api-listen", socket, "logs"}, strings.Fields(c.args)...)...)
		if code != 0 || out != c.out || errs != c.errs {
			t.Errorf("logs %s: exit code %d, %q, %q", c.args, code, out, errs)
		}
	}
	for args, want := range map[string]string{
		"none":           `no pod "none": crius pods lists them`,
		"bb":             `no pod "bb"`, // too short for an id: more often the name of a pod that is gone
		"db":             "more than one pod matches, name one of them: default/db, kube-system/db",
		"default/db":     "pod default/db has more than one container, name one of them: main, sidecar",
		"bbb absent":     `pod default/db has no container "absent": it has main, sidecar`,
		"bbb sidecar":    "the container has no log: its output is discarded",
		"bbb1":           "pod default/bbb1 has no container", // a name, although an id begins like it
		"kube-system/db": "pod kube-system/db has no container",
	} {
		code, out, errs := crius(t, append([]string{"--api-listen", socket, "logs"}, strings.Fields(args)...)...)
		if code != 1 || out != "" || !strings.Contains(errs, want) {
			t.Errorf("logs %s: exit code %d, %q, %q, want %q", args, code, out, errs, want)
		}
	}
}

// A followed log is shown across rotations and restarts of the server, and to its end.
func TestFollowLogs(t *testing.T) {
	t.Parallel()
	s, socket := startLogServer(t, "T stdout F first\nT stdout F half")
	done := make(chan string)
	go func() {
		_, out, errs := crius(t, "--api-listen", socket, "logs", "-f", "web")
		done <- out + errs
	}()
	looks := func() {
		t.Helper()
		before := s.asked.Load()
		wait.For(t, "the log to be looked at again", func() bool { return s.asked.Load() > before+2 })
	}
	add := func(text string) {
		t.Helper()
		f, err := os.OpenFile(s.log, os.O_APPEND|os.O_WRONLY|os.O_CREATE, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteString(text); err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	looks()
	add(" and half\n")
	looks()
	if err := os.Rename(s.log, s.log+".1"); err != nil {
		t.Fatal(err)
	}
	looks()
	s.away.Store(true) // it is being restarted
	add("T stdout F rotated\n")
	looks()
	s.away.Store(false)
	add("T stdout F end\n")
	s.exited.Store(true)
	if got, want := <-done, "first\nhalf and half\nrotated\nend\n"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// The output of a container reaches a terminal only as text, whatever the records look
// like. Other outputs get it unchanged.
func TestLogsDoNotControlTheTerminal_CVE_2021_25743(t *testing.T) {
	t.Parallel()
	const log = "T stdout F \x1b]0;owned\x07\x1b[2J\ttab\u009b31m\r\n" +
		"T stderr F \x1b[31mred\x1b[0m\n" +
		"T stdout P caf\xc3\nT stdout F \xa9 \u202eback\rover\n" + // a character in two records
		"\x1b[2Jnot ours\xff\n"
	_, socket := startLogServer(t, log)
	command := []string{"--config", write(t, "crius.toml", ""), "--api-listen", socket, "logs"}
	const plain = "\x1b]0;owned\x07\x1b[2J\ttab\u009b31m\r\ncafé \u202eback\rover\n\x1b[2Jnot ours\xff\n"
	if code, out, errs := crius(t, append(command, "web")...); code != 0 || out != plain || errs != "\x1b[31mred\x1b[0m\n" {
		t.Errorf("not to a terminal: exit code %d, %q, %q", code, out, errs)
	}
	for flag, want := range map[string]string{
		"--timestamps=false": `\x1b]0;owned\a\x1b[2J` + "\ttab" + `\u009b31m` + "\n" + `\x1b[31mred\x1b[0m` + "\n" +
			`café \u202eback\rover` + "\n" + `\x1b[2Jnot ours\xff` + "\n",
		"--timestamps": `T \x1b]0;owned\a\x1b[2J` + "\ttab" + `\u009b31m` + "\n" + `T \x1b[31mred\x1b[0m` + "\n" +
			`T café \u202eback\rover` + "\n" + `\x1b[2Jnot ours\xff` + "\n",
	} {
		term := terminal.Open(t)
		if code := run(t.Context(), newRoot(), append(command, flag, "web"), term.File, term.File); code != 0 {
			t.Errorf("%s: exit code %d", flag, code)
		}
		if !wait.Until(t.Context(), func() bool { return term.Shown() == want }) {
			t.Errorf("%s: the terminal gets %q, want %q", flag, term.Shown(), want)
		}
	}
}

// A pod that may write to the log directory cannot make crius read other files.
func TestLogsAreRegularFiles(t *testing.T) {
	t.Parallel()
	s, socket := startLogServer(t, "T stdout F first\n")
	secret := write(t, "secret", "T stdout F secret\n")
	follow := make(chan string)
	go func() {
		code, out, errs := crius(t, "--api-listen", socket, "logs", "-f", "web")
		follow <- fmt.Sprint(code, out, errs)
	}()
	wait.For(t, "the log to be followed", func() bool { return s.asked.Load() > 2 })
	for what, replace := range map[string]func() error{
		"a link":      func() error { return os.Symlink(secret, s.log) },
		"a pipe":      func() error { return unix.Mkfifo(s.log, 0o600) },
		"a directory": func() error { return os.Mkdir(s.log, 0o700) },
	} {
		if err := errors.Join(os.Remove(s.log), replace()); err != nil {
			t.Fatal(err)
		}
		code, out, errs := crius(t, "--api-listen", socket, "logs", "web")
		if code != 1 || out != "" || !strings.Contains(errs, "is not a regular file") {
			t.Errorf("%s: exit code %d, %q, %q", what, code, out, errs)
		}
	}
	if got := <-follow; !strings.HasPrefix(got, "1first\n") || !strings.Contains(got, "is not a regular file") {
		t.Errorf("followed: %q", got)
	}
}
