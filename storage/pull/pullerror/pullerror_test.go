package pullerror

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/docker/distribution/registry/api/errcode"
	registryv2 "github.com/docker/distribution/registry/api/v2"
	"go.podman.io/image/v5/docker"
	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/signature"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/registry/trust"
)

func TestKinds(t *testing.T) {
	status := func(code int) error { return docker.UnexpectedHTTPStatusError{StatusCode: code} }
	for _, test := range []struct {
		err  error
		want []error
	}{
		{errors.New("something"), nil},
		{context.Canceled, []error{context.Canceled}},
		{fmt.Errorf("%w: %w", fault.Timeout, errors.New("stalled")), []error{fault.Timeout}},
		{signature.PolicyRequirementError("no"), []error{fault.Denied, trust.ErrSignature}},
		{fmt.Errorf("%w: %w: x", trust.ErrSignature, fault.Precondition), []error{fault.Precondition, trust.ErrSignature}},
		{fmt.Errorf("%w: %w", ErrWorkerDied, fault.Unavailable), []error{fault.Unavailable, ErrWorkerDied}},
		{docker.ErrUnauthorizedForCredentials{Err: errors.New("no")}, []error{fault.Unauthenticated}},
		{errcode.ErrorCodeUnauthorized.WithMessage("no"), []error{fault.Unauthenticated}},
		{errcode.ErrorCodeDenied, []error{fault.Denied}},
		{errcode.ErrorCodeTooManyRequests, []error{fault.Unavailable}},
		{registryv2.ErrorCodeManifestUnknown.WithDetail("x"), []error{fault.NotFound}},
		{registryv2.ErrorCodeNameUnknown, []error{fault.NotFound}},
		{registryv2.ErrorCodeBlobUnknown, []error{fault.NotFound}},
		{errcode.ErrorCodeUnknown.WithMessage("no"), []error{fault.Denied}},
		{errcode.Error{Message: "File not found."}, []error{fault.NotFound}},
		{errcode.ErrorCode(0), []error{fault.Denied}},
		{docker.ErrTooManyRequests, []error{fault.Unavailable}},
		{status(404), []error{fault.NotFound}},
		{status(401), []error{fault.Unauthenticated}},
		{status(403), []error{fault.Denied}},
		{status(407), []error{fault.Unavailable}},
		{&url.Error{Op: "Get", URL: "http://a", Err: PlainHTTP{From: "a", Host: "b"}}, []error{fault.Denied}},
		{status(502), []error{fault.Unavailable}},
		{status(418), []error{fault.Denied}},
		{status(410), []error{fault.NotFound}},
		{status(408), []error{fault.Unavailable}},
		{status(302), []error{fault.Unavailable}},
		{status(204), []error{fault.Unavailable}},
		{registryv2.ErrorCodeNameInvalid.WithMessage("no"), []error{fault.Invalid}},
		{registryv2.ErrorCodeDigestInvalid, []error{fault.Denied}},
		{&url.Error{Op: "Get", URL: "https://a", Err: x509.UnknownAuthorityError{}}, []error{fault.Unavailable}},
		{&net.OpError{Op: "dial", Err: os.NewSyscallError("connect", unix.ECONNREFUSED)}, []error{fault.Unavailable}},
		{&os.PathError{Op: "write", Path: "/x", Err: unix.ENOSPC}, []error{fault.Exhausted, unix.ENOSPC}},
		{&os.PathError{Op: "open", Path: "/x", Err: unix.EROFS}, nil},
		{fmt.Errorf("read: %w", unix.ECONNRESET), []error{fault.Unavailable}},
	} {
		got := Kinds(fmt.Errorf("some step: %w", test.err))
		if !slices.Equal(got, test.want) {
			t.Errorf("%T %v: %v, want %v", test.err, test.err, got, test.want)
		}
	}
}

