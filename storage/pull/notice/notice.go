// Package notice finds out what registries say to the pulls of this process beside their answers:
// that a pull has to wait (429 Too Many Requests), warnings for users (the header Warning of the
// distribution specification), and ways to log in that containers/image does not know. The library
// waits as it is asked, up to a minute and several times, and writes all of it to its log alone.
package notice

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

// Warning is what a registry has to say to users. The text is the registry's: any length, any bytes
// but control characters.
type Warning struct{ Host, Text string }

// Listener takes what is said to a pull. Its functions must not block; one that is nil is not called.
type Listener struct {
	Wait func(Wait)
	Warn func(Warning)
	// Scheme is called with a way to log in that a registry has asked for and the library does not
	// know. The library does not say which registry: each pull is told.
	Scheme func(scheme string)
}

// Pull is a pull that listens.
type Pull struct {
	sources []Source
	to      Listener

	mu    sync.Mutex
	hosts map[string]bool // that were asked for it
}

var pulls struct {
	sync.Mutex
	all map[*Pull]bool
}

// Begin passes what the sources say to a listener, until End.
func Begin(sources []Source, to Listener) *Pull {
	p := &Pull{sources: sources, to: to, hosts: map[string]bool{}}
	pulls.Lock()
	defer pulls.Unlock()
	if pulls.all == nil {
		pulls.all = map[*Pull]bool{}
	}
	pulls.all[p] = true
	return p
}

// End makes the listener hear nothing more.
func (p *Pull) End() {
	pulls.Lock()
	defer pulls.Unlock()
	delete(pulls.all, p)
}

// Asked notes a request for the pull: registries send clients to other hosts.
func (p *Pull) Asked(u *url.URL) {
	const most = 64
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.hosts) < most {
		p.hosts[u.Host] = true
	}
}

// asked reports whether a host was asked for the pull.
func (p *Pull) asked(host string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.hosts[host]
}

// Messages of the library.
var (
	asksToWait = regexp.MustCompile(`^Too many requests to (\S+): sleeping for ([0-9.]+) seconds`)
	noLogin    = regexp.MustCompile(`^no handler for (\S{1,32}) authentication$`)
	warns      = regexp.MustCompile(`^Warning from registry \(first encountered at ("(?:[^"\\]|\\.)*")\): ("(?:[^"\\]|\\.)*")$`)
)

// Heard takes a message of the library, and reports whether it is the warning of a registry, which
// is not for the log as it is.
func Heard(message string) bool {
	switch {
	case strings.HasPrefix(message, "Too many"):
		heardWait(message)
	case strings.HasPrefix(message, "no handler"):
		heardScheme(message)
	case strings.HasPrefix(message, "Warning from registry"):
		return heardWarning(message)
	}
	return false
}

func heardWait(message string) {
	parts := asksToWait.FindStringSubmatch(message)
	if parts == nil {
		return
	}
	address, err := url.Parse(parts[1])
	seconds, badNumber := strconv.ParseFloat(parts[2], 64)
	if err != nil || badNumber != nil {
		return
	}
	wait := Wait{address.Host, time.Now().Add(time.Duration(seconds * float64(time.Second)))}
	for _, p := range listening(func(p *Pull) bool { return p.to.Wait != nil && p.asks(address) }) {
		p.to.Wait(wait)
	}
}

func heardScheme(message string) {
	parts := noLogin.FindStringSubmatch(message)
	if parts == nil {
		return
	}
	for _, p := range listening(func(p *Pull) bool { return p.to.Scheme != nil }) {
		p.to.Scheme(parts[1])
	}
}

func heardWarning(message string) bool {
	parts := warns.FindStringSubmatch(message)
	if parts == nil {
		return false
	}
	from, notQuoted := strconv.Unquote(parts[1])
	text, err := strconv.Unquote(parts[2])
	if notQuoted != nil || err != nil {
		return false
	}
	address, err := url.Parse(from)
	if err != nil {
		return false
	}
	for _, p := range listening(func(p *Pull) bool { return p.to.Warn != nil && (p.asks(address) || p.elsewhere(address)) }) {
		p.to.Warn(Warning{address.Host, text})
	}
	return true
}

// listening returns the pulls for which something was said.
func listening(isFor func(*Pull) bool) (found []*Pull) {
	pulls.Lock()
	defer pulls.Unlock()
	for p := range pulls.all {
		if isFor(p) {
			found = append(found, p)
		}
	}
	return found
}

// asks reports whether a request to this address may come from the pull.
func (p *Pull) asks(address *url.URL) bool {
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

// elsewhere reports whether a request to this address may come from the pull because a registry has
// sent it there.
func (p *Pull) elsewhere(address *url.URL) bool {
	for _, s := range p.sources {
		if address.Host == s.Address() {
			return false
		}
	}
	return p.asked(address.Host)
}
