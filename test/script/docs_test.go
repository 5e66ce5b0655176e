package script

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/crius-run/crius/test/images"
)

const repository = "../.."

// walked are the pages whose commands are run, in this order, on one node.
var walked = []string{"README.md", "docs/install.md", "docs/upgrade.md", "docs/troubleshoot.md", "docs/registries.md", "docs/network.md", "docs/metrics.md", "docs/migrate.md", "docs/operate.md", "docs/logging.md", "docs/confine.md", "docs/gpu.md", "docs/swap.md"}

// runnable are the programs that a test node has.
var runnable = []string{"crius", "crictl", "install", "mkdir", "cat", "rm", "curl", "jq", "["}

// elsewhere are the statements that a test node cannot run, by a part of each,
// with the reason or the test that runs them.
var elsewhere = []struct{ part, why string }{
	{"make ", "what builds and tests; TestDocumentedTargets looks for the target"},
	{"apt-get install ./", "test/packages.sh installs, upgrades and removes packages, test/node the service"},
	{"apt-get install --allow-downgrades", "the same"},
	{"apt-get purge", "the same"},
	{"apt-get install -y runc", "the node's packages come from test/setup.sh"},
	{"tar -xzf bin/packages", "test/packages.sh"},
	{"/install.sh", "test/packages.sh"},
	{"install -m 755 bin/", "the programs of the tests are elsewhere"},
	{"systemctl ", "a test node has no systemd; test/node runs the service"},
	{"journalctl ", "the same"},
	{"nft list", "its output is for people; the tests of network/hostport read such tables"},
	{"crictl inspectp POD", "a place for an id; crictl_test.go inspects pods"},
	{"CONTAINER", "a place for an id"},
	{"crius logs -f", "it follows the log until it is interrupted; crictl_test.go has logs"},
	{"memory.swap.max", "a place for a cgroup; test/integration looks at limits of swap"},
	{"crius.service.d", "a test node has no systemd"},
	{"/etc/systemd/system/crio.service", "the same"},
	{"nvidia-ctk ", "there is no GPU; the files that it writes are in cmd/crius/config/testdata"},
	{"aa-status", "the test machine may have no AppArmor; test/node has"},
	{"getenforce", "the test machine may have no SELinux; test/node has"},
	{"ps -eZ", "the same"},
	{"ausearch ", "the same"},
	{"aws ecr", "there is no cloud"},
	{"ssh-keygen -Y verify", "there is no release; release_test.go verifies a signature"},
	{"sha256sum -c", "the same"},
	{"k3s agent", "there is no k3s, as the page says"},
	{"sleep ", "what it waits for is a kubelet; test/node has one"},
	{"skopeo login", "it asks for a password; the tests of storage pull with such a file"},
	{"kubectl ", "there is no cluster; test/cluster has one, and drains nothing"},
	{"/run/crio/crio.sock", "there is no CRI-O"},
	{"oras push", "no such program; test/kit/image makes such artifacts, which test/integration mounts"},
	{"skopeo copy docker-archive:", "test/integration shares the store with skopeo"},
	{"skopeo copy --encryption-key", "there is no registry to push to; the tests of storage pull what ocicrypt has encrypted"},
	{"/mnt/models", "there is no shared disk; the tests of storage/artifact use such a directory"},
	{"crius checkpoint ", "there may be no criu; TestCheckpointCommand of test/integration"},
	{"crius restore ", "there may be no criu; TestRestoreCommand of test/integration"},
	{"openssl genrsa", "keys of another node; TestPushAndRestoreEncrypted of cmd/crius/checkpoint makes some"},
	{"ssh -L", "there is no other machine"},
	{"$ curl", "a session with its output; TestHealth of server/metrics"},
	{"RuntimeReady is false", "the output of that session"},
	{"crius --runtime-cgroup-driver", "a server; the node's own runs"},
	{"crictl exec -it", "a terminal, which stream_test.go has"},
}

