package network

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/crius-run/crius/internal/fault"
)

// A network that was ready stays so for the grace period, each time again; one
// that has never been ready, or not within that time, is not.
func TestReadyGrace(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		cfg := Options{Config: DefaultConfig()}
		cfg.ReadyGrace = time.Minute
		n := New(cfg)
		broken := errors.New("broken")
		step := func(after time.Duration, found, want error) {
			t.Helper()
			time.Sleep(after)
			if got := n.withGrace(t.Context(), found); !errors.Is(got, want) {
				t.Errorf("said %v of %v, want %v", got, found, want)
			}
		}
		step(0, broken, broken) // it has never been ready
		step(time.Second, broken, broken)
		step(time.Second, nil, nil)
		step(time.Hour, broken, nil) // no call for an hour
		step(59*time.Second, broken, nil)
		step(time.Second, broken, broken)
		step(time.Second, broken, broken)
		step(time.Second, nil, nil)
		step(time.Second, broken, nil)
		step(50*time.Second, nil, nil)
		step(time.Second, broken, nil)
		step(50*time.Second, broken, nil)
		step(time.Second, nil, nil)
		n.Configure(Config{}) // a reload without a grace period
		step(time.Second, broken, broken)
	})
}

// The grace period covers whatever a restarted add-on removes: its
// configuration, its plugin, its agent.
func TestReadyWhileAddOnRestarts(t *testing.T) {
	t.Parallel()
	n := newNode(t, map[string]string{"10-fake.conflist": statusConf})
	n.cfg.ReadyGrace = time.Hour
	n.recorder(`exit 1`)
	n.restart()
	if err := n.Ready(t.Context()); !errors.Is(err, fault.Unavailable) {
		t.Errorf("never ready: %v", err)
	}
	n.answer(``)
	for what, broken := range map[string]func(){
		"agent": func() { n.answer(`exit 1`) }, "half a configuration": func() { n.conf("10-fake.conflist", statusConf[:20]) },
		"plugin": func() {
			n.conf("10-fake.conflist", `{"cniVersion": "1.1.0", "name": "fake", "plugins": [{"type": "none"}]}`)
		},
	} {
		if err := n.Ready(t.Context()); err != nil {
			t.Errorf("before: %v", err)
		}
		broken()
		if err := n.Ready(t.Context()); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		if err := n.Grace(); !errors.Is(err, fault.Unavailable) {
			t.Errorf("%s: within its grace period for %v", what, err)
		}
		if since, text := n.Info()["notReadySince"], n.Info()["notReady"]; since == nil || text == nil {
			t.Errorf("%s: information has %v, %v", what, since, text)
		}
		n.answer(``)
		n.conf("10-fake.conflist", statusConf)
	}
	if err := n.Ready(t.Context()); err != nil || n.Grace() != nil {
		t.Errorf("ready again: %v, %v", err, n.Grace())
	}
	n.restart()
	n.answer(`exit 1`)
	if err := n.Ready(t.Context()); err == nil || n.Grace() != nil {
		t.Errorf("a new server was never ready: %v, %v", err, n.Grace())
	}
}

const statusConf = `{"cniVersion": "1.1.0", "name": "fake", "plugins": [{"type": "fake"}]}`
