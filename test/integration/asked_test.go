package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
)

func annotated(annotations map[string]string) podChange {
	return func(c *cri.PodSandboxConfig) { c.Annotations = annotations }
}

// Pods written for CRI-O get by annotations what CRI-O would give them, if the
// handler allows that; otherwise the log says that the annotations have no
// effect.
func TestAnnotationsThatAct(t *testing.T) {
	t.Parallel()
	var config strings.Builder
	for _, runtime := range []string{"runc", "crun"} {
		fmt.Fprintf(&config, "[runtime.handlers.asked-%s]\npath = %q\nallowed_annotations = ['devices.crio.io', 'io.kubernetes.cri-o.umask', 'shm-size.crio.io', 'cgroup2-mount-hierarchy-rw.crio.io', 'ulimits.crius.run', 'containerd.io/snapshot/max-size']\n", runtime, runtime)
	}
	config.WriteString("[pod]\nallowed_ulimits = ['nofile=2000', 'core=unlimited']\n")
	w := private(t, node.Options{Config: config.String()})
	each(t, func(t *testing.T, runtime string) {
		p := w.run(t, "asked-"+runtime, annotated(map[string]string{
			"io.kubernetes.cri-o.Devices": "/dev/fuse:/dev/asked:r",
			"umask.crio.io":               "0027",
			"shm-size.crio.io":            "3Mi",
			"userns-mode.crio.io":         "auto",
			"ulimits.crius.run":           "core=4096:unlimited,nofile=1500",
			"ulimits.crius.run/c":         "nofile=1002",
		}))
		c := p.start(t, "sleep", named("c", nil))
		equal(t, "umask", strings.Contains(c.procfs(t, "status"), "Umask:\t0027\n"), true)
		for _, limits := range []string{c.procfs(t, "limits"), c.exec(t, "cat /proc/self/limits")} {
			fields := strings.Join(strings.Fields(limits), " ")
			equal(t, "ulimits in "+limits, strings.Contains(fields, "Max open files 1002 1002 ") && strings.Contains(fields, "Max core file size 4096 unlimited "), true)
		}
		mounts := c.procfs(t, "mountinfo")
		equal(t, "size of /dev/shm", strings.Contains(mounts[strings.Index(mounts, " /dev/shm "):], "size=3072k"), true)
		if devices := c.exec(t, "ls /dev"); !strings.Contains(devices, "asked") {
			t.Errorf("no device /dev/asked among %q", devices)
		}
		if log := w.LogAbout(1000, p.id); !strings.Contains(log, `msg="annotations have no effect`) || !strings.Contains(log, "annotations=[userns-mode.crio.io]") {
			t.Errorf("the log does not tell what has no effect:\n%s", log)
		}

		for _, c := range []struct {
			key, value string
			code       codes.Code
		}{
			{"devices.crio.io", "/dev/kmsg", codes.PermissionDenied},
			{"umask.crio.io", "rwx", codes.InvalidArgument},
			{"ulimits.crius.run", "nofile=2001", codes.PermissionDenied},
			{"ulimits.crius.run", "memlock=unlimited", codes.PermissionDenied},
			{"ulimits.crius.run/c", "nofile=many", codes.InvalidArgument},
			{"writable-layer-size.crius.run/c", "1e3", codes.InvalidArgument},
			{"containerd.io/snapshot/max-size", "-1", codes.InvalidArgument},
		} {
			config := w.podConfig(t, annotated(map[string]string{c.key: c.value}))
			_, err := w.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: config, RuntimeHandler: "asked-" + runtime})
			wantCode(t, err, c.code, c.key)
		}

		// The node's disk has no project quotas, so the limit would not hold.
		unlimited := w.run(t, "asked-"+runtime, annotated(map[string]string{"writable-layer-size.crius.run": "10Gi"}))
		_, err := unlimited.try(t.Context(), steps("sleep"))
		wantCode(t, err, codes.FailedPrecondition, "no project quotas; mount XFS with pquota")

		other := w.run(t, runtime, annotated(map[string]string{"umask.crio.io": "0027"}))
		equal(t, "umask that the handler does not allow", strings.Contains(other.start(t, "sleep").procfs(t, "status"), "Umask:\t0022\n"), true)
	})
}

// A pod sees its logs in place of an emptyDir volume. It can neither change
// them nor cause anything to be made or unmounted on the node (CVE-2025-0750).
func TestLogsInVolumeOfThePod(t *testing.T) {
	t.Parallel()
	var config strings.Builder
	for _, runtime := range []string{"runc", "crun"} {
		fmt.Fprintf(&config, "[runtime.handlers.logs-%s]\npath = %q\nallowed_annotations = ['link-logs.crio.io']\n", runtime, runtime)
	}
	w := private(t, node.Options{Config: config.String()})
	each(t, func(t *testing.T, runtime string) {
		for handler, linked := range map[string]bool{"logs-" + runtime: true, runtime: false} {
			p := w.run(t, handler, annotated(map[string]string{"io.kubernetes.cri-o.LinkLogs": "logs"}))
			volume := filepath.Join(w.dir(t), "pods", p.config.Metadata.Uid, "volumes", "kubernetes.io~empty-dir", "logs")
			must(t, os.MkdirAll(volume, 0o755))
			talks := p.start(t, "echo hello ; sleep")
			reads := p.start(t, "sleep", withMounts(&cri.Mount{ContainerPath: "/logs", HostPath: volume}))
			file := "/logs/" + talks.config.LogPath
			if !linked {
				reads.exec(t, "write /logs/own x")
				if r := reads.execResult(t, "cat "+file); r.ExitCode == 0 {
					t.Errorf("a pod that may not reads %q", r.Stdout)
				}
				continue
			}
			wait.For(t, "the log in the volume", func() bool {
				return strings.Contains(string(reads.execResult(t, "cat "+file).Stdout), "hello")
			})
			for _, line := range []string{"write " + file + " forged", "write /logs/own x"} {
				if r := reads.execResult(t, line); r.ExitCode == 0 {
					t.Errorf("%s: the logs can be changed", line)
				}
			}
			empty(t, volume)
			config := w.podConfig(t, annotated(map[string]string{"link-logs.crio.io": "../../../../etc"}))
			_, err := w.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: config, RuntimeHandler: handler})
			wantCode(t, err, codes.InvalidArgument, "link-logs.crio.io")
		}
	})
}
