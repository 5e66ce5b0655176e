package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/tools"
	"github.com/crius-run/crius/test/kit/wait"
)

// checkpointer makes checkpoints of pods and restores them.
type checkpointer struct {
	client
	id     string // of a pod
	config *cri.PodSandboxConfig
}

// checkpoint installs the package on a node with criu, has the service make and
// restore checkpoints, and runs tests of test/integration with the programs of
// the package.
func checkpoint(ctx context.Context, o options) error {
	found, err := filepath.Glob("tree/.cache/bin/criu-*/criu")
	if err == nil && len(found) != 1 {
		err = fmt.Errorf("not one criu, but %q", found)
	}
	if err != nil {
		return err
	}
	criu, err := filepath.Abs(found[0])
	if err != nil {
		return err
	}
	const more = "criu = %q\nrestore = true\n" // of the section runtime
	if err := errors.Join(installPackage("crius.deb"), configure(o, fmt.Sprintf(more, criu))); err != nil {
		return err
	}
	c, err := connect(o)
	if err != nil {
		return err
	}
	defer c.conn.Close()
	k := &checkpointer{client: c}
	before, err := take(o)
	if err != nil {
		return err
	}
	k.promise("criu check finds everything", command(criu, "check"))
	k.promise("crius check says so", shows(ctx, "crius check", "containers can be checkpointed by runtimes that use criu: "+criu))
	if err := k.ofService(ctx); err != nil {
		return err
	}
	if err := saveLeftovers(o, before); err != nil {
		return err
	}
	if err := k.ofNodes(ctx); err != nil {
		return err
	}
	return k.write()
}

// ofService checkpoints and restores a pod of three containers.
func (k *checkpointer) ofService(ctx context.Context) error {
	if _, err := k.images.PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: image}}); err != nil {
		return err
	}
	var err error
	if k.id, k.config, err = k.runPod(ctx, "source"); err != nil {
		return err
	}
	dir, err := os.MkdirTemp("/var/tmp", "checkpoints")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	ids, pids := map[string]string{}, map[string]string{}
	for _, name := range []string{"one", "two", "three"} {
		if ids[name], err = k.startContainer(ctx, k.id, k.config, name, count); err != nil {
			return err
		}
		if pids[name], err = k.pid(ctx, ids[name]); err != nil {
			return err
		}
	}
	goOn := func() error {
		errs := []error{atRest()}
		for name, id := range ids {
			pid, err := k.pid(ctx, id)
			first, countErr := counts(filepath.Join(k.config.LogDirectory, name, "0.log"))
			errs = append(errs, err, countErr, same(pid, pids[name]), same(first, 1))
		}
		return errors.Join(errs...)
	}
	k.promise("the containers count", goOn())
	k.promise("a container is checkpointed", command("crius", "checkpoint", "default/source", "one", "--output", dir+"/one.tar"))
	k.promise("the containers go on after that", goOn())
	k.promise("a pod is checkpointed", command("crius", "checkpoint", "default/source", "--output", dir+"/pod"))
	k.promise("the containers go on after that, too", goOn())
	k.promise("the pod goes on as another one", k.restore(ctx, dir+"/pod"))
	k.promise("a stop wins over a checkpoint", k.stopMeanwhile(ctx, dir+"/stopped.tar"))
	k.promise("nothing is left frozen, and the others go on", goOn())
	_, err = k.runtime.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: k.id})
	_, imageErr := k.images.RemoveImage(ctx, &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: image}})
	return errors.Join(err, imageErr, os.RemoveAll(k.config.LogDirectory))
}

// restore restores a checkpoint of counting containers, and removes the pod.
func (k *checkpointer) restore(ctx context.Context, dir string) (err error) {
	out, err := exec.CommandContext(ctx, "crius", "restore", dir, "--name", "copy").Output()
	if failed := new(exec.ExitError); errors.As(err, &failed) {
		err = fmt.Errorf("crius restore: %w: %s", err, failed.Stderr)
	}
	if err != nil {
		return err
	}
	pod := strings.TrimSpace(string(out))
	defer func() {
		_, removeErr := k.runtime.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: pod})
		err = errors.Join(err, removeErr)
	}()
	list, err := k.runtime.ListContainers(ctx, &cri.ListContainersRequest{Filter: &cri.ContainerFilter{PodSandboxId: pod}})
	if err != nil {
		return err
	}
	errs := []error{same(len(list.Containers), 3), atRest()}
	for _, c := range list.Containers {
		pid, err := k.pid(ctx, c.Id)
		if err != nil {
			return err
		}
		of, err := os.ReadFile("/proc/" + pid + "/cgroup")
		if err == nil && !(strings.HasPrefix(string(of), "0::/"+strings.TrimPrefix(k.o.parent(), "/")) && strings.Contains(string(of), c.Id)) {
			err = fmt.Errorf("%s is in the cgroup %s", c.Id, of)
		}
		label, labelErr := os.ReadFile("/proc/" + pid + "/attr/current")
		answer, statusErr := k.runtime.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: c.Id})
		if statusErr != nil {
			return statusErr
		}
		log := answer.Status.LogPath
		defer func() { _ = os.RemoveAll(filepath.Dir(filepath.Dir(log))) }()
		first, countErr := counts(log)
		if countErr == nil && first < 2 {
			countErr = fmt.Errorf("%s counts from %d", c.Metadata.Name, first)
		}
		errs = append(errs, err, countErr, labelErr, same(string(label), "crius-default (enforce)\n"))
	}
	return errors.Join(errs...)
}