// surroundings is a shell on a node, as far as commands see it: a private /etc,
// in which other runtimes are configured, the files of the package, and the
// node's crius.
const surroundings = `
set -euo pipefail
cd "$1"
mkdir -p etc/upper etc/work tmp
mount -t overlay -o lowerdir=/etc,upperdir="$1/etc/upper",workdir="$1/etc/work" overlay /etc
mount -t tmpfs doc /usr/share/doc
rm -rf /etc/cni /etc/crio /etc/containerd # of what this machine has installed
samples=/usr/share/doc/crius/examples
mkdir -p /etc/crius/crius.toml.d /etc/sysctl.d /etc/modules-load.d /etc/containerd $samples
cp "$2"/contrib/{crictl.yaml,policy.json,registries.conf} $samples
cp "$2"/contrib/sysctl.d/99-crius.conf $samples/sysctl.conf
cp "$2"/contrib/modules-load.d/crius.conf $samples/modules-load.conf
cp -r "$2"/cmd/crius/config/testdata/crio-installers /etc/crio
cp "$2"/cmd/crius/config/testdata/containerd/v3.toml /etc/containerd/config.toml
ln -s "$2"/contrib contrib
server=($3) crictl=($4)
crius() {
	if [ "$1" = wipe ]; then set -- "$@" --yes; fi
	"${server[@]}" "$@"
}
crictl() { "${crictl[@]}" "$@"; }
curl() { command curl -fsS --retry 60 --retry-delay 1 --retry-connrefused "$@"; }
set -x
`

// The commands in the documents do on a node what the documents say.
func TestDocumentedCommandsRun(t *testing.T) {
	s := open(t)
	web, err := images.Build(func(c *imagespec.ImageConfig) { c.Cmd = []string{"serve", ":80", "hello"} })
	if err != nil {
		t.Fatal(err)
	}
	s.node.Registry.Push("library/nginx", "latest", web)
	if err := s.node.Write("crictl.yaml", "runtime-endpoint: unix://{{.Socket}}\n"); err != nil {
		t.Fatal(err)
	}
	err = s.node.Registries("[[registry]]\nprefix = \"docker.io\"\nlocation = \"127.0.0.1:5000\"\ninsecure = true\n")
	if err != nil {
		t.Fatal(err)
	}
	ran := 0
	for _, page := range walked {
		text, err := os.ReadFile(filepath.Join(repository, page))
		if err != nil {
			t.Fatal(err)
		}
		var script strings.Builder
		for _, statement := range statements(string(text)) {
			if fits(statement) {
				ran++
				fmt.Fprintln(&script, statement)
			}
		}
		s.follow(t, page, script.String())
	}
	if ran < 40 {
		t.Errorf("only %d statements ran", ran)
	}
}

// follow runs the script of a page in its own surroundings.
func (s *shell) follow(t *testing.T, page, script string) {
	t.Helper()
	dir := s.node.Path("walk", strings.ReplaceAll(page, "/", "-"))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	source, err := filepath.Abs(repository)
	if err != nil {
		t.Fatal(err)
	}
	script = strings.NewReplacer("/tmp/", dir+"/tmp/", "/run/crius/", s.node.RunRoot()+"/").Replace(script)
	cmd := exec.CommandContext(t.Context(), "unshare", "--mount", "bash", "-c", surroundings+script, "bash",
		dir, source, strings.Join(s.node.Argv(), " "), strings.Join(append([]string{s.crictl}, s.args("")...), " "))
	var out []byte
	err = s.node.Do(func() (err error) {
		out, err = cmd.CombinedOutput()
		return err
	})
	if err != nil {
		t.Errorf("%s: %v: %s", page, err, out[max(0, len(out)-3000):])
	}
}

var (
	shellBlock = regexp.MustCompile("(?ms)^ *```sh\n(.*?)^ *```")
	hereDoc    = regexp.MustCompile(`<<'?(\w+)'?`)
	comment    = regexp.MustCompile(`(^|\s)#.*`)
	beginning  = regexp.MustCompile(`(?:^|\$\(|[|;]|&&)\s*(?:\w+=\$\()?\s*([\w./-]+|\[)`)
)

