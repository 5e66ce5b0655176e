package spec

import (
	"encoding/json"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// TestSeccompCalls asks the kernel which calls the default profile lets
// through. Outside a container every call reaches the kernel, which answers
// differently: that shows that the test can distinguish.
func TestSeccompCalls(t *testing.T) {
	kernel := callsOfThisKernel(t)
	confined := map[string]string{
		"mount": "EPERM", "unshare user": "EPERM", "setns": "EPERM", "keyctl": "EPERM",
		"add_key": "EPERM", "request_key": "EPERM", "io_uring_setup": "EPERM", "perf_event_open": "EPERM",
		"chroot": "EPERM", "quotactl": "EPERM", "userfaultfd": "EPERM",
		"clone user": "ENOSYS", "clone3": "ENOSYS", "personality odd": "ENOSYS",
		"socket alg": "ENOSYS", "socket alg high bits": "ENOSYS", "socket vsock": "ENOSYS",
	}
	for call, answer := range confined {
		if kernel[call] == answer {
			t.Errorf("%s: the kernel itself says %s, which proves nothing", call, answer)
		}
	}
	with := func(answers map[string]string, allowed ...[]string) map[string]string {
		want := maps.Clone(answers)
		for _, call := range slices.Concat(allowed...) {
			want[call] = kernel[call]
		}
		return want
	}
	harmless := []string{
		"ptrace", "process_vm_readv", "personality which", "memfd_create", "socket inet", "socket unix", "socket netlink",
		"socket qipcrtr", "getpid",
	}
	admin := []string{"mount", "unshare user", "setns", "clone user", "clone3", "quotactl", "perf_event_open"}
	everything := slices.Collect(maps.Keys(confined))
	profile := &cri.SecurityProfile{ProfileType: cri.SecurityProfile_RuntimeDefault}
	for _, c := range []struct {
		name    string
		profile *cri.SecurityProfile
		add     []string
		want    map[string]string
	}{
		{"unconfined", nil, nil, with(confined, harmless, everything)},
		{"default", profile, nil, with(confined, harmless)},
		{"admin", profile, []string{"SYS_ADMIN"}, with(confined, harmless, admin)},
		{"all capabilities", profile, []string{"ALL"}, with(confined, harmless, admin, []string{"chroot"})},
	} {
		for _, rt := range runtimes(t) {
			t.Run(rt.name+"/"+c.name, func(t *testing.T) {
				t.Parallel()
				n := newNode(t)
				in := n.realize(t, typical(), rt)
				in.Request.Container.Args = []string{"calls"}
				sc := in.Request.Container.Linux.SecurityContext
				sc.Seccomp = c.profile
				sc.Capabilities = &cri.Capability{AddCapabilities: c.add}
				s, err := Container(in)
				if err != nil {
					t.Fatal(err)
				}
				got := map[string]string{}
				rt.run(t, n, s, &got, nil)
				for call, want := range c.want {
					if got[call] != want {
						t.Errorf("%s: %s, want %s", call, got[call], want)
					}
				}
			})
		}
	}
}

// callsOfThisKernel is what the probe reports when nothing confines it.
func callsOfThisKernel(t *testing.T) map[string]string {
	t.Helper()
	cmd := exec.Command(probePath(t), "calls")
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		cmd.Process.Kill()
		cmd.Wait()
	}()
	answers := map[string]string{}
	if err := json.NewDecoder(stdout).Decode(&answers); err != nil {
		t.Fatal(err)
	}
	return answers
}

// TestSeccompOrdinaryPrograms: a shell, its tools and an interpreter do their
// everyday work under the default profile, as a user without capabilities.
func TestSeccompOrdinaryPrograms(t *testing.T) {
	const script = `set -e
cd /tmp
mkdir -p a/b; echo hello > a/b/c; ln -s b a/l; chmod 600 a/b/c; touch -d 2001-01-01 a/b/c
seq 1 2000 | sort -rn | head -n 3 | tr '\n' ' '
find a -type l | xargs readlink
tar cf - a | gzip -c | gunzip -c | tar tf - | wc -l
(sleep 0.05; exit 3) & wait $! || echo "exit $?"
mkfifo f; (echo through > f &); cat f
trap 'echo trapped' USR1; kill -USR1 $$
nice -n 5 id -u
timeout 0.05 sleep 5 || echo "timed out $?"
stat -c %a a/b/c; df -P / > /dev/null; ps_pid=$$; test -d /proc/$ps_pid
perl -e 'use Socket; socketpair(my $a, my $b, AF_UNIX, SOCK_STREAM, 0) or die; if (!fork) { syswrite $b, "pair"; exit } sysread $a, my $x, 4; wait; print "$x\n"'
perl -e 'use IO::Socket::INET; my $l = IO::Socket::INET->new(Listen => 1, LocalAddr => "127.0.0.1") or die $@; if (!fork) { my $c = IO::Socket::INET->new(PeerAddr => "127.0.0.1", PeerPort => $l->sockport) or die; print $c "tcp\n"; exit } my $c = $l->accept; print scalar <$c>; wait'
echo done
`
	const want = `2000 1999 1998 b
4
exit 3
through
trapped
1000
timed out 124
600
pair
tcp
done
`
	programs := []string{
		"sh", "mkdir", "ln", "chmod", "touch", "seq", "sort", "head", "tr", "find", "xargs", "readlink", "tar", "gzip",
		"gunzip", "wc", "sleep", "mkfifo", "cat", "nice", "id", "timeout", "stat", "df", "perl",
	}
	for _, rt := range runtimes(t) {
		t.Run(rt.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			for _, name := range programs {
				installProgram(t, n.rootfs, name)
			}
			installTree(t, n.rootfs, "perl-base")
			in := n.realize(t, typical(), rt)
			restricted(&in)
			in.Request.Container.Linux.SecurityContext.ReadonlyRootfs = false
			in.Request.Image.Env = nil
			in.Request.Container.Command = []string{"sh", "-c", script}
			s, err := Container(in)
			if err != nil {
				t.Fatal(err)
			}
			if s.Linux.Seccomp == nil {
				t.Fatal("no profile")
			}
			var got string
			rt.run(t, n, s, &got, nil)
			if got != want {
				t.Errorf("got:\n%s", got)
			}
		})
	}
}

// installProgram copies a program of the machine and the libraries that it
// names.
func installProgram(t *testing.T, rootfs, name string) {
	t.Helper()
	path := lookPath(t, name)
	copyProgram(t, path, filepath.Join(rootfs, "bin", name))
	out, err := exec.Command("ldd", path).Output()
	if err != nil {
		return // a script
	}
	for field := range strings.FieldsSeq(string(out)) {
		if strings.HasPrefix(field, "/") {
			copyProgram(t, field, filepath.Join(rootfs, field))
		}
	}
}

// installTree copies the regular files of a Debian package's libraries.
func installTree(t *testing.T, rootfs, pkg string) {
	t.Helper()
	out, err := exec.Command("dpkg", "-L", pkg).Output()
	if err != nil {
		t.Fatal(err)
	}
	for name := range strings.FieldsSeq(string(out)) {
		if info, err := os.Lstat(name); err == nil && info.Mode().IsRegular() && strings.Contains(name, "/lib/") {
			copyProgram(t, name, filepath.Join(rootfs, name))
		}
	}
}
