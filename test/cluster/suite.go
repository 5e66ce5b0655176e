package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"time"
)

// limit is how long one run of the tests may take.
const limit = 6 * time.Hour

// A selection says which specs run.
type selection struct {
	focus, skip string
	disk        bool // none, except fillDisk
}

// selections are the named ones. They leave out what needs a cloud, other
// nodes, gates that are off by default, a driver that cannot be built here or
// minutes for a spec, and what breaks the node or mounts in the machine's own
// /var/lib/kubelet.
var selections = map[string]selection{
	"conformance": {focus: `\[NodeConformance\]`, skip: `\[(Disruptive|Flaky|Slow|Serial)\]|\[Feature:`},
	"features": {focus: `\[sig-node\]`, skip: `\[NodeConformance\]|\[(Disruptive|Flaky|Slow|Serial)\]|\[Provider:|\[DRA\] control plane|Mount propagation|` +
		`\[Feature:(OffByDefault|KubeletInUserNamespace|GPU|Device|Dynamic|Volume|Windows|NodeLogQuery)`},
	"disk": {disk: true},
}

// together is how many specs run at the same time: they mostly wait.
const together = 6

// runTests runs the tests in the cluster. Their output goes to RUNTIME.log, and
// their report to RUNTIME.xml, both in the trial's directory.
func (c *cluster) runTests(ctx context.Context, t *trial) (*result, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	tmp := c.Path("e2e")
	if err := os.MkdirAll(tmp, 0o755); err != nil {
		return nil, err
	}
	log, err := os.Create(filepath.Join(t.dir, t.runtime+".log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	fmt.Printf("%s: the tests run, their log is %s\n", t.runtime, log.Name())
	report := filepath.Join(t.dir, t.runtime+".xml")
	if err := os.RemoveAll(report); err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, c.programs.Ginkgo, "--procs", strconv.Itoa(together),
		"--focus", t.selection.focus, "--skip", t.selection.skip,
		"--junit-report", filepath.Base(report), "--output-dir", filepath.Dir(report),
		"--timeout", limit.String(), "--seed", "1", "--no-color", "-v",
		c.programs.Tests, "--",
		"--kubeconfig", c.auth.file(admin+".kubeconfig"),
		"--provider", "skeleton",
		"--kubectl-path", c.programs.Kubectl,
		"--kubelet-root-dir", c.Path("kubelet"),
		"--container-runtime-endpoint", "unix://"+c.socket,
		"--e2e-output-dir", tmp)
	cmd.Dir = tmp
	cmd.Env = append(os.Environ(), "TMPDIR="+tmp)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGINT) }
	cmd.WaitDelay = time.Minute
	ran := c.Do(cmd.Run) // the report decides
	file, err := os.Open(report)
	if err != nil {
		return nil, errors.Join(err, ran)
	}
	defer file.Close()
	r, err := readReport(file, t.images.missing)
	if err == nil && len(r.passed)+len(r.failed)+len(r.notRun) == 0 {
		err = fmt.Errorf("no spec matches %q without %q", t.selection.focus, t.selection.skip)
	}
	return r, err
}
