package pullerror

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strings"

	"github.com/crius-run/crius/internal/fault"
)

// Step is what a pull asks for.
type Step int

// Steps of a pull, in their order.
const (
	Ping     Step = iota + 1 // /v2/: is this a registry, and how do clients log in?
	Token                    // from the server of tokens that the registry has named
	Login                    // wanted by the registry, and in no way that crius can log in
	Manifest                 // by the image's name
	Choice                   // of an image for this platform in an index
	Part                     // what the manifest or index names: the registry has accepted name and credentials
)

// Point says where in a pull an error has arisen. The library's errors do not say it: they look alike
// for a registry that does not know the image, and for a storage that has lost a layer.
type Point struct {
	Step  Step
	Host  string // that the registry or mirror From has sent crius to; empty: no other has been asked
	From  string // name of the registry or mirror that was asked
	Plain bool   // the request was plain HTTP, because one by TLS has failed

	Schemes []string // of a Login
}

// pointError is an error at a Point.
type pointError struct {
	error

	at Point
}

func (e pointError) Unwrap() error { return e.error }

// At notes where an error has arisen, unless something below has noted it.
func At(p Point, err error) error {
	var known pointError
	if err == nil || errors.As(err, &known) {
		return err
	}
	return pointError{err, p}
}

func pointOf(err error) Point {
	var e pointError
	errors.As(err, &e)
	return e.at
}

// advise is advice by the point alone; empty if what the error is decides.
func (p Point) advise(err error, kinds func(error) bool) string {
	status := StatusOf(err)
	refused := LoginRefused(err) || kinds(fault.NotFound) || status >= http.StatusBadRequest && status < http.StatusInternalServerError
	switch {
	case p.Step == Login && len(p.Schemes) == 0:
		return fmt.Sprintf("%s wants a login for the image, and names no way to log in where clients look for one, at /v2/ (WWW-Authenticate): correct its configuration", p.From)
	case p.Step == Login:
		return fmt.Sprintf("%s wants a login by %s, and crius can log in by Basic and Bearer: have the registry offer one of these, in a header WWW-Authenticate of its own", p.From, strings.Join(p.Schemes, " or "))
	case p.Step == Choice:
		return "build the image for the node's processor, or have the pod scheduled to other nodes"
	case p.Step == Ping && p.Plain && status == http.StatusBadRequest: // insecure = true is set, and TLS has failed before
		return fmt.Sprintf("%s speaks TLS, by which it refused crius: if it wants a client certificate, check client.cert and client.key in /etc/containers/certs.d/%s", p.From, p.From)
	case p.Step == Ping && refused:
		return fmt.Sprintf("%s does not answer as a registry: check its name and port, and whether a proxy or firewall answers in its place", place{p.host(), p.sender()})
	case p.Step == Ping && p.Answered(err):
		return fmt.Sprintf("%s wants tokens and does not say where it gives them (WWW-Authenticate): correct its configuration", p.From)
	case p.Step == Token && !LoginRefused(err) && (status != 0 || !unreachable(err)):
		return fmt.Sprintf("%s gave no token for %s: see the log of either", p.host(), p.From)
	case p.Step == Manifest && p.Host != "" && LoginRefused(err):
		return fmt.Sprintf("%s, to which %s sends crius for the manifest, refused: it is not sent the credentials for %[2]s; use its own name in that of the image, or have %[2]s answer itself", p.Host, p.From)
	case p.Step == Part && p.Host != "" && refused:
		return fmt.Sprintf("%s, to which %s sends crius for layers, refused: see its log%s", p.Host, p.From, p.sameName())
	case p.Step == Part && kinds(fault.NotFound):
		return fmt.Sprintf("%s has the image's manifest, and not all that it names: push the image again", p.From)
	}
	return ""
}

// Answered reports whether err is about an answer of a Ping or for a Token that came with status 200 or 401.
func (p Point) Answered(err error) bool {
	return (p.Step == Ping || p.Step == Token) && StatusOf(err) == 0 && !LoginRefused(err) && !unreachable(err)
}

// sender returns the registry or mirror that has sent crius to host; empty: none.
func (p Point) sender() string {
	if p.Host == "" {
		return ""
	}
	return p.From
}

// host returns the host that was asked.
func (p Point) host() string {
	if p.Host != "" {
		return p.Host
	}
	return p.From
}

// sameName says what to do about a storage under the name of its registry: HTTP clients send it the
// credentials of the registry, beside the signature in its address, and storages accept one of them alone.
func (p Point) sameName() string {
	name, registry := nameOf(p.Host), nameOf(p.From)
	if name != registry && !strings.HasSuffix(name, "."+registry) {
		return ", and compare the clocks of both"
	}
	return "; with the name of the registry it is sent the credentials for the registry, too: give it another name"
}

// nameOf returns a host without its port.
func nameOf(host string) string {
	if name, _, err := net.SplitHostPort(host); err == nil {
		return name
	}
	return host
}

// PlainHTTP says that a registry with TLS has sent crius to a host without it.
type PlainHTTP struct{ From, Host string }

func (e PlainHTTP) Error() string { return "without TLS" }

// Unwrap returns fault.Denied.
func (PlainHTTP) Unwrap() error { return fault.Denied }

func (e PlainHTTP) advice() string {
	return fmt.Sprintf("%s is asked by TLS and sends crius to plain HTTP: have it name https:// addresses (X-Forwarded-Proto, if a proxy speaks TLS for it), or write to /etc/containers/registries.conf.d/50-insecure.conf: registry = [{location = %q, insecure = true}]", e.From, e.Host)
}

// place is the host at which a request has failed.
type place struct {
	host string
	from string // that has sent crius to host; empty: nobody
}

// placeOf returns where an error of a pull from a registry has arisen.
func placeOf(err error, registry string) place {
	at := pointOf(err)
	found := place{host: registry}
	if at.From != "" {
		found.host = at.From
	}
	asked := at.Host
	var request *url.Error
	if errors.As(err, &request) {
		if u, err := url.Parse(request.URL); err == nil {
			asked = u.Host
		}
	}
	switch {
	case asked == "" || asked == "registry-1.docker.io": // which names and directories call docker.io
		return found
	case asked == at.Host:
		return place{asked, found.host}
	}
	return place{host: asked}
}

// String names the host, and who has sent crius there.
func (p place) String() string {
	if p.from == "" {
		return p.host
	}
	return fmt.Sprintf("%s, to which %s sends crius,", p.host, p.from)
}

// trusts returns the name by which the certificates for connections to the host are found.
func (p place) trusts() string {
	if p.from != "" {
		return p.from
	}
	return p.host
}