// Each failure is told to those who can do something about it: no disk to the registry's operator,
// no certificate to the network's.
func TestAdvice(t *testing.T) {
	const login = "user x was refused"
	get := func(err error) error { return &url.Error{Op: "Get", URL: "https://mirror.example:5000/v2/", Err: err} }
	advices := []string{
		"log in by image.auth_file, or use a mirror", "the registry itself failed", login, "check the name and the tag",
		"mirror.example:5000 speaks plain HTTP", "/etc/containers/certs.d/mirror.example:5000/ca.crt", "that its certificate is for",
		"the node's clock", "the node's name servers", "its route, proxy and firewall", "check the disk of the image store", "free space in the image store",
	}
	for _, test := range []struct {
		err  error
		want string
	}{
		{docker.ErrTooManyRequests, advices[0]},
		{errcode.ErrorCodeTooManyRequests.WithMessage("toomanyrequests: You have reached your pull rate limit"), advices[0]},
		{docker.UnexpectedHTTPStatusError{StatusCode: 429}, advices[0]},
		{docker.UnexpectedHTTPStatusError{StatusCode: 503}, advices[1]},
		{docker.UnexpectedHTTPStatusError{StatusCode: 403}, login},
		{docker.ErrUnauthorizedForCredentials{Err: errors.New("no")}, login},
		{errcode.ErrorCodeDenied.WithMessage("requested access to the resource is denied"), login},
		{registryv2.ErrorCodeManifestUnknown, advices[3]},
		{get(http.ErrSchemeMismatch), advices[4]},
		{get(&tls.CertificateVerificationError{Err: x509.UnknownAuthorityError{}}), advices[5]},
		{get(&tls.CertificateVerificationError{Err: x509.HostnameError{Certificate: new(x509.Certificate), Host: "a"}}), advices[6]},
		{get(&tls.CertificateVerificationError{Err: x509.CertificateInvalidError{Reason: x509.Expired}}), advices[7]},
		{get(&net.OpError{Op: "dial", Err: &net.DNSError{Err: "no such host", Name: "a", IsNotFound: true}}), advices[8]},
		{get(&net.OpError{Op: "dial", Err: os.NewSyscallError("connect", unix.EHOSTUNREACH)}), advices[9]},
		{&os.PathError{Op: "open", Path: "/x", Err: unix.EROFS}, advices[10]},
		{&os.PathError{Op: "write", Path: "/x", Err: unix.EIO}, advices[10]},
		{&os.PathError{Op: "write", Path: "/x", Err: unix.ENOSPC}, advices[11]},
		{fmt.Errorf("no process can be started: %w", fault.Exhausted), ""},
		{fmt.Errorf("%w: %w", ErrWorkerDied, fault.Unavailable), ""},
		{fmt.Errorf("%w: %w", trust.ErrSignature, fault.Denied), ""},
	} {
		name, err := reference.ParseNormalizedNamed("registry.example/app:1")
		if err != nil {
			t.Fatal(err)
		}
		said := New(Failed{Name: name, Login: login}, fmt.Errorf("some step: %w", test.err)).Error()
		for _, advice := range advices {
			if strings.Contains(said, advice) != (advice == test.want) {
				t.Errorf("%T: %q, want the advice %q", test.err, said, test.want)
			}
		}
	}
}

