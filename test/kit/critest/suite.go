// Package critest runs critest, the conformance suite of CRI, against a server,
// without the internet: every image that the suite names is built here and
// served by a registry under its public name.
//
// Build makes the parts, which needs compilers; New assembles them, which needs
// nothing, so that it may happen on another machine.
package critest

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	testprogram "github.com/crius-run/crius/test/kit/program"
	"github.com/crius-run/crius/test/kit/tools"
)

// limit is how long one run of the suite may take; some minutes are usual.
const limit = time.Hour

// Suite is critest with its images. It may run several times; copies of it, with
// another focus or log, may run at once.
type Suite struct {
	Focus string    // a regular expression; empty: every spec
	Log   io.Writer // takes the suite's own output

	program []byte
	images  *images
	sweeper *sweeper
}

// Target is a server against which the suite is run.
type Target struct {
	Socket  string                   // where the server serves CRI
	NRI     string                   // where the server serves NRI
	Handler string                   // the runtime handler of all pods
	Dir     string                   // an empty directory for the suite's files
	Tmp     string                   // directory for files used by pods, such as logs; empty: in Dir
	Do      func(func() error) error // runs a function in the server's network
}

// New makes the suite ready to run.
//
// It also determines the digest of an image that exists: the suite pulls one by
// a digest that no image built here can have.
func New(p tools.Parts) (*Suite, error) {
	built, err := newImages(p)
	if err != nil {
		return nil, err
	}
	program, err := os.ReadFile(p.Suite)
	if err != nil {
		return nil, err
	}
	if !bytes.Contains(program, []byte(suiteDigest)) {
		return nil, fmt.Errorf("%s does not contain the digest %s: is it another version?", p.Suite, suiteDigest)
	}
	program = bytes.ReplaceAll(program, []byte(suiteDigest), []byte(built.digest.Digest().Encoded()))
	return &Suite{Log: io.Discard, program: program, images: built, sweeper: new(sweeper)}, nil
}

// Run runs the suite once, in the target's network, because it connects to pods
// and to ports of the host, and in the target's directory, so that nothing of
// it stays. A failed spec is not an error. The report stays as Dir/report.json.
func (s *Suite) Run(ctx context.Context, on Target) (*Result, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	program := filepath.Join(on.Dir, "critest")
	tmp, report := cmp.Or(on.Tmp, filepath.Join(on.Dir, "tmp")), filepath.Join(on.Dir, "report.json")
	if err := errors.Join(os.MkdirAll(tmp, 0o755), testprogram.Write(program, s.program)); err != nil {
		return nil, err
	}
	if err := s.sweeper.begin(); err != nil {
		return nil, err
	}
	args := []string{
		"-runtime-endpoint", "unix://" + on.Socket,
		"-image-endpoint", "unix://" + on.Socket,
		"-nri-socket", on.NRI,
		"-runtime-handler", on.Handler,
		"-config", filepath.Join(on.Dir, "none"),
		"-ginkgo.seed", "1",
		"-ginkgo.no-color",
		"-ginkgo.json-report", report,
	}
	if s.Focus != "" {
		args = append(args, "-ginkgo.focus", s.Focus)
	}
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir = tmp
	cmd.Env = append(os.Environ(), "TMPDIR="+tmp)
	cmd.Stdout, cmd.Stderr = s.Log, s.Log
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGINT) }
	cmd.WaitDelay = 30 * time.Second
	runErr := on.Do(cmd.Run) // the report decides
	removeErr := s.sweeper.end()
	data, err := os.ReadFile(report)
	if err != nil || removeErr != nil {
		return nil, errors.Join(err, runErr, removeErr)
	}
	return Read(data)
}

// specReport is the used part of a spec in ginkgo's report.
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

// Read counts the results in ginkgo's report.
func Read(report []byte) (*Result, error) {
	var reports []struct{ SpecReports []specReport }
	if err := json.Unmarshal(report, &reports); err != nil {
		return nil, fmt.Errorf("the suite's report: %w", err)
	}
	r := new(Result)
	for _, report := range reports {
		for _, spec := range report.SpecReports {
			r.add(spec)
		}
	}
	if len(r.passed)+len(r.failed) == 0 {
		return nil, errors.New("no spec ran: does the focus match any?")
	}
	return r, nil
}
