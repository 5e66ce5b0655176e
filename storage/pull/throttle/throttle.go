// Package throttle finds out when a registry has asked the pulls of this process to wait
// (429 Too Many Requests). containers/image waits as it is asked, up to a minute and several
// times, and says so nowhere but in a debug message.
package throttle

import (
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Source is a repository from which a pull may come.
type Source struct{ Host, Repository string }

// Address returns the host that the library connects to.
func (s Source) Address() string {
	if s.Host == "docker.io" {
		return "registry-1.docker.io"
	}
	return s.Host
}

// Wait is what a registry has asked for.
type Wait struct {
	Host  string
	Until time.Time
}

// pull is a pull whose waits are reported to began.
type pull struct {
	sources []Source
	began   func(Wait)
}

var pulls struct {
	sync.Mutex
	all map[*pull]bool
}

// Begin reports each wait for one of the sources to began, until end is called. began must not
// block.
func Begin(sources []Source, began func(Wait)) (end func()) {
	p := &pull{sources, began}
	pulls.Lock()
	defer pulls.Unlock()
	if pulls.all == nil {
		pulls.all = map[*pull]bool{}
	}
	pulls.all[p] = true
	return func() {
		pulls.Lock()
		defer pulls.Unlock()
		delete(pulls.all, p)
	}
}

// announced is how the library announces a wait.
var announced = regexp.MustCompile(`^Too many requests to (\S+): sleeping for ([0-9.]+) seconds`)

// Heard takes a message of the library.
func Heard(message string) {
	if !strings.HasPrefix(message, "Too many") { // nearly all
		return
	}
	parts := announced.FindStringSubmatch(message)
	if parts == nil {
		return
	}
	address, err := url.Parse(parts[1])
	seconds, badNumber := strconv.ParseFloat(parts[2], 64)
	if err != nil || badNumber != nil {
		return
	}
	wait := Wait{address.Host, time.Now().Add(time.Duration(seconds * float64(time.Second)))}
	pulls.Lock()
	defer pulls.Unlock()
	for p := range pulls.all {
		if p.asks(address) {
			p.began(wait)
		}
	}
}

// asks reports whether a request to this address may come from the pull.
func (p *pull) asks(address *url.URL) bool {
	asked := strings.TrimPrefix(address.Path, "/v2/")
	for _, s := range p.sources {
		rest, ofRepository := strings.CutPrefix(asked, s.Repository+"/")
		kind, _, _ := strings.Cut(rest, "/")
		if address.Host == s.Address() && (asked == "" || ofRepository && (kind == "manifests" || kind == "blobs")) {
			return true
		}
	}
	return false
}
