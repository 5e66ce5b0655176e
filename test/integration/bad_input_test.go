package integration

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/inventory"
	"github.com/crius-run/crius/test/kit/node"
)

func TestBadPodsAreRefused_CVE_2022_0532_CVE_2022_0811(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	before := mustInventory(t, w)
	sysctl := func(key, value string) podChange {
		return func(c *cri.PodSandboxConfig) { c.Linux.Sysctls = map[string]string{key: value} }
	}
	both := func(changes ...podChange) podChange {
		return func(c *cri.PodSandboxConfig) {
			for _, f := range changes {
				f(c)
			}
		}
	}
	options := func(f func(*cri.NamespaceOption)) podChange {
		return func(c *cri.PodSandboxConfig) { f(c.Linux.SecurityContext.NamespaceOptions) }
	}
	hostNet := options(func(o *cri.NamespaceOption) { o.Network = cri.NamespaceMode_NODE })
	hostIPC := options(func(o *cri.NamespaceOption) { o.Ipc = cri.NamespaceMode_NODE })
	cases := map[string]struct {
		change podChange
		word   string // what the message must contain
	}{
		"no metadata":            {func(c *cri.PodSandboxConfig) { c.Metadata = nil }, "metadata"},
		"no name":                {func(c *cri.PodSandboxConfig) { c.Metadata.Name = "" }, "name"},
		"huge name":              {func(c *cri.PodSandboxConfig) { c.Metadata.Name = strings.Repeat("n", 100_000) }, "name"},
		"hostname with a line":   {func(c *cri.PodSandboxConfig) { c.Hostname = "a\nb" }, "hostname"},
		"hostname too long":      {func(c *cri.PodSandboxConfig) { c.Hostname = strings.Repeat("h", 65) }, "hostname"},
		"relative log directory": {func(c *cri.PodSandboxConfig) { c.LogDirectory = "logs" }, "log"},
		"log directory climbs":   {func(c *cri.PodSandboxConfig) { c.LogDirectory += "/../../../../etc" }, "log"},
		"dns with a line": {func(c *cri.PodSandboxConfig) {
			c.DnsConfig = &cri.DNSConfig{Searches: []string{"a\nnameserver 6.6.6.6"}}
		}, "dns"},
		"dns server":         {func(c *cri.PodSandboxConfig) { c.DnsConfig = &cri.DNSConfig{Servers: []string{"not an address"}} }, "dns"},
		"group without user": {func(c *cri.PodSandboxConfig) { c.Linux.SecurityContext.RunAsGroup = &cri.Int64Value{Value: 1} }, "run_as_group"},
		"negative user":      {func(c *cri.PodSandboxConfig) { c.Linux.SecurityContext.RunAsUser = &cri.Int64Value{Value: -1} }, "run_as_user"},
		"user 2^32":          {func(c *cri.PodSandboxConfig) { c.Linux.SecurityContext.RunAsUser = &cri.Int64Value{Value: 1 << 32} }, "run_as_user"},
		"port 70000": {func(c *cri.PodSandboxConfig) {
			c.PortMappings = []*cri.PortMapping{{HostPort: 70000, ContainerPort: 80}}
		}, "port"},
		"negative port": {func(c *cri.PodSandboxConfig) { c.PortMappings = []*cri.PortMapping{{HostPort: 80, ContainerPort: -1}} }, "port"},
		"port address": {func(c *cri.PodSandboxConfig) {
			c.PortMappings = []*cri.PortMapping{{HostPort: 80, ContainerPort: 80, HostIp: "nowhere"}}
		}, "port"},
		"pid namespace of a target": {options(func(o *cri.NamespaceOption) { o.Pid = cri.NamespaceMode_TARGET }), "target"},
		"namespace mode 99":         {options(func(o *cri.NamespaceOption) { o.Ipc = 99 }), "ipc"},

		"cgroup parent climbs":     {func(c *cri.PodSandboxConfig) { c.Linux.CgroupParent = "/../../evil" }, "cgroup"},
		"cgroup parent relative":   {func(c *cri.PodSandboxConfig) { c.Linux.CgroupParent = "evil/../x" }, "cgroup"},
		"cgroup parent of systemd": {func(c *cri.PodSandboxConfig) { c.Linux.CgroupParent = "kubepods-besteffort.slice" }, "cgroup"},
		"cgroup parent with NUL":   {func(c *cri.PodSandboxConfig) { c.Linux.CgroupParent = "/x\x00y" }, "cgroup"},

		// CVE-2022-0532: the host's own sysctls.
		"sysctl not namespaced":           {sysctl("kernel.panic", "1"), "kernel.panic"},
		"sysctl vm":                       {sysctl("vm.swappiness", "1"), "vm.swappiness"},
		"sysctl fs":                       {sysctl("fs.file-max", "1"), "fs.file-max"},
		"net sysctl of the host":          {both(hostNet, sysctl("net.ipv4.ip_forward", "0")), "net.ipv4.ip_forward"},
		"ipc sysctl of the host":          {both(hostIPC, sysctl("kernel.shmmax", "1")), "kernel.shmmax"},
		"hostname sysctl of the host":     {both(hostNet, sysctl("kernel.hostname", "evil")), "kernel.hostname"},
		"sysctl climbs":                   {sysctl("net/../kernel/panic", "1"), "net/../kernel/panic"},
		"sysctl climbs with dots":         {sysctl("net....kernel.panic", "1"), "net....kernel.panic"},
		"sysctl core pattern in disguise": {sysctl("kernel.shm_rmid_forced/../core_pattern", "|/x"), "core_pattern"},
		"sysctl without a name":           {sysctl("", "1"), "sysctl"},
		// CVE-2022-0811: separators smuggled into a value.
		"sysctl value with a plus": {sysctl("kernel.shm_rmid_forced", "1+kernel.core_pattern=|/x"), "kernel.shm_rmid_forced"},
		"sysctl value with a line": {sysctl("kernel.shm_rmid_forced", "1\nx"), "kernel.shm_rmid_forced"},

		"seccomp reference empty": {func(c *cri.PodSandboxConfig) {
			c.Linux.SecurityContext.Seccomp = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost}
		}, "seccomp"},
	}
	core := read(t, "/proc/sys/kernel/core_pattern")
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			_, err := w.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: w.podConfig(t, c.change)})
			wantCode(t, err, codes.InvalidArgument, c.word)
			bounded(t, err)
		})
	}
	equal(t, "core pattern of the host", read(t, "/proc/sys/kernel/core_pattern"), core)
	_, err := w.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{})
	wantCode(t, err, codes.InvalidArgument, "config")
	_, err = w.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: w.podConfig(t), RuntimeHandler: "no-such-handler"})
	wantCode(t, err, codes.NotFound, "no-such-handler", "runc", "crun")
	w.Restored(t, before)
}

