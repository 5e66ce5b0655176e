package conmon_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/test/kit/wait"
)

// serverRole makes this test program a server that can be killed: it launches
// the container of the named directory, and then does nothing.
const serverRole = "CONMON_TEST_SERVER"

func actAsServer(dir string) {
	text, err := os.ReadFile(filepath.Join(dir, "spec.json"))
	must(err)
	var spec conmon.Spec
	must(json.Unmarshal(text, &spec))
	_, err = conmon.Launch(context.Background(), spec)
	must(err)
	must(os.WriteFile(filepath.Join(dir, "launched"), nil, 0o600))
	select {}
}

// serve starts a server for c.
func (c *container) serve() *exec.Cmd {
	c.Helper()
	c.orphaned = true
	c.writeConfig()
	text, err := json.Marshal(c.Spec)
	if err != nil {
		c.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(c.Dir, "spec.json"), text, 0o600); err != nil {
		c.Fatal(err)
	}
	output, err := os.Create(filepath.Join(c.Dir, "server"))
	if err != nil {
		c.Fatal(err)
	}
	defer output.Close()
	server := exec.Command("/proc/self/exe")
	server.Env = append(os.Environ(), serverRole+"="+c.Dir)
	server.Stdout, server.Stderr = output, output
	if err := server.Start(); err != nil {
		c.Fatal(err)
	}
	return server
}

func (c *container) launched() bool {
	_, err := os.Stat(filepath.Join(c.Dir, "launched"))
	return err == nil
}

func crash(server *exec.Cmd) {
	_ = server.Process.Kill()
	_ = server.Wait()
}

// The container does not notice the death of its server. The next server learns
// what happened meanwhile.
func TestServerDies(t *testing.T) {
	everyRuntime(t, func(t *testing.T, runtime string) {
		c := newContainer(t, runtime, "tick", "1")
		server := c.serve()
		wait.For(t, "the launch", c.launched)
		crash(server)
		c.start()
		c.awaitLog("tick 50")
		for range 3 { // servers come and go
			client, err := conmon.Dial(limit(t), c.Dir, c.ExitFile)
			if err != nil {
				t.Fatal(err)
			}
			if p := client.Process(); p != c.processes().Container || !conmon.Alive(p) {
				t.Errorf("container %+v", p)
			}
			client.Close()
		}
		before := time.Now()
		if err := conmon.Signal(c.processes().Container, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		gone(t, c.processes().Monitor)
		client, err := conmon.Dial(limit(t), c.Dir, c.ExitFile)
		if err != nil {
			t.Fatal(err)
		}
		if e := exit(t, client); e.Code != 137 || e.FinishedAt.Before(before) || e.FinishedAt.After(time.Now()) {
			t.Errorf("exit %+v, killed after %v", e, before)
		}
	})
}

// A server killed at any instant of a create leaves a container that works, or
// only what can be cleaned up.
func TestServerDiesInCreate(t *testing.T) {
	everyRuntime(t, func(t *testing.T, runtime string) {
		outcomes := map[string]int{}
		for range 15 {
			c := newContainer(t, runtime, "exit", "9", "0")
			server := c.serve()
			time.Sleep(time.Duration(rand.IntN(60_000)) * time.Microsecond)
			crash(server)

			client, err := conmon.Dial(limit(t), c.Dir, c.ExitFile)
			switch {
			case errors.Is(err, conmon.ErrLost):
				outcomes["not begun"]++
			case err != nil:
				t.Error(err)
			case rand.IntN(2) == 0:
				outcomes[fmt.Sprintf("terminated, had pid: %v", client.PID() != 0)]++
				client.Close()
			default:
				outcomes[fmt.Sprintf("went on, had pid: %v", client.PID() != 0)]++
				wait.For(t, "the container to be created", func() bool { return client.PID() != 0 })
				c.start()
				if e := exit(t, client); e.Code != 9 {
					t.Errorf("exit %+v", e)
				}
				client.Close()
			}
			c.destroy() // checks that nothing remains
			for _, pid := range c.mentioning() {
				t.Errorf("process %s remains", pid)
			}
		}
		t.Log(outcomes)
	})
}