// stopMeanwhile stops a container that is frozen for its checkpoint.
func (k *checkpointer) stopMeanwhile(ctx context.Context, archive string) error {
	id, err := k.startContainer(ctx, k.id, k.config, "stop", containers["stop"])
	if err != nil {
		return err
	}
	pid, err := k.pid(ctx, id)
	if err != nil {
		return err
	}
	of, err := os.ReadFile("/proc/" + pid + "/cgroup")
	if err != nil {
		return err
	}
	frozen := "/sys/fs/cgroup" + strings.TrimPrefix(strings.TrimSpace(string(of)), "0::") + "/cgroup.freeze"
	result := make(chan error, 1)
	go func() {
		_, err := k.runtime.CheckpointContainer(ctx, &cri.CheckpointContainerRequest{ContainerId: id, Location: archive, Timeout: int64(wait.Limit.Seconds())})
		result <- err
	}()
	if !wait.Until(ctx, func() bool { now, _ := os.ReadFile(frozen); return string(now) == "1\n" || len(result) > 0 }) {
		return errors.New("the container is never frozen")
	}
	_, err = k.runtime.StopContainer(ctx, &cri.StopContainerRequest{ContainerId: id, Timeout: int64(wait.Limit.Seconds())})
	if err := errors.Join(err, k.exited(ctx, id, stopped)); err != nil {
		return err
	}
	err = same(status.Code(<-result), codes.FailedPrecondition)
	if exists(archive) {
		err = errors.Join(err, errors.New("the checkpoint left a file"))
	}
	return err
}

// atRest checks that no cgroup is frozen, no process traced, no criu left, and no
// cgroup of one.
func atRest() error {
	out, _ := shell(`exec 2>/dev/null
find /sys/fs/cgroup -name cgroup.freeze -exec grep -lx 1 {} +
find /sys/fs/cgroup -name 'crius-checkpoint-*'
grep -l '^TracerPid:[[:space:]]*[1-9]' /proc/[0-9]*/status
grep -l 'sbin/[c]riu' /proc/[0-9]*/cmdline`) // it is run by its loader, which is the name in comm
	return same(out, "")
}

// ofNodes runs tests of test/integration in the tree that the host has prepared,
// and reports each.
func (k *checkpointer) ofNodes(ctx context.Context) error {
	log, err := os.Create("out/tests.log")
	if err != nil {
		return err
	}
	defer log.Close()
	var said strings.Builder
	cmd := exec.CommandContext(ctx, "./integration.test", "-test.v", "-test.timeout=1h", "-test.run="+k.o.Tests)
	cmd.Dir = "tree/test/integration"
	cmd.Env = append(os.Environ(), tools.PrebuiltVariable+"=1", "CRIUS_BIN=/usr/bin")
	if k.o.Handler != "runc" { // the tests use whatever has this name
		bin, err := filepath.Abs("bin")
		if err != nil {
			return err
		}
		if err := errors.Join(os.Mkdir(bin, 0o755), os.Symlink("/usr/local/bin/"+k.o.Handler, bin+"/runc")); err != nil {
			return err
		}
		cmd.Env = append(cmd.Env, "PATH="+bin+":"+os.Getenv("PATH"))
	}
	cmd.Stdout = io.MultiWriter(log, &said, os.Stdout) // the console shows the progress
	cmd.Stderr = cmd.Stdout
	runErr := cmd.Run()
	if k.tests(said.String()) == 0 {
		return errors.Join(fmt.Errorf("no test matches %q", k.o.Tests), runErr)
	}
	k.promise("all tests pass and leave nothing", errors.Join(runErr, atRest()))
	return nil
}

// finished is a line in the output of go test -v about one test.
var finished = regexp.MustCompile(`(?m)^--- ([A-Z]+): (\S+) \((\S+)\)$`)

// tests reports each test in the output of go test -v, and returns how many there
// are.
func (r *report) tests(said string) int {
	all := finished.FindAllStringSubmatch(said, -1)
	for _, t := range all {
		var err error
		if t[1] != "PASS" {
			err = fmt.Errorf("%s, see tests.log", t[1])
		}
		r.promise(t[2]+" ("+t[3]+")", err)
	}
	return len(all)
}
