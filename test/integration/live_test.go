package integration

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
)

// What is used per pod, container or session takes effect without a restart; crius reload says what
// does. A pod that was there before keeps what it was made with.
func TestReloadIsAboutWhatIsMadeAfterwards(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{Config: "[pod]\nshm_size = 2097152\n"})
	old := w.run(t, handlers[1])
	audit := w.Path("audit.log")
	if err := w.Configure("20-live", "[pod]\nshm_size = 3145728\ndefault_env = ['LIVE=yes']\npids_limit = 77\n[image]\nvolumes = 'ignore'\n[api]\naudit = 'all'\naudit_file = '"+audit+"'\nmax_message_size = 8388608\n"); err != nil {
		t.Fatal(err)
	}
	argv := w.Argv("reload")
	out, err := exec.CommandContext(t.Context(), argv[0], argv[1:]...).CombinedOutput()
	if want := "changed: api.audit\nchanged: api.audit_file\nchanged: image.volumes\nchanged: pod.default_env\nchanged: pod.pids_limit\nchanged: pod.shm_size\n" +
		"needs a restart: api.max_message_size (the connections of clients are made with it)\n"; err != nil || string(out) != want {
		t.Errorf("%v: %s, want %s", err, out, want)
	}
	for p, size := range map[*pod]string{old: "size=2048k", w.run(t, handlers[1]): "size=3072k"} {
		c := p.start(t, "sleep")
		mounts := c.procfs(t, "mountinfo")
		if line, _, _ := strings.Cut(mounts[strings.Index(mounts, " /dev/shm "):], "\n"); !strings.Contains(line, size) {
			t.Errorf("/dev/shm is %s, want %s", line, size)
		}
		if env := c.procfs(t, "environ"); !strings.Contains(env, "LIVE=yes") { // in older pods as well
			t.Errorf("the environment is %q", env)
		}
		endsWith(t, c.session(t, w.spdy(), "exit 0"), 0)
	}
	wait.For(t, "both records", func() bool {
		text, _ := os.ReadFile(audit)
		return strings.Count(string(text), `"verb":"exec"`) == 2
	})
}
