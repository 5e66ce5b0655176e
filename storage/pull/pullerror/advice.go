package pullerror

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"github.com/docker/distribution/registry/api/errcode"
	"go.podman.io/image/v5/docker"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
)

// advice tells the operator what to do about the failure of a pull from a registry; empty if the
// error says so itself, as those of fault.Invalid, fault.Precondition and ErrWorkerDied do.
func advice(registry string, err error, kinds []error, login string) string {
	is := func(kind error) bool { return slices.Contains(kinds, kind) }
	var plain PlainHTTP
	var explained explainedError
	var coded errcode.ErrorCoder
	switch by := pointOf(err).advise(err, is); {
	case errors.Is(err, ErrWorkerDied), errors.As(err, &explained):
		return ""
	case errors.As(err, &plain):
		return plain.advice()
	case wantsProxyLogin(err):
		return "a proxy or the network between node and registry wants a login: give HTTPS_PROXY in the environment of crius a user and password, or exempt the registry by NO_PROXY"
	case rateLimited(err):
		return "the registry limits pulls: log in by image.auth_file, or use a mirror" // the node has reached it
	case by != "":
		return by
	case LoginRefused(err):
		return orPage(login, err)
	case is(fault.NotFound):
		return orPage("check the name and the tag", err)
	case errors.As(err, &coded) && uncoded(coded), StatusOf(err) >= http.StatusBadRequest && StatusOf(err) < http.StatusInternalServerError:
		return orPage(fmt.Sprintf("%s refused it without a code that says why: check the name and the credentials, and its log for a policy, such as one about vulnerable images", placeOf(err, registry)), err)
	case errors.As(err, &coded):
		return fmt.Sprintf("%s refuses requests like this one: check the name and the tag, and its log", placeOf(err, registry))
	case StatusOf(err) != 0 && StatusOf(err) < http.StatusBadRequest:
		return noAnswer(placeOf(err, registry), StatusOf(err))
	case unfollowed(err):
		return fmt.Sprintf("%s sends crius to an address that it cannot ask, or from one to the next without end: see its log, and that of a proxy before it", cmp.Or(pointOf(err).From, registry))
	case errors.Is(err, gzip.ErrHeader):
		return fmt.Sprintf("%s, or a proxy before it, says that the answer is compressed (Content-Encoding: gzip), and it is not: correct its configuration", placeOf(err, registry).host)
	case brokenHTTP(err):
		return fmt.Sprintf("%s, or a proxy before it, answers with broken HTTP: check the name and the port, and the log of both", placeOf(err, registry).host)
	case unsentToken(err):
		return fmt.Sprintf("the token for %s has a line break or the like in it, and cannot be sent: correct the pull secret, or see the log of the server of tokens", placeOf(err, registry).host)
	case is(fault.Unavailable):
		return unavailable(placeOf(err, registry), err)
	case fault.DiskFull(err): // other errors of fault.Exhausted say what is used up
		return "free space in the image store"
	case errors.Is(err, unix.EROFS), errors.Is(err, unix.EIO):
		return "check the disk of the image store: the kernel log says what is wrong with it"
	}
	return ""
}

// noAnswer says what to do about a host whose answer has a status below 400 that is none of a registry's.
func noAnswer(at place, status int) string {
	const see = "see its log, and that of a proxy before it"
	switch status {
	case http.StatusMovedPermanently, http.StatusFound, http.StatusSeeOther, http.StatusTemporaryRedirect, http.StatusPermanentRedirect:
		return fmt.Sprintf("%s redirects crius without saying where (the answer has no Location): %s", at, see)
	}
	return fmt.Sprintf("%s answers a pull with a status that registries do not use for it: %s", at, see)
}

