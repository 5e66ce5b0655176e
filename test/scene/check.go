package scene

import (
	"bytes"
	"os"
	"os/exec"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crius-run/crius/test/kit/program"
	"github.com/crius-run/crius/test/kit/wait"
)

// Each runs a test once per handler, as parallel subtests.
func Each(t *testing.T, test func(t *testing.T, handler string)) {
	t.Helper()
	for _, h := range Handlers {
		t.Run(h, func(t *testing.T) {
			t.Parallel()
			test(t, h)
		})
	}
}

// Ask runs a command of the program crius in the node's network and returns its
// output. It asks again if the time limit that the command sets itself has ended
// it: on a busy machine that says nothing about the server.
func (w *World) Ask(t *testing.T, args ...string) (stdout []byte, err error) {
	t.Helper()
	argv := w.Argv(args...)
	wait.For(t, "an answer of crius within its own time limit", func() bool {
		err = w.Do(func() (err error) {
			stdout, err = exec.CommandContext(t.Context(), argv[0], argv[1:]...).Output()
			return err
		})
		return !bytes.Contains(stdout, []byte("no result within "))
	})
	return stdout, err
}

// Receive waits for a value on a channel, or for its end. what names the
// awaited event, as in [wait.For]: "the first stop to return".
func Receive[T any](t *testing.T, what string, c <-chan T) (v T) {
	t.Helper()
	wait.For(t, what, func() bool {
		select {
		case v = <-c:
			return true
		default:
			return false
		}
	})
	return v
}

// WantCode checks that a call was refused with a code and a message that
// contains each of the words.
func WantCode(t *testing.T, err error, code codes.Code, words ...string) {
	t.Helper()
	WantOneOf(t, err, []codes.Code{code}, words...)
}

// WantOneOf is WantCode for cases in which CRI leaves open the code.
func WantOneOf(t *testing.T, err error, allowed []codes.Code, words ...string) {
	t.Helper()
	got := status.Code(err)
	fits := false
	for _, code := range allowed {
		fits = fits || got == code
	}
	if !fits {
		t.Errorf("got %v, want code %v", err, allowed)
		return
	}
	for _, word := range words {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("the message does not say %q: %v", word, err)
		}
	}
}

// Equal compares two values and names what they are.
func Equal[T comparable](t *testing.T, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s is %v, want %v", what, got, want)
	}
}

// Read returns the content of a file.
func Read(t *testing.T, file string) string {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// Write makes or overwrites a file.
func Write(t *testing.T, file, text string) {
	t.Helper()
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// WriteProgram makes or overwrites an executable that can be run at once.
func WriteProgram(t *testing.T, file string, text []byte) {
	t.Helper()
	if err := program.Write(file, text); err != nil {
		t.Fatal(err)
	}
}
