package switchover

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/crius-run/crius/cmd/crius/config"
	"github.com/crius-run/crius/cmd/crius/config/foreign"
	"github.com/crius-run/crius/cmd/crius/diagnosis"
)

// The unit of CRI-O's packages.
const crioUnit = "[Unit]\nDescription=CRI-O\n[Service]\nType=notify\nEnvironmentFile=-/etc/sysconfig/crio\nEnvironment=GOTRACEBACK=crash\n" +
	"ExecStart=/usr/bin/crio \\\n  $CRIO_CONFIG_OPTIONS \\\n  $CRIO_STORAGE_OPTIONS\nTasksMax=infinity\nLimitNOFILE=1048576\nLimitNPROC=1048576\nLimitCORE=infinity\n"

const criusUnit = "[Service]\nExecStart=/usr/bin/crius serve\nEnvironmentFile=-/etc/default/crius\nLimitNOFILE=1024:1048576\nLimitNPROC=infinity\n"

// What the service of CRI-O sets beside its files is not lost without a word.
func TestSwitchReadsTheServiceOfCrio(t *testing.T) {
	t.Parallel()
	const unit, dropIn, ours = "usr/lib/systemd/system/crio.service", "etc/systemd/system/crio.service.d/", "usr/lib/systemd/system/crius.service"
	const limits = `pod.default_ulimits = ["core=unlimited", "nofile=1048576"]` + "\n"
	for name, c := range map[string]struct {
		crius string
		files map[string]string
		want  []string // beginnings of what is said; an OK without any
		not   string
		do    string // the advice of the first
	}{
		"no unit":     {},
		"as packaged": {crius: limits, files: map[string]string{unit: crioUnit}},
		"limits that containers inherit": {files: map[string]string{unit: crioUnit},
			want: []string{"containers of CRI-O inherit LimitCORE=infinity, LimitNOFILE=1048576 of crio.service (/usr/lib/systemd/system/crio.service)"},
			do:   `add "core=unlimited", "nofile=1048576" to pod.default_ulimits, if pods rely on them`},
		"limits that a drop-in takes away": {files: map[string]string{unit: crioUnit, dropIn + "limits.conf": "[Service]\nLimitNOFILE=\nLimitCORE=\n"}},
		"a limit of a drop-in": {crius: limits, files: map[string]string{unit: crioUnit, dropIn + "rdma.conf": "[Service]\nLimitMEMLOCK=64M:infinity\n"},
			want: []string{"containers of CRI-O inherit LimitMEMLOCK=64M:infinity of crio.service (/etc/systemd/system/crio.service.d/rdma.conf)"},
			do:   `add "memlock=67108864:unlimited" to pod.default_ulimits, if pods rely on them`},
		"flags by variables": {crius: limits, files: map[string]string{unit: crioUnit, "etc/sysconfig/crio": "# a comment\nCRIO_STORAGE_OPTIONS=\"--storage-driver vfs\"\nCRIO_OLD_OPTIONS=\n"},
			want: []string{"crio.service runs it with --storage-driver vfs (/usr/lib/systemd/system/crio.service): flags win"},
			do:   "put what they set into the configuration files, and convert those again"},
		"metrics by a flag, minikube#4087": {crius: limits, files: map[string]string{unit: crioUnit, "etc/sysconfig/crio": "CRIO_CONFIG_OPTIONS=\"--enable-metrics\"\n"},
			want: []string{"crio.service runs it with --enable-metrics ("}},
		"flags of a drop-in": {crius: limits, files: map[string]string{unit: crioUnit, dropIn + "10-own.conf": "[Service]\nExecStart=\nExecStart=/usr/bin/crio --read-only '--default-env=A=b c'\n",
			"usr/lib/systemd/system/crio.service.d/10-own.conf": "[Service]\nExecStart=/usr/bin/crio --hidden\n"},
			want: []string{"crio.service runs it with --read-only --default-env=A=b c (/etc/systemd/system/crio.service.d/10-own.conf): flags win"}, not: "hidden"},
		"flags that are variables": {crius: limits, files: map[string]string{unit: crioUnit, dropIn + "x.conf": "[Service]\nEnvironment=\"CONTAINER_READ_ONLY=true\" CONTAINER_PIDS_LIMIT=5\n"},
			want: []string{"crio.service sets CONTAINER_PIDS_LIMIT, CONTAINER_READ_ONLY (/etc/systemd/system/crio.service.d/x.conf): variables win"}},
		"a proxy": {crius: limits, files: map[string]string{unit: crioUnit, dropIn + "proxy.conf": "[Service]\nEnvironment=HTTPS_PROXY=http://user:secret@proxy\nEnvironment=NO_PROXY=.svc\n"},
			want: []string{"crio.service sets HTTPS_PROXY, NO_PROXY (/etc/systemd/system/crio.service.d/proxy.conf), which crius.service does not"}, not: "secret",
			do: "set them in /etc/default/crius, if crius needs them"},
		"a proxy that crius has": {crius: limits, files: map[string]string{unit: crioUnit, "etc/sysconfig/crio": "HTTPS_PROXY=http://proxy\n", "etc/default/crius": "HTTPS_PROXY='http://proxy'\n"}},
		"variables that a drop-in takes away": {crius: limits, files: map[string]string{unit: crioUnit + "Environment=HTTPS_PROXY=x\nEnvironmentFile=/etc/other\n", "etc/other": "A=b\n",
			dropIn + "none.conf": "[Service]\nEnvironment=\nEnvironmentFile=\n"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			files := map[string]string{ours: criusUnit}
			maps.Copy(files, kubeletHere)
			maps.Copy(files, c.files)
			var said []diagnosis.Finding
			for _, f := range switched(t, crioHere, c.crius+criusHere, files) {
				if f.Check == "service" {
					said = append(said, f)
				}
				if c.not != "" && strings.Contains(f.Text, c.not) {
					t.Errorf("%+v contains %q", f, c.not)
				}
			}
			if len(c.want) == 0 && (len(said) != 1 || said[0].Status != diagnosis.StatusOK) {
				t.Errorf("%+v", said)
			}
			if len(c.want) > 0 && !slices.EqualFunc(said, c.want, func(f diagnosis.Finding, want string) bool {
				return f.Status == diagnosis.StatusWarn && strings.HasPrefix(f.Text, want)
			}) {
				t.Errorf("%+v, want %q", said, c.want)
			}
			if c.do != "" && said[0].Do != c.do {
				t.Errorf("the advice is %q, want %q", said[0].Do, c.do)
			}
		})
	}
}

