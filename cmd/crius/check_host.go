package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/cmd/crius/kubelet"
	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/selinux"
	"github.com/crius-run/crius/pod"
	"github.com/crius-run/crius/storage/artifact"
)

// host is the directory of the node's files: / except in tests.
type host struct{ root string }

// read returns the content of a file without its final newline, "" if there is
// none.
func (h host) read(path string) string {
	data, err := os.ReadFile(filepath.Join(h.root, path))
	if err != nil {
		return ""
	}
	return strings.TrimSuffix(string(data), "\n")
}

func (h host) exists(path string) bool {
	_, err := os.Stat(filepath.Join(h.root, path))
	return err == nil
}

// checkConfiguration checks that only root can write the configuration, since it names
// programs that run as root. It is valid, since it has been loaded.
func (n *node) checkConfiguration(context.Context) []finding {
	findings := []finding{}
	for _, file := range n.config.Files {
		info, err := os.Stat(file)
		switch {
		case err != nil:
			findings = append(findings, warn("", "%v", err))
		case info.Mode().Perm()&0o022 != 0:
			findings = append(findings, warn("chmod go-w "+file, "%s is writable by users other than its owner", file))
		default:
			findings = append(findings, ok("%s", file))
		}
	}
	for _, text := range n.config.Ignored {
		findings = append(findings, warn("", "no effect in runtime.crio_handlers_dir: %s", text))
	}
	if dir := n.config.Config.RunRoot; len(dir) > pod.MaxRunDir {
		findings = append(findings, fail("choose a shorter run_root", "run_root %s is longer than %d bytes: the server does not start, since paths of sockets below it would be too long", dir, pod.MaxRunDir))
	}
	if len(findings) == 0 {
		return []finding{ok("no configuration files, using the defaults")}
	}
	return findings
}

// checkPrivileges checks the effective capabilities.
func (n *node) checkPrivileges(context.Context) []finding {
	if os.Geteuid() != 0 {
		return []finding{fail("run as root", "running as user id %d, not as root", os.Geteuid())}
	}
	var effective uint64
	for line := range strings.Lines(n.host.read("proc/self/status")) {
		if hex, found := strings.CutPrefix(line, "CapEff:"); found {
			effective, _ = strconv.ParseUint(strings.TrimSpace(hex), 16, 64) // unreadable: none
		}
	}
	var findings []finding
	for _, c := range []struct {
		bit  int
		name string
	}{
		{unix.CAP_SYS_ADMIN, "CAP_SYS_ADMIN"}, {unix.CAP_NET_ADMIN, "CAP_NET_ADMIN"}, {unix.CAP_CHOWN, "CAP_CHOWN"},
		{unix.CAP_DAC_OVERRIDE, "CAP_DAC_OVERRIDE"}, {unix.CAP_KILL, "CAP_KILL"}, {unix.CAP_MKNOD, "CAP_MKNOD"},
		{unix.CAP_SETUID, "CAP_SETUID"}, {unix.CAP_SETGID, "CAP_SETGID"}, {unix.CAP_SYS_CHROOT, "CAP_SYS_CHROOT"},
	} {
		if effective&(1<<c.bit) == 0 {
			findings = append(findings, fail("run crius directly on the host, not in a restricted container", "capability %s is missing", c.name))
		}
	}
	if effective&(1<<unix.CAP_SYS_RESOURCE) == 0 {
		findings = append(findings, warn("", "CAP_SYS_RESOURCE is missing: containers cannot have a lower oom_score_adj than crius itself"))
	}
	if findings == nil {
		return []finding{ok("running as root with all required capabilities")}
	}
	return findings
}