// bounded checks that a message does not repeat all of a large request.
func bounded(t *testing.T, err error) {
	t.Helper()
	if n := len(status.Convert(err).Message()); n > 4096 {
		t.Errorf("the message has %d bytes", n)
	}
}

func TestBadContainersAreRefused(t *testing.T) {
	t.Parallel()
	w := spotless(t, node.Options{})
	p := w.run(t, "runc")
	before := mustInventory(t, w)
	security := func(f func(*cri.LinuxContainerSecurityContext)) containerChange {
		return func(c *cri.ContainerConfig) { f(c.Linux.SecurityContext) }
	}
	resources := func(f func(*cri.LinuxContainerResources)) containerChange {
		return func(c *cri.ContainerConfig) { f(c.Linux.Resources) }
	}
	mount := func(m *cri.Mount) containerChange { return withMounts(m) }
	env := func(key, value string) containerChange {
		return func(c *cri.ContainerConfig) { c.Envs = []*cri.KeyValue{{Key: key, Value: []byte(value)}} }
	}
	dir := w.dir(t)
	cases := map[string]struct {
		change containerChange
		code   codes.Code
		word   string
	}{
		"no metadata":   {func(c *cri.ContainerConfig) { c.Metadata = nil }, codes.InvalidArgument, "metadata"},
		"no name":       {func(c *cri.ContainerConfig) { c.Metadata.Name = "" }, codes.InvalidArgument, "name"},
		"no image":      {func(c *cri.ContainerConfig) { c.Image = nil }, codes.InvalidArgument, "image"},
		"empty image":   {func(c *cri.ContainerConfig) { c.Image.Image = "" }, codes.InvalidArgument, "image"},
		"unknown image": {func(c *cri.ContainerConfig) { c.Image.Image = node.RegistryHost + "/never/pulled:v1" }, codes.NotFound, "never/pulled"},
		"bad image":     {func(c *cri.ContainerConfig) { c.Image.Image = "NOT an image" }, codes.InvalidArgument, "image"},
		"NUL in args":   {func(c *cri.ContainerConfig) { c.Args = []string{"a\x00b"} }, codes.InvalidArgument, "arg"},
		"relative cwd":  {func(c *cri.ContainerConfig) { c.WorkingDir = "relative" }, codes.InvalidArgument, "working"},

		"env without a name": {env("", "x"), codes.InvalidArgument, "env"},
		"env with NUL":       {env("A", "x\x00y"), codes.InvalidArgument, "env"},
		"env with equals":    {env("A=B", "x"), codes.InvalidArgument, "env"},

		"user 2^32":  {security(func(s *cri.LinuxContainerSecurityContext) { s.RunAsUser = &cri.Int64Value{Value: 1 << 32} }), codes.InvalidArgument, "run_as_user"},
		"user -1":    {security(func(s *cri.LinuxContainerSecurityContext) { s.RunAsUser = &cri.Int64Value{Value: -1} }), codes.InvalidArgument, "run_as_user"},
		"group only": {security(func(s *cri.LinuxContainerSecurityContext) { s.RunAsGroup = &cri.Int64Value{Value: 5} }), codes.InvalidArgument, "run_as_group"},
		"group 2^32": {security(func(s *cri.LinuxContainerSecurityContext) { s.SupplementalGroups = []int64{1 << 32} }), codes.InvalidArgument, "supplemental"},
		"user and name": {security(func(s *cri.LinuxContainerSecurityContext) {
			s.RunAsUser, s.RunAsUsername = &cri.Int64Value{Value: 5}, "app"
		}), codes.InvalidArgument, "run_as_user"},
		"capability": {security(func(s *cri.LinuxContainerSecurityContext) {
			s.Capabilities = &cri.Capability{AddCapabilities: []string{"FLY"}}
		}), codes.InvalidArgument, "FLY"},
		"drop capability": {security(func(s *cri.LinuxContainerSecurityContext) {
			s.Capabilities = &cri.Capability{DropCapabilities: []string{"FLY"}}
		}), codes.InvalidArgument, "FLY"},
		"relative mask":    {security(func(s *cri.LinuxContainerSecurityContext) { s.MaskedPaths = []string{"proc/kcore"} }), codes.InvalidArgument, "masked"},
		"groups policy 99": {security(func(s *cri.LinuxContainerSecurityContext) { s.SupplementalGroupsPolicy = 99 }), codes.InvalidArgument, "policy"},

		"mount nowhere":       {mount(&cri.Mount{HostPath: dir}), codes.InvalidArgument, "mount"},
		"mount relative":      {mount(&cri.Mount{ContainerPath: "data", HostPath: "tmp"}), codes.InvalidArgument, "mount"},
		"mount over root":     {mount(&cri.Mount{ContainerPath: "/", HostPath: dir}), codes.InvalidArgument, "mount"},
		"mount with NUL":      {mount(&cri.Mount{ContainerPath: "/a\x00b", HostPath: dir}), codes.InvalidArgument, "mount"},
		"mount of an unknown": {mount(&cri.Mount{ContainerPath: "/d", HostPath: dir, Propagation: 99}), codes.InvalidArgument, "propagation"},

		"log path climbs":   {func(c *cri.ContainerConfig) { c.LogPath = "../../evil.log" }, codes.InvalidArgument, "log"},
		"log path absolute": {func(c *cri.ContainerConfig) { c.LogPath = "/etc/evil.log" }, codes.InvalidArgument, "log"},
		"log path is a dir": {func(c *cri.ContainerConfig) { c.LogPath = "." }, codes.InvalidArgument, "log"},
		"device permissions": {func(c *cri.ContainerConfig) {
			c.Devices = []*cri.Device{{HostPath: "/dev/null", ContainerPath: "/dev/n", Permissions: "rwx"}}
		}, codes.InvalidArgument, "permission"},
		"device relative": {func(c *cri.ContainerConfig) {
			c.Devices = []*cri.Device{{HostPath: "/dev/null", ContainerPath: "../n", Permissions: "r"}}
		}, codes.InvalidArgument, "device"},

		"negative shares": {resources(func(r *cri.LinuxContainerResources) { r.CpuShares = -1 }), codes.InvalidArgument, "cpu"},
		"cpuset":          {resources(func(r *cri.LinuxContainerResources) { r.CpusetCpus = "0; rm -rf /" }), codes.InvalidArgument, "cpuset"},
		"oom score":       {resources(func(r *cri.LinuxContainerResources) { r.OomScoreAdj = 5000 }), codes.InvalidArgument, "oom"},
		"unified climbs":  {resources(func(r *cri.LinuxContainerResources) { r.Unified = map[string]string{"../../x": "1"} }), codes.InvalidArgument, "unified"},
		"huge page size": {resources(func(r *cri.LinuxContainerResources) {
			r.HugepageLimits = []*cri.HugepageLimit{{PageSize: "3MB/..", Limit: 1}}
		}), codes.InvalidArgument, "huge"},
		"huge pages of a size that no node has": {resources(func(r *cri.LinuxContainerResources) {
			r.HugepageLimits = []*cri.HugepageLimit{{PageSize: "3MB", Limit: 3 << 20}}
		}), codes.InvalidArgument, "3MB"},
		"stop signal 99": {func(c *cri.ContainerConfig) { c.StopSignal = 99 }, codes.InvalidArgument, "signal"},
		"pid namespace":  {security(func(s *cri.LinuxContainerSecurityContext) { s.NamespaceOptions.Pid = 99 }), codes.InvalidArgument, "pid"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			_, err := p.try(t.Context(), steps("sleep"), c.change)
			wantCode(t, err, c.code, c.word)
			bounded(t, err)
		})
	}
	_, err := w.Runtime().CreateContainer(t.Context(), &cri.CreateContainerRequest{PodSandboxId: p.id})
	wantCode(t, err, codes.InvalidArgument, "config")
	_, err = w.Runtime().CreateContainer(t.Context(), &cri.CreateContainerRequest{
		PodSandboxId: unknownID, Config: p.create(t, "sleep").config, SandboxConfig: p.config,
	})
	wantCode(t, err, codes.NotFound, unknownID)

	(&container{pod: p, id: p.made[1]}).remove(t)
	w.Restored(t, before)
}