// What a point of the pull knows decides before what the error alone looks like.
func TestAdviceAtAPoint(t *testing.T) {
	const login = "user x was refused"
	status := func(code int) error { return docker.UnexpectedHTTPStatusError{StatusCode: code} }
	unknown := &url.Error{Op: "Get", URL: "https://blobs.example/x?sig=1", Err: &tls.CertificateVerificationError{Err: x509.UnknownAuthorityError{}}}
	part := Point{Step: Part, Host: "blobs.example", From: "registry.example"}
	for _, test := range []struct {
		at   Point
		err  error
		want string
	}{
		{Point{Step: Ping, From: "registry.example"}, status(404), "registry.example does not answer as a registry"},
		{Point{Step: Ping, From: "registry.example"}, status(403), "registry.example does not answer as a registry"},
		{Point{Step: Ping, From: "registry.example", Plain: true}, status(400), "registry.example speaks TLS"},
		{Point{Step: Ping, From: "registry.example"}, status(429), "the registry limits pulls"},
		{Point{Step: Ping, Host: "login.example", From: "registry.example"}, status(403), "login.example, to which registry.example sends crius, does not answer as a registry"},
		{Point{Step: Login, From: "registry.example", Schemes: []string{"negotiate", "ntlm"}}, status(401), "registry.example wants a login by negotiate or ntlm, and crius"},
		{Point{Step: Login, From: "registry.example"}, status(401), "names no way to log in"},
		{Point{Step: Token, Host: "auth.example", From: "registry.example"}, status(400), "auth.example gave no token for registry.example"},
		{Point{Step: Token, Host: "auth.example", From: "registry.example"}, status(401), login},
		{Point{Step: Token, From: "registry.example"}, errors.New("no JSON"), "registry.example gave no token"},
		{Point{Step: Manifest, From: "registry.example"}, status(404), "check the name and the tag"},
		{Point{Step: Manifest, From: "registry.example"}, status(403), login},
		{Point{Step: Manifest, Host: "other.example", From: "registry.example"}, status(401), "other.example, to which registry.example sends crius for the manifest, refused"},
		{Point{Step: Manifest, From: "registry.example"}, errcode.ErrorCode(0), "registry.example refused it without a code that says why"},
		{Point{Step: Choice}, fault.NotFound, "build the image for the node's processor"},
		{Point{Step: Part, From: "registry.example"}, status(404), "registry.example has the image's manifest"},
		{Point{Step: Part, From: "registry.example"}, status(403), login},
		{part, status(403), "blobs.example, to which registry.example sends crius for layers, refused: see its log, and compare the clocks"},
		{Point{Step: Part, Host: "registry.example:9000", From: "registry.example"}, status(400), "give it another name"},
		{Point{Step: Part, Host: "s3.registry.example", From: "registry.example"}, status(400), "give it another name"},
		{part, status(503), "blobs.example, to which registry.example sends crius, failed"},
		{part, unknown, "/etc/containers/certs.d/registry.example/ca.crt"},
	} {
		name, err := reference.ParseNormalizedNamed("registry.example/app:1")
		if err != nil {
			t.Fatal(err)
		}
		said := New(Failed{Name: name, Login: login}, fmt.Errorf("some step: %w", At(test.at, test.err))).Error()
		if !strings.Contains(said, test.want) {
			t.Errorf("%+v, %v: %q, want %q", test.at, test.err, said, test.want)
		}
	}
}

// What a proxy answers to CONNECT is told from what net/http does not follow, which looks like it.
func TestProxiesThatRefuse(t *testing.T) {
	t.Parallel()
	name, err := reference.ParseNormalizedNamed("registry.example/app:1")
	if err != nil {
		t.Fatal(err)
	}
	get := func(text string) error {
		return &url.Error{Op: "Get", URL: "https://blobs.example/x", Err: errors.New(text)}
	}
	for text, want := range map[string]string{
		"Proxy Authentication Required":       "node and registry wants a login",
		"Forbidden":                           "refused to connect crius to blobs.example: ",
		"stopped after 10 redirects":          "that it cannot ask",
		"unsupported protocol scheme \"ftp\"": "that it cannot ask",
		"http: no Host in request URL":        "that it cannot ask",
		"net/http: HTTP/1.x transport connection broken: malformed MIME header: missing colon: \"X Y\"": "answers with broken HTTP",
		"net/http: HTTP/1.x transport connection broken: unsupported transfer encoding: \"identity\"":   "answers with broken HTTP",
		"malformed HTTP response \"\\x00\"":                                  "answers with broken HTTP",
		"net/http: HTTP/1.x transport connection broken: something":          "check that the node reaches",
		"net/http: server response headers exceeded 10485760 bytes; aborted": "answers with broken HTTP",
		"something new": "check that the node reaches the registry",
	} {
		if got := New(Failed{Name: name}, get(text)); !strings.Contains(got.Error(), want) || !errors.Is(got, fault.Unavailable) {
			t.Errorf("%q: %v, want %q", text, got, want)
		}
	}
}

