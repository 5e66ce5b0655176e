package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/kubelet"
)

// Features that not every kernel has.
const (
	cpuset    = "/sys/fs/cgroup/cpuset.cpus.effective"
	hugePages = "/sys/kernel/mm/hugepages/hugepages-2048kB"
)

// firmware is a file with the firmware's information for the kernel, by
// processor.
var firmware = map[string]string{"amd64": "/sys/firmware/memmap/0/type", "arm64": "/sys/firmware/fdt"}

// probes are run by exec in a container that only the default AppArmor profile
// restricts, and that has the resources of resources.
var probes = []struct {
	about, script string
	allowed       bool
	output        string // must be in the output
	needs         string // a file of the node; empty: none
}{
	{"an exec is confined", "cat /proc/self/attr/current", true, "crius-default", ""},
	{"the container is confined", "cat /proc/1/attr/current", true, "crius-default", ""},
	{"mounting is denied", "mount -t tmpfs none /tmp", false, "ermission denied", ""},
	{"the node's settings are denied", "echo 3 >/proc/sys/vm/drop_caches", false, "ermission denied", ""},
	{"the node's firmware is denied", "cat " + firmware[runtime.GOARCH], false, "ermission denied", firmware[runtime.GOARCH]},
	{"its own processes can be killed", "sleep 1000 & kill $! && ! wait $!", true, "", ""},
	{"its own processes can be traced", "readlink /proc/1/exe && cat /proc/1/environ", true, "/bin/", ""},
	{"its own files can be changed", "mkdir /made && echo x >/made/file && chown 1 /made/file && rm -r /made", true, "", ""},
	{"its own name can be changed", "hostname other", true, "", ""},
	{"cpuset", "grep Cpus_allowed_list /proc/1/status", true, "Cpus_allowed_list:\t1\n", cpuset},
	{"hugetlb", "cat /sys/fs/cgroup/hugetlb.2MB.max", true, "4194304\n", hugePages},
}

func resources() *cri.LinuxContainerResources {
	r := &cri.LinuxContainerResources{}
	if exists(cpuset) {
		r.CpusetCpus = "1"
	}
	if exists(hugePages) {
		r.HugepageLimits = []*cri.HugepageLimit{{PageSize: "2MB", Limit: 4 << 20}}
	}
	return r
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

const (
	stopped = 42 // exit code of the container's SIGTERM handler
	image   = "registry.k8s.io/e2e-test-images/busybox:1.29-2"
)

// promises checks what the suite has no specs for: what a container may do
// under crius's default AppArmor profile, and cpuset and hugetlb if the kernel
// has them. It returns what is wrong. A machine without apparmor_parser is the
// one with SELinux.
func promises(ctx context.Context, o options) (wrong []string, err error) {
	if _, err := exec.LookPath("apparmor_parser"); err != nil {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	r := cri.NewRuntimeServiceClient(conn)
	pod := kubelet.Pod("promises", func(c *cri.PodSandboxConfig) { c.Linux.CgroupParent = o.parent() })
	sandbox, err := r.RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: pod, RuntimeHandler: o.Handler})
	if err != nil {
		return nil, err
	}
	defer func() {
		_, removeErr := r.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: sandbox.PodSandboxId})
		err = errors.Join(err, removeErr)
	}()
	if _, err := cri.NewImageServiceClient(conn).PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: image}}); err != nil {
		return nil, err
	}
	config := kubelet.Container("promises", image, nil, func(c *cri.ContainerConfig) {
		c.Command = []string{"sh", "-c", fmt.Sprintf("trap 'exit %d' TERM; sleep 1000 & wait", stopped)}
		c.Linux.Resources = resources()
		sc := c.Linux.SecurityContext
		sc.NoNewPrivs = true // with which a profile can still be entered from outside
		sc.MaskedPaths, sc.ReadonlyPaths = nil, nil
		sc.Seccomp.ProfileType = cri.SecurityProfile_Unconfined
		sc.Capabilities = &cri.Capability{AddCapabilities: []string{"ALL"}}
	})
	created, err := r.CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: sandbox.PodSandboxId, Config: config, SandboxConfig: pod})
	if err != nil {
		return nil, err
	}
	if _, err := r.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: created.ContainerId}); err != nil {
		return nil, err
	}
	if wrong, err = probe(ctx, r, created.ContainerId); err != nil {
		return nil, err
	}
	// The exit code shows whether the signal arrives, however slow the machine
	// is.
	if _, err := r.StopContainer(ctx, &cri.StopContainerRequest{ContainerId: created.ContainerId, Timeout: 30}); err != nil {
		return nil, err
	}
	status, err := r.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: created.ContainerId})
	if err != nil {
		return nil, err
	}
	if code := status.Status.ExitCode; code != stopped {
		wrong = append(wrong, fmt.Sprintf("the stop signal arrives: exit code %d, want %d", code, stopped))
	}
	return wrong, nil
}

// probe runs all probes in a container.
func probe(ctx context.Context, r cri.RuntimeServiceClient, id string) (wrong []string, err error) {
	for _, p := range probes {
		if p.needs != "" && !exists(p.needs) {
			fmt.Println("not on this kernel:", p.about)
			continue
		}
		answer, err := r.ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: id, Cmd: []string{"sh", "-c", p.script}, Timeout: 60})
		if err != nil {
			return nil, fmt.Errorf("%s: %w", p.about, err)
		}
		output := string(answer.Stdout) + string(answer.Stderr)
		if (answer.ExitCode == 0) != p.allowed || !strings.Contains(output, p.output) {
			wrong = append(wrong, fmt.Sprintf("%s: %s: exit code %d: %s", p.about, p.script, answer.ExitCode, output))
		}
	}
	return wrong, nil
}