// unavailable says what to do about a host that cannot be used, by the reason that the error has for
// it. Only a node without a way to the host is told to look for one.
func unavailable(at place, err error) string {
	var authority x509.UnknownAuthorityError
	var name x509.HostnameError
	var certificate x509.CertificateInvalidError
	var dns *net.DNSError
	var operation *net.OpError
	var address *net.AddrError
	var noTLS tls.RecordHeaderError
	switch {
	case errors.As(err, &operation) && operation.Op == "proxyconnect":
		return "the proxy does not let crius through: correct HTTPS_PROXY or HTTP_PROXY in the environment of crius, or exempt the registry by NO_PROXY"
	case refusedByProxy(err) != 0:
		return fmt.Sprintf("the proxy of HTTPS_PROXY refused to connect crius to %s: see its log and allow that, or exempt the host by NO_PROXY", at.host)
	case errors.Is(err, http.ErrSchemeMismatch) && at.from != "":
		return fmt.Sprintf("%s speaks plain HTTP: correct the address in the configuration of %s", at, at.from)
	case errors.Is(err, http.ErrSchemeMismatch):
		return fmt.Sprintf("%s speaks plain HTTP: if it is meant to, write to /etc/containers/registries.conf.d/50-insecure.conf: registry = [{location = %q, insecure = true}]; or begin its URL in hosts.toml with http://", at.host, at.host)
	case errors.As(err, &authority):
		return fmt.Sprintf("to trust the authority, write its certificate to /etc/containers/certs.d/%s/ca.crt", at.trusts())
	case errors.As(err, &name):
		return "use a name of the registry that its certificate is for, or have the certificate extended"
	case errors.As(err, &certificate):
		return "correct the registry's certificate; if it should be valid, check the node's clock"
	case errors.As(err, &noTLS):
		return fmt.Sprintf("%s speaks neither TLS nor HTTP: check the name and the port", at)
	case errors.As(err, &operation) && operation.Op == "remote error" && alertOf(operation.Err) == noCommonVersion:
		return fmt.Sprintf("%s speaks only older versions of TLS than 1.2, the oldest that crius accepts: update it", at)
	case operation != nil && operation.Op == "remote error": // another alert of TLS
		return fmt.Sprintf("%s refused the TLS connection: if it wants a client certificate, check client.cert and client.key in /etc/containers/certs.d/%s", at, at.trusts())
	case errors.As(err, &address):
		return "check the name and the port of the registry"
	case errors.As(err, &dns) && at.from != "":
		return fmt.Sprintf("check the node's name servers, and the configuration of %s, which sends crius to %s", at.from, at.host)
	case errors.As(err, &dns):
		return "check the name of the registry, and the node's name servers"
	case StatusOf(err) >= http.StatusInternalServerError && at.from != "":
		return fmt.Sprintf("%s failed: see its log; the kubelet tries again", at)
	case StatusOf(err) >= http.StatusInternalServerError:
		return "the registry itself failed: see its log; the kubelet tries again"
	case errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Sprintf("%s, or a proxy between it and the node, broke off its answer: see their logs; the kubelet tries again", strings.TrimSuffix(at.String(), ","))
	case at.from != "":
		return fmt.Sprintf("check that the node reaches %s: its route, proxy and firewall", strings.TrimSuffix(at.String(), ","))
	}
	return "check that the node reaches the registry: its route, proxy and firewall"
}

// noCommonVersion is the alert of TLS "protocol version".
const noCommonVersion = 70

// alertOf returns an alert of TLS, whose type is not exported; 0 for anything else.
func alertOf(err error) uint64 {
	if v := reflect.ValueOf(err); v.IsValid() && v.Kind() == reflect.Uint8 {
		return v.Uint()
	}
	return 0
}

// givenUp is how net/http's errors begin if it does not follow an address. They have no types.
var givenUp = regexp.MustCompile(`^(stopped after \d+ redirects|unsupported protocol scheme|\d+ response missing Location header|failed to parse Location header|http: no Host in request URL)`)