// On a node on which crius stands for CRI-O a link hides CRI-O's unit, which is still the one to compare.
func TestUnitBehindALinkToCrius(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	for path, text := range map[string]string{"usr/lib/systemd/system/crio.service": crioUnit, "usr/lib/systemd/system/crius.service": criusUnit} {
		path = filepath.Join(root, path)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	link := filepath.Join(root, "etc/systemd/system/crio.service")
	if err := errors.Join(os.MkdirAll(filepath.Dir(link), 0o755), os.Symlink("../../../usr/lib/systemd/system/crius.service", link)); err != nil {
		t.Fatal(err)
	}
	u := readUnit(root, "crio.service")
	if u.exec.File != "/usr/lib/systemd/system/crio.service" || len(u.arguments) > 0 {
		t.Errorf("%+v", u)
	}
}

// containerd runs no hooks, and crius those that are on the node.
func TestSwitchFromContainerdNamesHooks(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	c := comparison{Comparison: &config.Comparison{Import: &foreign.Import{Of: "containerd"}}}
	c.Theirs.Runtime.HooksDir = []string{dir}
	if f := c.hooks(t.Context()); len(f) != 1 || f[0].Status != diagnosis.StatusOK {
		t.Errorf("without hooks: %+v", f)
	}
	hook := `{"version": "1.0.0", "hook": {"path": "/bin/true"}, "when": {"always": true}, "stages": ["prestart"]}`
	if err := os.WriteFile(filepath.Join(dir, "a.json"), []byte(hook), 0o600); err != nil {
		t.Fatal(err)
	}
	if f := c.hooks(t.Context()); len(f) != 1 || f[0].Status != diagnosis.StatusWarn || f[0].Do != "set runtime.hooks_dir = [] to go on without them" {
		t.Errorf("with a hook: %+v", f)
	}
}
