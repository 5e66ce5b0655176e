package pulls

import (
	"context"
	"encoding/base64"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/terminal"
	"github.com/crius-run/crius/test/kit/wait"
)

// pullWith runs a pull with these flags and input and returns the credentials that the
// server receives.
func pullWith(t *testing.T, stdin string, args ...string) (*cri.AuthConfig, error) {
	t.Helper()
	s := &server{end: make(chan error, 1)}
	s.end <- nil
	cmd := PullCommand(s.serve(t))
	cmd.SetIn(strings.NewReader(stdin))
	var out, errs strings.Builder
	err := run(t.Context(), cmd, &out, &errs, args...)
	return s.auth.Load(), err
}

func TestCredentialsOfPull(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "auth.json")
	basic := func(text string) string { return base64.StdEncoding.EncodeToString([]byte(text)) }
	text := fmt.Sprintf(`{"auths": {"r.test": {"auth": %q}, "r.test/team": {"auth": %q}}}`, basic("all:a"), basic("team:b"))
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		stdin string
		args  []string
		want  string // user, password and registry; empty: none are given
		err   string
	}{
		{"", []string{"app"}, "", ""},
		{"", []string{"--creds=me:a:b", "r.test/app"}, "me a:b r.test", ""},
		{"secret\r\n", []string{"--creds=me", "--password-stdin", "r.test:5000/app:1"}, "me secret r.test:5000", ""},
		{" two\nlines", []string{"--creds=me", "--password-stdin", "r.test/app"}, "me  two\nlines r.test", ""},
		{"", []string{"--auth-file=" + file, "r.test/app"}, "all a r.test", ""},
		{"", []string{"--auth-file=" + file, "r.test/team/app"}, "team b r.test", ""},

		{"", []string{"--auth-file=" + file, "other.test/app"}, "", "no credentials for other.test/app"},
		{"", []string{"--auth-file=" + file + "x", "r.test/app"}, "", "no such file"},
		{"", []string{"--auth-file=" + file, "--creds=me:x", "r.test/app"}, "", "none of the others can be"},
		{"", []string{"--creds=", "r.test/app"}, "", "--creds is empty"},
		{"x", []string{"--creds=", "--password-stdin", "r.test/app"}, "", "--creds is empty"},
		{"", []string{"--auth-file=", "r.test/app"}, "", "--auth-file is empty"},
		{"", []string{"--creds=me:x", "app"}, "", "credentials need a name with its registry, such as docker.io/library/app"},
		{"", []string{"--creds=me:x", "team/app"}, "", "such as docker.io/team/app"},
		{"", []string{"--creds=me:x", "R.test/UP"}, "", "repository name must be lowercase"},
		{"", []string{"--creds=:x", "r.test/app"}, "", "no user"},
		{"", []string{"--creds=me:", "r.test/app"}, "", "the password is empty"},
		{"\n", []string{"--creds=me", "--password-stdin", "r.test/app"}, "", "the password is empty"},
		{"x", []string{"--creds=me:x", "--password-stdin", "r.test/app"}, "", "leave it out"},
		{"x", []string{"--password-stdin", "r.test/app"}, "", "needs --creds"},
		{"x", []string{"--creds=me", "r.test/app"}, "", "no terminal to ask for the password on: use --password-stdin"},
		{strings.Repeat("x", 64<<10+1), []string{"--creds=me", "--password-stdin", "r.test/app"}, "", "more than 65536 bytes"},
	} {
		auth, err := pullWith(t, c.stdin, c.args...)
		if c.err != "" {
			if err == nil || !strings.Contains(err.Error(), c.err) || auth != nil {
				t.Errorf("%q: %v, want %q", c.args, err, c.err)
			}
			continue
		}
		got := ""
		if auth != nil {
			got = fmt.Sprint(auth.Username, " ", auth.Password, " ", auth.ServerAddress)
		}
		if err != nil || got != c.want {
			t.Errorf("%q: %q, %v, want %q", c.args, got, err, c.want)
		}
	}
}

func echoes(t *testing.T, term *terminal.Terminal) bool {
	t.Helper()
	state, err := unix.IoctlGetTermios(int(term.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	return state.Lflag&unix.ECHO != 0
}

// The password is not shown, and the terminal is restored even if the prompt is
// interrupted.
func TestPasswordIsAskedFor(t *testing.T) {
	t.Parallel()
	s := &server{end: make(chan error, 1)}
	s.end <- nil
	load := s.serve(t)
	ask := func(ctx context.Context, term *terminal.Terminal) <-chan error {
		cmd := PullCommand(load)
		cmd.SetIn(term.File)
		ended := make(chan error, 1)
		var out strings.Builder
		go func() { ended <- run(ctx, cmd, &out, term.File, "--creds=me", "r.test/app") }()
		wait.For(t, "the question", func() bool { return strings.HasSuffix(term.Shown(), "password of me at r.test: ") })
		wait.For(t, "the echo to be off", func() bool { return !echoes(t, term) })
		return ended
	}
	term := terminal.Open(t)
	ended := ask(t.Context(), term)
	term.Type(t, "secret\n")
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if auth := s.auth.Load(); auth.GetUsername() != "me" || auth.GetPassword() != "secret" {
		t.Errorf("the server gets user %q with password %q", auth.GetUsername(), auth.GetPassword())
	}
	if strings.Contains(term.Shown(), "secret") || !echoes(t, term) {
		t.Errorf("the terminal shows %q, and echoes: %v", term.Shown(), echoes(t, term))
	}

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	term = terminal.Open(t)
	ended = ask(ctx, term)
	cancel()
	if err := <-ended; err == nil || !strings.Contains(err.Error(), "interrupted") || !echoes(t, term) {
		t.Errorf("given up: %v, echo %v", err, echoes(t, term))
	}
}