// checkKernel checks each feature of the kernel, not its version.
func (n *node) checkKernel(context.Context) []finding {
	var findings []finding
	if fd, err := unix.PidfdOpen(os.Getpid(), 0); err != nil {
		findings = append(findings, fail("use Linux 5.6 or later", "the kernel has no pidfds: %v", err))
	} else {
		unix.Close(fd)
	}
	// Paths in images and pods are opened so that no link leads out of them.
	if fd, err := unix.Openat2(unix.AT_FDCWD, "/", &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS}); err != nil {
		findings = append(findings, fail("use Linux 5.6 or later", "the kernel has no openat2: %v", err))
	} else {
		unix.Close(fd)
	}
	if fd, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC); err != nil {
		findings = append(findings, fail("run modprobe overlay, or use Linux 5.2 or later", "the kernel has no overlay file system: %v", err))
	} else {
		unix.Close(fd)
	}
	for _, ns := range []string{"net", "ipc", "uts", "pid", "mnt", "cgroup", "user"} {
		switch {
		case n.host.exists("proc/self/ns/" + ns):
		case ns == "cgroup" || ns == "user":
			findings = append(findings, warn("use a kernel with this namespace enabled", "the kernel has no %s namespaces: pods that request one fail", ns))
		default:
			findings = append(findings, fail("use a kernel with this namespace enabled", "the kernel has no %s namespaces", ns))
		}
	}
	if n.host.read("proc/sys/user/max_user_namespaces") == "0" {
		findings = append(findings, warn("sysctl -w user.max_user_namespaces=15000", "user namespaces are disabled: pods with hostUsers: false fail"))
	}
	if !n.host.exists("proc/sys/kernel/seccomp") {
		findings = append(findings, warn("use a kernel with CONFIG_SECCOMP_FILTER", "the kernel has no seccomp filters: containers with a seccomp profile fail"))
	}
	findings = append(findings, n.checkSELinux()...)
	if n.host.read("proc/sys/net/ipv4/ip_forward") == "0" {
		findings = append(findings, warn("sysctl -w net.ipv4.ip_forward=1", "IPv4 forwarding is off: pods cannot reach anything outside this node"))
	}
	if findings == nil {
		return []finding{ok("Linux %s", n.host.read("proc/sys/kernel/osrelease"))}
	}
	return findings
}

// checkSELinux checks that the policy has types for containers: without them the server
// does not start.
func (n *node) checkSELinux() []finding {
	switch n.host.read("sys/fs/selinux/enforce") {
	case "":
		return nil
	case "0":
		return []finding{warn("run setenforce 1 and set SELINUX=enforcing in /etc/selinux/config", "SELinux is permissive: denied accesses of containers are logged but not blocked")}
	}
	if !n.config.Config.Pod.SELinux {
		return []finding{warn("remove pod.selinux = false", "SELinux is enforcing but pod.selinux is false: containers run in the SELinux domain of the crius server")}
	}
	if _, err := selinux.Load(); err != nil {
		return []finding{fail("install container-selinux (Fedora, RHEL) or the policy's container module", "%s", fault.Text(err))}
	}
	return nil
}

// checkCgroups compares the layout with the requirements of the driver and the runtimes.
func (n *node) checkCgroups(context.Context) []finding {
	var findings []finding
	if n.config.Config.Runtime.CgroupDriver == "systemd" && !n.host.exists("run/systemd/system") {
		findings = append(findings, fail(`set runtime.cgroup_driver = "cgroupfs", and cgroupDriver: cgroupfs in the kubelet's configuration`,
			"runtime.cgroup_driver is systemd, but systemd is not running"))
	}
	if err := pullCgroupOf(n.config.Config).Ready(); err != nil {
		findings = append(findings, fail(`install it, or set image.pull_cgroup = ""`, "image.pull_cgroup: images cannot be pulled: %v", err))
	}
	findings = append(findings, n.checkDriver()...)
	mode := cgroup.Detect()
	if mode == cgroup.None {
		return append(findings, fail("mount cgroup2 at /sys/fs/cgroup", "no cgroup file system is mounted"))
	}
	for _, controller := range []string{"cpu", "cpuset", "memory", "pids"} {
		if !slices.Contains(n.host.controllers(mode), controller) {
			findings = append(findings, warn("enable the controller: look for cgroup_disable in the kernel's command line", "no %s cgroup controller: containers with limits for it are rejected", controller))
		}
	}
	if mode == cgroup.Hybrid && n.host.read("sys/fs/cgroup/unified/cgroup.controllers") != "" {
		findings = append(findings, warn("mkdir -p /sys/fs/cgroup/hugetlb && mount -t cgroup -o hugetlb cgroup /sys/fs/cgroup/hugetlb",
			"the v2 hierarchy mounted beside v1 has controllers (%s): crun before 1.9 refuses to run", n.host.read("sys/fs/cgroup/unified/cgroup.controllers")))
	}
	if mode != cgroup.V2 {
		findings = append(findings, warn("boot with systemd.unified_cgroup_hierarchy=1 once nothing on this node needs v1",
			"cgroup v1: recent kubelets refuse it unless failCgroupV1 is false"))
	}
	if findings == nil {
		return []finding{ok("cgroup v2 with the %s driver", n.config.Config.Runtime.CgroupDriver)}
	}
	return findings
}