// HOME comes from the image and the request; a line break in it must not write
// additional lines into the container's passwd (CVE-2022-4318 and its bypass,
// CVE-2026-15809).
func TestHomeWithLineBreaks_CVE_2022_4318_CVE_2026_15809(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "crun")
	for _, home := range []string{"/x\nevil:x:0:0::/:/probe", "/x\r\nevil:x:0:0::/:/", `/x\nevil:x:0:0::/:/`, "/x:y:z", strings.Repeat("/h", 50_000)} {
		c, err := p.try(t.Context(), steps("cat /etc/passwd"), func(c *cri.ContainerConfig) {
			c.Envs = []*cri.KeyValue{{Key: "HOME", Value: []byte(home)}}
			c.Linux.SecurityContext.RunAsUser = &cri.Int64Value{Value: 4321}
		})
		if err != nil {
			wantCode(t, err, codes.InvalidArgument)
			continue
		}
		c.start(t)
		c.wait(t)
		passwd := c.output(t)
		lines := strings.Split(strings.TrimSuffix(passwd, "\n"), "\n")
		if len(lines) > 4 || strings.Contains(passwd, "\nevil") {
			t.Errorf("HOME %.60q made passwd %.500q", home, passwd)
		}
		for _, line := range lines {
			if strings.Count(line, ":") != 6 {
				t.Errorf("HOME %.60q made the passwd line %.200q", home, line)
			}
		}
	}
}

