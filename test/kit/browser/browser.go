// Package browser runs a real headless browser, Chromium's, for tests of what
// users see. It controls the browser by the DevTools protocol through pipes.
package browser

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"
)

// Program is in the Debian package of the same name.
const Program = "chromium-headless-shell"

// Tab is a page in its own browser.
type Tab struct {
	t       testing.TB
	to      *os.File
	from    *bufio.Reader
	id      int
	session string

	// Requests are the URLs that the page has requested, blocked or not.
	Requests []string
	// Complaints are the messages on the browser's console, such as about what a
	// policy forbids.
	Complaints []string
}

// message is a message of the protocol in either direction.
type message struct {
	ID      int             `json:"id,omitempty"`
	Session string          `json:"sessionId,omitempty"`
	Method  string          `json:"method,omitempty"`
	Params  any             `json:"params,omitempty"`
	Result  json.RawMessage `json:"result,omitempty"`
	Error   *struct {
		Message string `json:"message"`
	} `json:"error,omitempty"`
}

// Open starts a browser with an empty page, which ends with the test.
func Open(t testing.TB) *Tab {
	t.Helper()
	input, to, err := os.Pipe()
	must(t, err)
	from, output, err := os.Pipe()
	must(t, err)
	cmd := exec.Command(Program, "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--user-data-dir="+t.TempDir())
	cmd.ExtraFiles = []*os.File{input, output} // descriptors 3 and 4
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	must(t, cmd.Start())
	must(t, errors.Join(input.Close(), output.Close(), from.SetReadDeadline(time.Now().Add(5*time.Minute))))
	tab := &Tab{t: t, to: to, from: bufio.NewReader(from)}
	t.Cleanup(func() {
		must(t, errors.Join(to.Close(), from.Close())) // which ends the browser with its children
		hangs := time.AfterFunc(time.Minute, func() { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) })
		_ = cmd.Wait()
		hangs.Stop()
	})
	var target struct{ TargetID, SessionID string }
	tab.call("Target.createTarget", map[string]any{"url": "about:blank"}, &target)
	tab.call("Target.attachToTarget", map[string]any{"targetId": target.TargetID, "flatten": true}, &target)
	tab.session = target.SessionID
	for _, domain := range []string{"Page", "Network", "Log", "Runtime"} {
		tab.call(domain+".enable", nil, nil)
	}
	return tab
}

// Show loads the page at url on a screen of this width in pixels, with the
// reader's choice of colours: light or dark. It waits until everything is
// loaded.
func (tab *Tab) Show(url string, width int, colours string) {
	tab.t.Helper()
	tab.call("Emulation.setDeviceMetricsOverride", map[string]any{"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}, nil)
	tab.call("Emulation.setEmulatedMedia", map[string]any{"features": []any{map[string]any{"name": "prefers-color-scheme", "value": colours}}}, nil)
	tab.call("Page.navigate", map[string]any{"url": url}, nil)
	for tab.next().Method != "Page.loadEventFired" {
	}
}

// Evaluate stores the value of a JavaScript expression in result.
func (tab *Tab) Evaluate(expression string, result any) {
	tab.t.Helper()
	var answer struct {
		Result struct {
			Value json.RawMessage
		}
		ExceptionDetails json.RawMessage
	}
	tab.call("Runtime.evaluate", map[string]any{"expression": expression, "returnByValue": true}, &answer)
	if answer.ExceptionDetails != nil {
		tab.t.Fatalf("%s: %s", expression, answer.ExceptionDetails)
	}
	must(tab.t, json.Unmarshal(answer.Result.Value, result))
}

func (tab *Tab) call(method string, params, result any) {
	tab.t.Helper()
	tab.id++
	text, err := json.Marshal(message{ID: tab.id, Session: tab.session, Method: method, Params: params})
	must(tab.t, err)
	_, err = tab.to.Write(append(text, 0))
	must(tab.t, err)
	for {
		m := tab.next()
		if m.ID != tab.id {
			continue
		}
		if m.Error != nil {
			tab.t.Fatalf("%s: %s", method, m.Error.Message)
		}
		if result != nil {
			must(tab.t, json.Unmarshal(m.Result, result))
		}
		return
	}
}

// next returns the browser's next message. It records what a test may ask for.
func (tab *Tab) next() message {
	tab.t.Helper()
	text, err := tab.from.ReadBytes(0)
	must(tab.t, err)
	var params struct {
		Request struct{ URL string }
		Entry   struct{ Text string }
		Type    string
	}
	m := message{Params: &params}
	must(tab.t, json.Unmarshal(text[:len(text)-1], &m))
	switch m.Method {
	case "Network.requestWillBeSent":
		tab.Requests = append(tab.Requests, params.Request.URL)
	case "Log.entryAdded":
		tab.Complaints = append(tab.Complaints, params.Entry.Text)
	case "Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Page.javascriptDialogOpening":
		tab.Complaints = append(tab.Complaints, fmt.Sprint(m.Method, " ", params.Type))
	}
	return m
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