// checkDriver compares the cgroup driver with that of the kubelet, which creates the
// parents of pods' cgroups in the form of its own driver. Recent kubelets take crius's
// driver when they start, whatever their files say.
func (n *node) checkDriver() []finding {
	ours, kubelets := n.config.Config.Runtime.CgroupDriver, kubelet.CgroupDriver(n.host.root)
	if kubelets.Value == "" || kubelets.Value == ours {
		return nil
	}
	return []finding{warn(fmt.Sprintf("set runtime.cgroup_driver = %q and restart crius, or let the kubelet have %s and restart it", kubelets.Value, ours),
		"the kubelet's cgroup driver is %s (%s), that of crius is %s: pods do not start, unless the kubelet has asked crius for the driver since", kubelets.Value, kubelets.File, ours)}
}

// controllers returns the cgroup controllers that are available on this node.
func (h host) controllers(mode cgroup.Mode) []string {
	if mode == cgroup.V2 {
		return strings.Fields(h.read("sys/fs/cgroup/cgroup.controllers"))
	}
	var mounted []string
	for line := range strings.Lines(h.read("proc/self/cgroup")) { // 4:memory:/
		if fields := strings.SplitN(line, ":", 3); len(fields) == 3 {
			mounted = append(mounted, strings.Split(fields[1], ",")...)
		}
	}
	return mounted
}

// checkLimits checks the limits that a server would inherit from this process.
func checkLimits(context.Context) []finding {
	const enough = 65536
	var files unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files); err != nil {
		return []finding{warn("", "limit of open files: %v", err)}
	}
	if files.Max < enough {
		return []finding{warn("start crius with its systemd unit, or after ulimit -Hn 1048576", "the limit of %d open files is too low for more than a few hundred pods", files.Max)}
	}
	return []finding{ok("open file limit %d", files.Max)}
}

// checkDirectories checks the directories of state, or the parents in which crius will
// create them.
func (n *node) checkDirectories(context.Context) []finding {
	c := n.config.Config
	var findings []finding
	roots, err := c.Image.Roots()
	if err != nil {
		findings = append(findings, fail("correct storage.conf or set image.root", "image.root: %v", err))
	}
	for _, d := range []struct{ key, path string }{
		{"root", c.Root}, {"run_root", c.RunRoot}, {"pod.namespaces_dir", c.Pod.NamespacesDir}, {"image.root", roots.Graph}, {"image.imagestore", roots.Images},
	} {
		if d.path == "" {
			continue
		}
		findings = append(findings, checkDirectory(d.key, d.path))
	}
	if err == nil {
		findings = append(findings, n.host.checkFileSystems(c.Root, roots.ForImages()))
	}
	former := artifact.In(roots.Graph)
	if _, statErr := os.Stat(former); err == nil && statErr == nil && roots.ForImages() != roots.Graph && !slices.Contains(c.Image.AdditionalArtifactStores, roots.Graph) {
		findings = append(findings, warn("drain the node and restart crius, unless the containers that use them end soon", "image.imagestore: %s has OCI artifacts from before, which are not listed, and go when no container uses them", former))
	}
	for _, root := range c.Image.AdditionalArtifactStores {
		if err := artifact.CheckAdditional(root); err != nil {
			findings = append(findings, warn("mount it, or copy crius-artifacts of an image root into it", "image.additional_artifact_stores: %v", err))
		}
	}
	return append(findings, checkPassage(c.RunRoot)...)
}

// checkFileSystems checks that the kubelet notices when writable layers, which are below
// root, fill their file system: it watches only the file systems of the images and of its
// own directory.
func (h host) checkFileSystems(root, images string) finding {
	device := func(path string) uint64 {
		existing, _, _ := nearestExisting(path)
		var st unix.Stat_t
		if err := unix.Stat(existing, &st); err != nil {
			return 0
		}
		return st.Dev
	}
	layers, own := device(root), filepath.Join(h.root, "var/lib/kubelet")
	switch {
	case layers == device(images):
		return ok("images and writable layers are on one file system")
	case layers == device(own):
		return ok("writable layers (%s) are on the file system of the kubelet, images (%s) on another one", root, images)
	}
	return warn("move root to the file system of "+own+" or of the images, or watch the file system yourself",
		"writable layers (%s) are on a file system that the kubelet does not watch: images (%s) and %s are on others, so no pod is evicted before it is full", root, images, own)
}

// checkPassage reports a run root that root in a user namespace cannot traverse. The server
// fixes its mode at start; it is usually systemd-tmpfiles that changes it later.
func checkPassage(runRoot string) []finding {
	info, err := os.Stat(runRoot)
	if _, unused := os.Stat(filepath.Join(runRoot, "containers")); err != nil || unused != nil || info.Mode().Perm()&0o001 != 0 {
		return nil
	}
	return []finding{warn("chmod 711 "+runRoot+", then fix whatever sets that mode, for example a tmpfiles.d entry",
		"run_root: %s has mode %04o: containers with user namespaces (hostUsers: false) cannot be created", runRoot, info.Mode().Perm())}
}

