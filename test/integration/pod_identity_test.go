package integration

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// A host name may be as long as the kernel allows: kubelets send the fully qualified one if a pod
// asks for that (kubernetes#91036).
func TestHostnameIsThePods(t *testing.T) {
	t.Parallel()
	w := shared(t)
	name := strings.Repeat("n", 64-len(".of-its.own")) + ".of-its.own"
	c := w.run(t, "crun", func(c *cri.PodSandboxConfig) { c.Hostname = name }).start(t, "sleep")
	equal(t, "hostname", c.facts(t).Hostname, name)
	equal(t, "/etc/hostname", c.exec(t, "cat /etc/hostname"), name+"\n")
}

func TestResolvConfIsExactlyTheDNSConfig(t *testing.T) {
	t.Parallel()
	w := shared(t)
	host, err := os.ReadFile("/etc/resolv.conf")
	if err != nil {
		t.Fatal(err)
	}
	cases := map[string]struct {
		dns  *cri.DNSConfig
		want string
	}{
		"full": {
			&cri.DNSConfig{
				Servers:  []string{"10.96.0.10", "fd00::10"},
				Searches: []string{"ns.svc.cluster.local", "svc.cluster.local"},
				Options:  []string{"ndots:5", "edns0"},
			},
			"search ns.svc.cluster.local svc.cluster.local\nnameserver 10.96.0.10\nnameserver fd00::10\noptions ndots:5 edns0\n",
		},
		"servers only": {&cri.DNSConfig{Servers: []string{"10.96.0.10"}}, "nameserver 10.96.0.10\n"},
		"none":         {nil, string(host)},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			p := w.run(t, "runc", func(p *cri.PodSandboxConfig) { p.DnsConfig = c.dns })
			equal(t, "/etc/resolv.conf", byKeyword(p.finish(t, "cat /etc/resolv.conf")), byKeyword(c.want))
		})
	}
}

// A container may rewrite the files that crius puts into its /etc, for the
// whole pod, but may not grow them until they fill the node's /run: they are
// not charged to the container.
func TestPodFilesAreBounded_CVE_2020_8557(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		c, other := p.start(t, "sleep"), p.start(t, "sleep")
		for _, file := range []string{"/etc/resolv.conf", "/etc/hostname"} {
			if mib := c.exec(t, "fill "+file+" 16"); mib != "0\n" && mib != "1\n" {
				t.Errorf("%s takes %s MiB", file, strings.TrimSpace(mib))
			}
			c.exec(t, "write "+file+" rewritten")
			equal(t, file+" in another container", other.exec(t, "cat "+file), "rewritten")
		}
		equal(t, "of /dev/shm there is", c.exec(t, "write /dev/shm/file x ; fill /dev/shm/file 64"), "64\n")
		c.exec(t, "write /etc/resolv.conf again") // even if /dev/shm is full
		equal(t, "/etc/resolv.conf of the next container", p.finish(t, "cat /etc/resolv.conf"), "again")
	})
}

// byKeyword sorts the lines of a resolv.conf by their keyword: only the order
// of the name servers matters.
func byKeyword(conf string) string {
	lines := strings.SplitAfter(conf, "\n")
	slices.SortStableFunc(lines, func(a, b string) int {
		return strings.Compare(strings.SplitN(a, " ", 2)[0], strings.SplitN(b, " ", 2)[0])
	})
	return strings.Join(lines, "")
}

func TestContainersOfAPodShareDevShm(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "crun")
	p.finish(t, "write /dev/shm/note shared")
	equal(t, "/dev/shm/note", p.finish(t, "cat /dev/shm/note ; echo"), "shared\n")
	m := p.facts(t).Mount("/dev/shm")
	if m == nil || m.Type != "tmpfs" || !slices.Contains(m.Super, "size=65536k") {
		t.Errorf("/dev/shm is %+v, want a tmpfs of 64 MiB", m)
	}
	for _, option := range []string{"nosuid", "nodev", "noexec"} {
		if m != nil && !slices.Contains(m.Options, option) {
			t.Errorf("/dev/shm is mounted %v, without %s", m.Options, option)
		}
	}
}