// unfollowed reports whether net/http has given up a request without having failed to reach a host: it asks no
// scheme but HTTP, and follows ten redirects at most.
func unfollowed(err error) bool {
	var request *url.Error
	return errors.As(err, &request) && request.Err != nil && (request.Op == "parse" || givenUp.MatchString(request.Err.Error()))
}

// unparsed is how net/http's errors begin if it cannot parse an answer. They have no types.
var unparsed = regexp.MustCompile(`^(net/http: HTTP/1\.x transport connection broken: )?(malformed |bad Content-Length|unsupported transfer encoding|too many transfer encodings|http: message cannot contain|net/http: server response headers exceeded)`)

// brokenHTTP reports whether an answer has come that net/http cannot parse: its headers, or something that is no
// HTTP at all.
func brokenHTTP(err error) bool {
	var request *url.Error
	return errors.As(err, &request) && request.Err != nil && unparsed.MatchString(request.Err.Error())
}

// unsentToken reports whether net/http has refused to send a token.
func unsentToken(err error) bool {
	var request *url.Error
	return errors.As(err, &request) && request.Err != nil && request.Err.Error() == `net/http: invalid header field value for "Authorization"`
}

// refusedByProxy returns the status with which a proxy has refused to connect to a host; 0: none has. net/http has
// no type for it: the error is the text that comes with the status.
func refusedByProxy(err error) int {
	var request *url.Error
	if !errors.As(err, &request) || request.Err == nil || !strings.HasPrefix(request.URL, "https:") {
		return 0
	}
	for status := http.StatusBadRequest; status < 600; status++ {
		if text := http.StatusText(status); text != "" && request.Err.Error() == text {
			return status
		}
	}
	return 0
}

// orPage returns advice on a refusal, and doubts it if it has come as a web page: registries send JSON, others in
// their place pages.
func orPage(advice string, err error) string {
	const doubt = "look for what answers in the registry's place, since the answer is a web page"
	switch {
	case !bytes.HasPrefix(bytes.TrimSpace(responseOf(err)), []byte("<")):
		return advice
	case advice == "": // mirrors get other credentials
		return doubt
	}
	return advice + "; or " + doubt
}

// LoginRefused reports whether a registry has refused a request for its credentials, or for the
// lack of any.
func LoginRefused(err error) bool {
	var unauthorized docker.ErrUnauthorizedForCredentials
	var coded errcode.ErrorCoder
	switch {
	case errors.As(err, &unauthorized):
		return true
	case errors.As(err, &coded):
		code := coded.ErrorCode()
		return code == errcode.ErrorCodeUnauthorized || code == errcode.ErrorCodeDenied
	}
	status := StatusOf(err)
	return status == http.StatusUnauthorized || status == http.StatusForbidden
}

// Unauthenticated reports whether a registry has refused who asks, not what is asked for.
func Unauthenticated(err error) bool {
	var coded errcode.ErrorCoder
	if errors.As(err, &coded) {
		return coded.ErrorCode() == errcode.ErrorCodeUnauthorized
	}
	var unauthorized docker.ErrUnauthorizedForCredentials
	return errors.As(err, &unauthorized) || StatusOf(err) == http.StatusUnauthorized
}

// wantsProxyLogin reports whether something between the node and the registry has refused a request.
func wantsProxyLogin(err error) bool {
	status := cmp.Or(refusedByProxy(err), StatusOf(err))
	return status == http.StatusProxyAuthRequired || status == http.StatusNetworkAuthenticationRequired
}

// rateLimited reports whether the registry has refused a request because there were too many.
func rateLimited(err error) bool {
	var coded errcode.ErrorCoder
	return errors.Is(err, docker.ErrTooManyRequests) || errors.Is(err, ErrThrottled) ||
		errors.As(err, &coded) && coded.ErrorCode() == errcode.ErrorCodeTooManyRequests ||
		StatusOf(err) == http.StatusTooManyRequests
}
