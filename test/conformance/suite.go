package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"time"

	"github.com/crius-run/crius/internal/testkit/node"
	"github.com/crius-run/crius/internal/testkit/tools"
)

// limit is how long one run of the suite may take; usual are some minutes.
const limit = time.Hour

// suite is what each run needs.
type suite struct {
	critest string // the program as it was built
	images  *images
	focus   string    // a regular expression; empty: everything
	log     io.Writer // takes the suite's own output
}

// run runs the suite once with a runtime handler, on a node of its own.
func (s *suite) run(ctx context.Context, handler string) (_ *result, err error) {
	config, err := configure(ctx, handler)
	if err != nil {
		return nil, err
	}
	n, err := node.New(ctx, node.Options{Config: config})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	if err := remap(n); err != nil {
		return nil, err
	}
	s.images.push(n.Registry)
	if err := s.install(n.Path("critest")); err != nil {
		return nil, err
	}
	if err := n.Start(ctx); err != nil {
		return nil, err
	}
	r, err := s.critestOn(ctx, n, handler)
	if err != nil {
		return nil, fmt.Errorf("%w\nend of the server's log:\n%s", err, n.LogTail(20))
	}
	if err := n.Stop(); err != nil {
		r.fail("the server at its end", err.Error())
	}
	for _, fault := range n.Faults() {
		r.fail("the server's log", fault)
	}
	return r, nil
}

// currentRunc is the handler of a current runc, beside Debian's.
const currentRunc = "runc-current"

// configure is what the node needs to be told for a handler.
func configure(ctx context.Context, handler string) (string, error) {
	if handler != currentRunc {
		return "", nil
	}
	path, err := tools.Runc(ctx)
	return fmt.Sprintf("[runtime.handlers.%s]\npath = %q\n", currentRunc, path), err
}

// install copies the suite, and on the way gives it the digest of an image
// that exists: it pulls one by a digest which no image built here can have.
func (s *suite) install(path string) error {
	program, err := os.ReadFile(s.critest)
	if err != nil {
		return err
	}
	if !bytes.Contains(program, []byte(suiteDigest)) {
		return fmt.Errorf("%s does not contain the digest %s: is it another version?", s.critest, suiteDigest)
	}
	program = bytes.ReplaceAll(program, []byte(suiteDigest), []byte(s.images.digest.Digest().Encoded()))
	return os.WriteFile(path, program, 0o755)
}

// critestOn runs the suite in the node's network, since it connects to pods
// and to ports of the host, and below the node's directory, so that nothing of
// it stays.
func (s *suite) critestOn(ctx context.Context, n *node.Node, handler string) (*result, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	tmp, report := n.Path("suite"), n.Path("report.json")
	if err := os.Mkdir(tmp, 0o755); err != nil {
		return nil, err
	}
	before, err := segments()
	if err != nil {
		return nil, err
	}
	args := []string{
		"-runtime-endpoint", "unix://" + n.Socket(),
		"-image-endpoint", "unix://" + n.Socket(),
		"-runtime-handler", handler,
		"-config", n.Path("none"),
		"-ginkgo.seed", "1",
		"-ginkgo.no-color",
		"-ginkgo.json-report", report,
	}
	if s.focus != "" {
		args = append(args, "-ginkgo.focus", s.focus)
	}
	cmd := exec.CommandContext(ctx, n.Path("critest"), args...)
	cmd.Dir = tmp
	cmd.Env = append(os.Environ(), "TMPDIR="+tmp)
	cmd.Stdout, cmd.Stderr = s.log, s.log
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGINT) }
	cmd.WaitDelay = 30 * time.Second
	runErr := n.Do(cmd.Run) // not the report: that counts
	removeErr := removeSegments(before)
	data, err := os.ReadFile(report)
	if err != nil || removeErr != nil {
		return nil, errors.Join(err, runErr, removeErr)
	}
	return read(data)
}

// specReport is what is wanted of a spec in ginkgo's report.
type specReport struct {
	ContainerHierarchyTexts []string
	LeafNodeType            string
	LeafNodeText            string
	State                   string
	Failure                 struct {
		Message  string
		Location struct {
			FileName   string
			LineNumber int
		}
	}
}

// read counts what ginkgo reported.
func read(data []byte) (*result, error) {
	var reports []struct{ SpecReports []specReport }
	if err := json.Unmarshal(data, &reports); err != nil {
		return nil, fmt.Errorf("the suite's report: %w", err)
	}
	r := new(result)
	for _, report := range reports {
		for _, spec := range report.SpecReports {
			r.add(spec)
		}
	}
	if r.passed+len(r.failed)+len(r.skipped) == 0 {
		return nil, errors.New("the suite's report has no specs")
	}
	return r, nil
}