// statements returns the lines of a page's shell scripts; lines that belong
// together are joined.
func statements(page string) []string {
	var all, one []string
	for _, block := range shellBlock.FindAllStringSubmatch(page, -1) {
		indent := block[1][:len(block[1])-len(strings.TrimLeft(block[1], " "))]
		end := ""
		for line := range strings.SplitSeq(strings.TrimSuffix(block[1], "\n"), "\n") {
			line = strings.TrimPrefix(line, indent)
			one = append(one, line)
			if here := hereDoc.FindStringSubmatch(line); end == "" && here != nil {
				end = here[1]
			}
			if end != "" && line != end || end == "" && strings.HasSuffix(line, `\`) {
				continue
			}
			all, one, end = append(all, strings.Join(one, "\n")), nil, ""
		}
	}
	return all
}

// fits reports whether a statement can be run on a test node.
func fits(statement string) bool {
	first, _, _ := strings.Cut(strings.ReplaceAll(statement, "\\\n", " "), "\n")
	programs := beginning.FindAllStringSubmatch(comment.ReplaceAllString(first, ""), -1)
	for _, program := range programs {
		if !slices.Contains(runnable, program[1]) {
			return false
		}
	}
	return len(programs) > 0 && reason(statement) < 0
}

// reason returns the index in elsewhere for a statement; -1: none.
func reason(statement string) int {
	for i, e := range elsewhere {
		if strings.Contains(statement, e.part) {
			return i
		}
	}
	return -1
}

// documents returns all pages with shell commands for operators and developers.
func documents(t *testing.T) map[string]string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(repository, "docs", "*.md"))
	if err != nil || len(found) < 10 {
		t.Fatalf("%d pages, %v", len(found), err)
	}
	for _, name := range []string{"README.md", "CONTRIBUTING.md", "RELEASES.md", "SECURITY.md"} {
		found = append(found, filepath.Join(repository, name))
	}
	pages := map[string]string{}
	for _, path := range found {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		pages[strings.TrimPrefix(path, repository+"/")] = string(text)
	}
	return pages
}

// Every command in every document is run here, or is known not to be, with the
// reason.
func TestEveryDocumentedCommandIsKnown(t *testing.T) {
	t.Parallel()
	used := map[int]bool{}
	for page, text := range documents(t) {
		for _, statement := range statements(text) {
			i := reason(statement)
			used[i] = true
			comment := strings.HasPrefix(statement, "#") || statement == ""
			if runs := fits(statement) && slices.Contains(walked, page); i < 0 && !runs && !comment {
				t.Errorf("%s: %q is not run: add the page to walked, or the reason to elsewhere", page, statement)
			}
		}
	}
	for i, e := range elsewhere {
		if !used[i] {
			t.Errorf("no document has %q any more", e.part)
		}
	}
}

var (
	makeCall   = regexp.MustCompile("`make (?:-j )?([a-z][a-z0-9-]*)|(?m)^ *make ([a-z][a-z0-9-]*)")
	makeTarget = regexp.MustCompile(`(?m)^([a-z0-9-]+):`)
)

// Targets that documents make exist.
func TestDocumentedTargets(t *testing.T) {
	t.Parallel()
	file, err := os.ReadFile(filepath.Join(repository, "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	targets := map[string]bool{}
	for _, found := range makeTarget.FindAllStringSubmatch(string(file), -1) {
		targets[found[1]] = true
	}
	calls := 0
	for page, text := range documents(t) {
		for _, found := range makeCall.FindAllStringSubmatch(text, -1) {
			calls++
			if target := found[1] + found[2]; !targets[target] {
				t.Errorf("%s: there is no target %q", page, target)
			}
		}
	}
	if calls < 40 {
		t.Errorf("only %d calls of make were found", calls)
	}
}

func TestStatementsOfDocuments(t *testing.T) {
	t.Parallel()
	got := statements("text\n```sh\ncrius check   # says | what\n```\n- item\n\n  ```sh\n  cat > f <<'EOF'\n  crius\n  EOF\n  apt-get install \\\n    runc\n  ```\n```toml\nx = 1\n```\n")
	want := []string{"crius check   # says | what", "cat > f <<'EOF'\ncrius\nEOF", "apt-get install \\\n  runc"}
	if !slices.Equal(got, want) {
		t.Errorf("statements are %q, want %q", got, want)
	}
	for statement, runs := range map[string]bool{
		want[0]: true, want[1]: true, want[2]: false,
		"pod=$(crictl runp pod.json)":                       true,
		"crius config | grep root":                          false,
		"crictl exec -it $ctr sh":                           false,
		"curl http://$(crictl inspectp $pod | jq -r .ip)":   true,
		"systemctl stop kubelet":                            false,
		"[ -e /etc/x ] || install -D a b && apt-get update": false,
		"# a comment":                                       false,
	} {
		if fits(statement) != runs {
			t.Errorf("%q runs: %v, want %v", statement, !runs, runs)
		}
	}
}