// Signatures and tokens in addresses are hidden however the address is written, and the rest is not.
func TestRedactAddresses(t *testing.T) {
	t.Parallel()
	const escaped = `\/`
	for text, want := range map[string]string{
		`Get "https://u:pw@h/x?sig=secret": EOF`:                                     `Get "https://h/x?<redacted>": EOF`,
		`Get "https://h/x?name*=UTF-8''a.tar&sig=secret": EOF`:                       `Get "https://h/x?<redacted>": EOF`,
		`Get "https://h/x?name=\"a b<>\"&sig=secret": EOF`:                           `Get "https://h/x?<redacted>": EOF`,
		`from https://h/x?name*=UTF-8''a.tar&sig=secret it`:                          `from https://h/x?<redacted> it`,
		`{"url":"https:` + escaped + escaped + `u:pw@h` + escaped + `x?sig=secret"}`: `{"url":"https://h/x?<redacted>"}`,
		`begins with "{\"url\":\"https:\\/\\/u:pw@h\\/x?sig=secret\"}"; see`:         `begins with "{\"url\":\"https://h/x?<redacted>\"}"; see`,
		`begins with "<a href=\"https://h/x\">Log in</a>"; see`:                      `begins with "<a href=\"https://h/x\">Log in</a>"; see`,
		`Location header "//u:pw@h/x?sig=secret": parse "/%zz?sig=secret": no`:       `Location header "//h/x?<redacted>": parse "/%zz?<redacted>": no`,
		`Location header "/x?name=\"a b<>\"&sig=secret": no`:                         `Location header "/x?<redacted>": no`,
		`to /x?download&sig=secret, /x?a[]=b&sig=secret`:                             `to /x?<redacted> /x?<redacted>`,
		`cannot open "/etc/a b%"`:                                                    `cannot open "/etc/a b%"`,
		`<a href=/login?next=a&token=secret>`:                                        `<a href=/login?<redacted>>`,
		`is it "latest"? No: 1?2`:                                                    `is it "latest"? No: 1?2`,
	} {
		if got := Redact(text); got != want || Redact(got) != got {
			t.Errorf("%s\nis %s\nnot %s", text, got, want)
		}
	}
}

func FuzzRedact(f *testing.F) {
	f.Add("Get \"https://u:p@h/x?y=z\": Basic dXNlcjpwYXNz", "p4ssw0rd")
	f.Fuzz(func(t *testing.T, text, password string) {
		if len(password) < 8 || strings.ContainsAny(password, " \t\n\"'<>@/?#:%") {
			return
		}
		raw := (&url.URL{Scheme: "https", User: url.UserPassword("u", password), Host: "h", Path: "/p", RawQuery: "t=" + url.QueryEscape(password)}).String()
		got := Redact("error: " + raw + " " + strings.ReplaceAll(text, password, ""))
		if strings.Contains(got, password) && !strings.Contains(strings.ReplaceAll(text, password, ""), password) && !strings.Contains("error: https://h/p?<redacted> ", password) {
			t.Errorf("%q shows %q", got, password)
		}
		if Cut(got) != got && len(Cut(got)) > 2*maxText {
			t.Errorf("%d bytes", len(Cut(got)))
		}
	})
}

func TestWarningIsSafeToShow(t *testing.T) {
	t.Parallel()
	for _, c := range [][2]string{
		{"this repository moves to r.test/new", "this repository moves to r.test/new"},
		{"a\x1b[2J\tb\u202e  c\xff", "a [2J b c\uFFFD"},
		{"ask https://u:pw@r.test/x?token=abc, swordfish", "ask https://r.test/x?<redacted> <redacted>"},
		{strings.Repeat("é", 5000), strings.Repeat("é", 128) + "..."},
	} {
		if got := Warning(c[0], []string{"swordfish"}); got != c[1] {
			t.Errorf("%q, want %q", got, c[1])
		}
	}
}
