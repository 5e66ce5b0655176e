package conmon_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/test/kit/wait"
)

// awaitTrouble waits until the client knows of a trouble with that reason, by the channel
// alone; empty: of none.
func awaitTrouble(t *testing.T, client *conmon.Client, reason string) conmon.LogTrouble {
	t.Helper()
	for {
		now, changed := client.LogTrouble()
		if now.Reason == reason {
			return now
		}
		select {
		case <-changed:
		case <-limit(t).Done():
			t.Fatalf("the log's trouble is %+v, want %q", now, reason)
		}
	}
}

// fill leaves no room on a disk.
func fill(t *testing.T, ballast string) {
	t.Helper()
	f, err := os.Create(ballast)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for err == nil {
		_, err = f.Write(make([]byte, 4<<10))
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
}

// All clients are told that a log cannot be written, however late they come, and that it
// can be again. Nothing is lost.
func TestClientsAreToldOfABlockedLog(t *testing.T) {
	everyRuntime(t, func(t *testing.T, runtime string) {
		disk := tinyDisk(t, 64)
		ballast := filepath.Join(disk, "ballast")
		c := newContainer(t, runtime, "copy")
		c.Stdin, c.LogFile = true, filepath.Join(disk, "log")
		client := c.run()
		awaitTrouble(t, client, "")
		fill(t, ballast)
		a := c.attach(everything)
		typeIn(t, a.Stdin, "waits\n")
		for _, told := range []*conmon.Client{client, c.dial()} {
			now := awaitTrouble(t, told, conmon.LogBlocked)
			if !strings.Contains(now.Message, c.LogFile) || !strings.Contains(now.Message, "no space left on device") {
				t.Errorf("%+v", now)
			}
		}
		if err := os.Remove(ballast); err != nil {
			t.Fatal(err)
		}
		awaitTrouble(t, client, "")
		c.awaitLog("waits\n")
		typeIn(t, a.Stdin, "goes on\n")
		c.awaitLog("waits\ngoes on\n")
	})
}

// A log that is deleted is told of once something is written, also when the monitor has
// rested meanwhile, until it is reopened.
func TestClientsAreToldOfADeletedLog(t *testing.T) {
	everyRuntime(t, func(t *testing.T, runtime string) {
		c := newContainer(t, runtime, "copy")
		c.Stdin, c.RestAfter = true, time.Millisecond
		client := c.run()
		c.atRest()
		must(os.Remove(c.LogFile))
		say := func(text string) {
			a := c.attach(everything)
			typeIn(t, a.Stdin, text)
			expect(t, a.Stdout, text)
			a.Close()
		}
		say("not found\n")
		now := awaitTrouble(t, client, conmon.LogDetached)
		if !strings.Contains(now.Message, c.LogFile+" was deleted") {
			t.Errorf("%+v", now)
		}
		c.atRest()
		later := c.dial() // as another server does, without anything that is written
		awaitTrouble(t, later, conmon.LogDetached)
		c.atRest()
		for _, told := range []*conmon.Client{client, later} {
			awaitTrouble(t, told, conmon.LogDetached)
		}
		must(client.ReopenLog(limit(t)))
		for _, told := range []*conmon.Client{client, later} {
			awaitTrouble(t, told, "")
		}
		say("found\n")
		c.awaitLog("found\n")
		c.atRest()
		wait.For(t, "no trouble at rest", func() bool { now, _ := client.LogTrouble(); return now.Reason == "" })
	})
}