func checkDirectory(key, path string) finding {
	existing, info, err := nearestExisting(path)
	switch {
	case err != nil:
		return fail("correct "+key, "%s: %v", key, err)
	case !info.IsDir():
		return fail("move it away or correct "+key, "%s: %s is not a directory", key, existing)
	}
	if err := unix.Access(existing, unix.W_OK); err != nil {
		return fail("remount it read-write or correct "+key, "%s: %s is not writable: %v", key, existing, err)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(existing, &st); err != nil {
		return fail("", "%s: %s: %v", key, existing, err)
	}
	// statfs counts free blocks of file systems without blocks (procfs) as 0.
	if free := st.Bavail * uint64(st.Bsize); st.Blocks > 0 && free < 64<<20 {
		return warn("free disk space", "%s: only %d MiB free at %s", key, free>>20, existing)
	}
	if st.Files > 0 && st.Ffree == 0 {
		return warn("delete files", "%s: no free inodes at %s", key, existing)
	}
	if existing != path {
		return ok("%s: %s will be created", key, path)
	}
	return ok("%s: %s", key, path)
}

// nearestExisting returns path or its deepest existing parent.
func nearestExisting(path string) (string, fs.FileInfo, error) {
	for {
		info, err := os.Stat(path)
		if !errors.Is(err, fs.ErrNotExist) || path == "/" {
			return path, info, err
		}
		path = filepath.Dir(path)
	}
}

// checkSocket checks which processes use the CRI sockets.
func (n *node) checkSocket(ctx context.Context) []finding {
	api := n.config.Config.API
	findings := []finding{checkSocketOf(ctx, "api.listen", api.Listen)}
	if api.CrioSocket == "" {
		return findings
	}
	crio := checkSocketOf(ctx, "api.crio_socket", api.CrioSocket)
	if serves, other := listener(ctx, api.Listen), listener(ctx, api.CrioSocket); answers(ctx, api.CrioSocket) && serves != other {
		crio = fail("stop it or set a different api.crio_socket", "another process serves %s: %s", api.CrioSocket, other)
	}
	return append(findings, crio)
}

// checkSocketOf checks the socket of an option.
func checkSocketOf(ctx context.Context, option, path string) finding {
	parent := checkDirectory(option, filepath.Dir(path))
	if parent.Status != statusOK {
		return parent
	}
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return ok("%s is free", path)
	case err != nil:
		return fail("correct "+option, "%s", fault.Text(err))
	case info.Mode().Type() != fs.ModeSocket:
		return fail("move it away or correct "+option, "%s exists and is not a socket", path)
	}
	if answers(ctx, path) {
		return ok("%s: a server answers", path)
	}
	return ok("%s: stale socket, will be replaced", path)
}

// checkAddresses checks the settings of TCP services as the server would.
func (n *node) checkAddresses(context.Context) []finding {
	c := n.config.Config
	var findings []finding
	for _, err := range []error{c.API.Stream().Check(), metricsOptions(c).Check()} {
		if err != nil {
			findings = append(findings, fail("correct the configuration: the server will not start with these values", "%v", err))
		}
	}
	if findings == nil {
		return []finding{ok("stream and metrics settings are valid")}
	}
	return findings
}

// checkMetrics checks that the kubelet's container metrics have the names of pods: unless
// the kubelet gets them by CRI, its cAdvisor must take crius for CRI-O
// (docs/decisions/0008-crio-facade.md).
func (n *node) checkMetrics(ctx context.Context) []finding {
	facade := n.config.Config.API.CrioSocket
	switch {
	case facade != "":
		return []finding{ok("api.crio_socket: the kubelet's cAdvisor finds crius at %s", facade)}
	case kubelet.StatsFromCRI(n.host.root):
		return []finding{ok("the kubelet gets container metrics from crius")}
	case answers(ctx, filepath.Join(n.host.root, kubelet.CrioSocket)):
		return []finding{warn("enable the kubelet's feature gate PodAndContainerStatsFromCRI",
			"the kubelet's container metrics lack pod names and pod network metrics: its cAdvisor uses the CRI-O at %s", kubelet.CrioSocket)}
	}
	return []finding{kubelet.NoPodNames()}
}

// answers reports whether a process serves the unix socket at path.
func answers(ctx context.Context, path string) bool {
	conn, err := new(net.Dialer).DialContext(ctx, "unix", path)
	if err != nil {
		return false
	}
	conn.Close()
	return true
}