func TestOversizedRequests(t *testing.T) {
	t.Parallel()
	w := shared(t)
	_, err := w.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: w.podConfig(t, func(c *cri.PodSandboxConfig) {
		c.Annotations = map[string]string{"a": strings.Repeat("x", 20<<20)}
	})})
	wantCode(t, err, codes.ResourceExhausted)
	if _, err := w.Runtime().Version(t.Context(), &cri.VersionRequest{}); err != nil {
		t.Errorf("after it: %v", err)
	}
}

// A pod's annotations never reach the runtimes, which act on some of them.
func TestAnnotationsDoNotReachTheRuntime_CVE_2023_6476_CVE_2024_3154(t *testing.T) {
	t.Parallel()
	w := shared(t)
	evil := map[string]string{
		"org.systemd.property.ExecStopPost": "'/bin/touch /evil'",
		"run.oci.mount_context_type":        "evil",
		"run.oci.hooks.stdout":              "/evil",
		"io.kubernetes.cri-o.UnifiedCgroup": "memory.max=1",
	}
	p := w.run(t, "crun", func(c *cri.PodSandboxConfig) { c.Annotations = evil })
	c := p.start(t, "sleep", func(c *cri.ContainerConfig) { c.Annotations = evil })
	spec := read(t, filepath.Join(w.RunRoot(), "containers", c.id, "config.json"))
	for key := range evil {
		if strings.Contains(spec, fmt.Sprintf("%q", key)) {
			t.Errorf("the runtime gets the annotation %s", key)
		}
	}
}

func mustInventory(t *testing.T, w *world) *inventory.Snapshot {
	t.Helper()
	s, err := w.Stock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// Parameters of the network that the kernel keeps for the node, or does not have: which of the two depends on its
// version.
func TestSysctlsThatPodsCannotHave_moby_30778_runc_1193(t *testing.T) {
	t.Parallel()
	w := shared(t)
	for _, name := range []string{"net.core.rmem_max", "net.netfilter.nf_conntrack_buckets", "net.core.none"} {
		_, err := w.TryPod(t, "crun", func(c *cri.PodSandboxConfig) { c.Linux.Sysctls = map[string]string{name: "1000000"} })
		wantCode(t, err, codes.InvalidArgument, "sysctl "+name+": this kernel ", " set it ")
	}
}