func TestSysctlsHoldInsideThePodOnly(t *testing.T) {
	t.Parallel()
	w := shared(t)
	sysctls := map[string]string{
		"net.ipv4.ip_unprivileged_port_start": "81",
		"net.ipv4.ip_local_port_range":        "20000 30000",
		"kernel.shm_rmid_forced":              "1",
		"kernel.msgmax":                       "12345",
	}
	before := hostSysctls(t, w, sysctls)
	p := w.run(t, "crun", func(c *cri.PodSandboxConfig) { c.Linux.Sysctls = sysctls })
	c := p.start(t, "sleep")
	for name, want := range sysctls {
		got := c.exec(t, "cat /proc/sys/"+strings.ReplaceAll(name, ".", "/"))
		equal(t, name, strings.Join(strings.Fields(got), " "), want)
	}
	if after := hostSysctls(t, w, sysctls); !maps.Equal(before, after) {
		t.Errorf("the node's own sysctls changed from %v to %v", before, after)
	}
}

func hostSysctls(t *testing.T, w *world, names map[string]string) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := w.Do(func() error {
		for name := range names {
			data, err := os.ReadFile("/proc/sys/" + strings.ReplaceAll(name, ".", "/"))
			if err != nil {
				return err
			}
			out[name] = string(data)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestLabelsAndAnnotationsComeBackUnaltered(t *testing.T) {
	t.Parallel()
	w := shared(t)
	strange := map[string]string{
		"empty value":               "",
		"unicode/ключ":              "значение 🐳",
		"lines":                     "a\nb\r\n\tc\x00d",
		"long":                      strings.Repeat("x", 200_000),
		"io.kubernetes.pod.name":    "not the name",
		"run.oci.keep_original":     "1",
		"org.systemd.property.Exec": "'evil'",
	}
	p := w.run(t, "runc", func(c *cri.PodSandboxConfig) { c.Labels, c.Annotations = strange, strange })
	c := p.create(t, "sleep", func(c *cri.ContainerConfig) { c.Labels, c.Annotations = strange, strange })
	check := func(t *testing.T, what string, got map[string]string) {
		t.Helper()
		if !maps.Equal(got, strange) {
			t.Errorf("%s came back altered:\n got %.2000q\nwant %.2000q", what, got, strange)
		}
	}
	check(t, "labels of the pod", p.status(t).Labels)
	check(t, "annotations of the pod", p.status(t).Annotations)
	check(t, "labels of the container", c.status(t).Labels)
	check(t, "annotations of the container", c.status(t).Annotations)

	pods, err := w.Runtime().ListPodSandbox(t.Context(), &cri.ListPodSandboxRequest{Filter: &cri.PodSandboxFilter{Id: p.id}})
	if err != nil || len(pods.Items) != 1 {
		t.Fatalf("ListPodSandbox: %v, %v", pods, err)
	}
	check(t, "labels of the listed pod", pods.Items[0].Labels)
	check(t, "annotations of the listed pod", pods.Items[0].Annotations)
}

func TestPodStatusTellsTheRequest(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "crun", func(c *cri.PodSandboxConfig) { c.Metadata.Attempt = 3 })
	s := p.status(t)
	equal(t, "id", s.Id, p.id)
	equal(t, "metadata", fmt.Sprint(s.Metadata), fmt.Sprint(p.config.Metadata))
	equal(t, "state", s.State, cri.PodSandboxState_SANDBOX_READY)
	equal(t, "runtime handler", s.RuntimeHandler, "crun")
	equal(t, "namespace options", fmt.Sprint(s.Linux.Namespaces.Options), fmt.Sprint(p.config.Linux.SecurityContext.NamespaceOptions))
	if s.CreatedAt <= 0 {
		t.Errorf("created at %d, want nanoseconds", s.CreatedAt)
	}
	p.stop(t)
	equal(t, "state after StopPodSandbox", p.status(t).State, cri.PodSandboxState_SANDBOX_NOTREADY)
	equal(t, "creation time after StopPodSandbox", p.status(t).CreatedAt, s.CreatedAt)
}
