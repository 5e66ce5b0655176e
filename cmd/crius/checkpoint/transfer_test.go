package checkpoint

import (
	"context"
	"crypto/elliptic"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/cmd/crius/cli"
	"github.com/crius-run/crius/cmd/crius/config"
	"github.com/crius-run/crius/internal/flock"
	"github.com/crius-run/crius/pod"
	"github.com/crius-run/crius/storage/checkpoint"
	"github.com/crius-run/crius/storage/checkpoint/remote"
	"github.com/crius-run/crius/test/kit/criserver"
	"github.com/crius-run/crius/test/kit/distribution"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/registry"
)

// An argument of crius restore is a directory if it exists as one, or begins as no artifact's name does.
func TestIsDirectory(t *testing.T) {
	t.Chdir(t.TempDir())
	must(t, os.Mkdir("web", 0o700))
	must(t, os.WriteFile("file", nil, 0o600))
	for arg, want := range map[string]bool{
		"web": true, "web/": true, "/missing": true, "./missing": true, "../missing": true, ".": true, "missing": false, "file": false, "r.test/web:1": false, "": false,
	} {
		if got := isDirectory(arg); got != want {
			t.Errorf("%q is a directory: %v, want %v", arg, got, want)
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func names(t *testing.T, dir string) (all []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	must(t, err)
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all
}

// A directory that a killed run has left is removed by the next one. One that another run, or a server that still
// writes a checkpoint, has locked is not.
func TestScratchDirectoriesAreSwept(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	var held [2]*scratch
	for i := range held {
		s, err := newScratch(t.Context(), root)
		must(t, err)
		held[i] = s
	}
	killed, served := held[0], held[1]
	for _, s := range held {
		must(t, os.MkdirAll(filepath.Join(s.path, podName, "c1"), 0o700))
		must(t, os.WriteFile(filepath.Join(s.path, podName, "c1", "pages-1.img"), []byte("memory"), 0o600))
		must(t, flock.Release(s.lock)) // as when its process dies
	}
	must(t, os.Symlink("/etc", filepath.Join(root, remote.Transfers, "link")))
	target, err := checkpoint.OpenTarget(filepath.Join(served.path, podName))
	must(t, err)
	must(t, target.Claim())
	live, err := newScratch(t.Context(), root)
	must(t, err)
	if info, err := os.Stat(live.path); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("%v, %v", info, err)
	}
	if got := names(t, filepath.Join(root, remote.Transfers)); len(got) != 2 {
		t.Errorf("there are %q, want %s and %s, without %s", got, live.path, served.path, killed.path)
	}
	target.Close()
	last, err := newScratch(t.Context(), root)
	must(t, err)
	must(t, last.remove(t.Context()))
	if got := names(t, filepath.Join(root, remote.Transfers)); len(got) != 1 || got[0] != filepath.Base(live.path) {
		t.Errorf("left: %q, want %s", got, live.path)
	}
	must(t, live.remove(t.Context()))
	if got := names(t, root); len(got) > 0 {
		t.Errorf("left: %q", got)
	}
}

// shipping writes checkpoints of the pod default/web, and restores them.
type shipping struct {
	restoring
	t     *testing.T
	root  string
	wrote string // the directory of the last checkpoint
	fails error
	files []string // that a restore has seen
	keys  string   // image.decryption_keys_path
}

// configure writes the configuration of a node that reaches registries.
func (s *shipping) configure(registries ...string) {
	s.t.Helper()
	var conf strings.Builder
	for _, r := range registries {
		fmt.Fprintf(&conf, "[[registry]]\nlocation = %q\ninsecure = true\n", r)
	}
	must(s.t, os.WriteFile(filepath.Join(s.root, "registries.conf"), []byte(conf.String()), 0o600))
	must(s.t, os.WriteFile(filepath.Join(s.root, "policy.json"), []byte(`{"default": [{"type": "insecureAcceptAnything"}]}`), 0o600))
}

func (s *shipping) ListContainers(context.Context, *cri.ListContainersRequest) (*cri.ListContainersResponse, error) {
	return &cri.ListContainersResponse{Containers: []*cri.Container{{Id: "c1", PodSandboxId: "p1", Metadata: &cri.ContainerMetadata{Name: "main"}, State: cri.ContainerState_CONTAINER_RUNNING}}}, nil
}

func (s *shipping) CheckpointPod(_ context.Context, r *cri.CheckpointPodRequest) (*cri.CheckpointPodResponse, error) {
	s.wrote = r.OutputPath
	if s.fails != nil {
		return nil, s.fails
	}
	return &cri.CheckpointPodResponse{}, os.CopyFS(r.OutputPath, os.DirFS(signedPod(s.t, s.root, request)))
}

func (s *shipping) RestorePod(ctx context.Context, r *cri.RestorePodRequest) (*cri.RestorePodResponse, error) {
	s.files = names(s.t, r.CheckpointPath)
	if info, err := os.Stat(filepath.Dir(r.CheckpointPath)); err != nil || info.Mode().Perm() != 0o700 {
		s.t.Errorf("%v, %v", info, err)
	}
	return s.restoring.RestorePod(ctx, r)
}

// ran runs a command with the configuration of a node in root.
func ran(t *testing.T, s *shipping, command func(cli.Load) *cobra.Command, args ...string) (out, errs string, err error) {
	t.Helper()
	var stdout, stderr strings.Builder
	cmd := command(func(*cobra.Command) (*config.Loaded, error) {
		cfg := config.Default()
		cfg.API.Listen, cfg.Root = criserver.Serve(t, s, s), s.root
		cfg.Image.RegistriesConf, cfg.Image.SignaturePolicy = filepath.Join(s.root, "registries.conf"), filepath.Join(s.root, "policy.json")
		cfg.Image.DecryptionKeysPath = s.keys
		return &config.Loaded{Config: cfg}, nil
	})
	cmd.SilenceUsage, cmd.SilenceErrors = true, true
	cmd.SetArgs(args)
	cmd.SetOut(&stdout)
	cmd.SetErr(&stderr)
	err = cmd.ExecuteContext(t.Context())
	if _, missing := os.Stat(filepath.Join(s.root, remote.Transfers)); !errors.Is(missing, os.ErrNotExist) {
		t.Errorf("%q left %q", args, names(t, filepath.Join(s.root, remote.Transfers)))
	}
	return stdout.String(), stderr.String(), err
}

// A checkpoint goes to a registry and a pod comes from it, with the credentials of the command line. Nothing is left
// on the node, but what --output names.
func TestPushAndRestore(t *testing.T) {
	t.Parallel()
	r := distribution.Start(t, func(config distribution.Section) { config["auth"] = distribution.Htpasswd(t) })
	front := r.Front()
	front.Inject(registry.Fault{Path: "/manifests/", Do: registry.Status(500)})
	s := &shipping{t: t, root: t.TempDir()}
	s.configure(r.Address, front.Addr())
	ref, creds, output := r.Address+"/pods/web:1", "--creds="+distribution.Username+":"+distribution.Password, filepath.Join(t.TempDir(), "kept")

	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"web", "--push", ref}, "push " + ref + ": "},
		{[]string{"web", "--push", ref, "--creds=joe:wrong"}, "give some with --creds or --auth-file"},
		{[]string{"web", "--push", "pods/web:1"}, "does not name a registry"},
		{[]string{"web", "--push", ""}, "--push is empty"},
		{[]string{"web", "main", "--push", ref}, "--push is for pods"},
		{[]string{"web", creds}, "credentials are for --push"},
		{[]string{"web", "--encrypt", "key.pub"}, "--encrypt is for --push"},
		{[]string{"web", "--push", ref, creds, "--encrypt", "/missing/key.pub"}, "--encrypt: "},
	} {
		if out, _, err := ran(t, s, Command, c.args...); err == nil || !strings.Contains(err.Error(), c.want) || out != "" || s.wrote != "" {
			t.Errorf("%q: %v, printed %q, wrote %q, want %q", c.args, err, out, s.wrote, c.want)
		}
	}
	s.fails = errors.New("the disk is full")
	if _, _, err := ran(t, s, Command, "web", "--push", ref, creds); err == nil || !strings.Contains(err.Error(), "the disk is full") {
		t.Errorf("a checkpoint that fails: %v", err)
	}
	s.fails = nil
	name, shown, err := ran(t, s, Command, "web", "--push", ref, creds)
	name = strings.TrimSpace(name)
	if err != nil || !strings.HasPrefix(name, r.Address+"/pods/web@sha256:") || !strings.HasPrefix(s.wrote, filepath.Join(s.root, remote.Transfers)+"/") || shown != "pushing "+ref+"\n" {
		t.Fatalf("%v, printed %q, showed %q, wrote %s", err, name, shown, s.wrote)
	}
	if _, _, err := ran(t, s, Command, "web", "--push", ref, creds, "--output", output); err != nil || s.wrote != output || len(names(t, output)) != 4 {
		t.Errorf("with --output: %v, wrote %s", err, s.wrote)
	}

	late := filepath.Join(t.TempDir(), "late")
	if _, _, err := ran(t, s, Command, "web", "--push", front.Addr()+"/pods/web:1", creds, "--output", late); err == nil || !strings.Contains(err.Error(), "the checkpoint is complete in "+late) || len(names(t, late)) != 4 {
		t.Errorf("a push that fails at its end: %v", err)
	}

	for _, from := range []string{ref, name} {
		s.restoring = restoring{}
		out, shown, err := ran(t, s, RestoreCommand, from, creds, "--name", "copy")
		if err != nil || out != "r1\n" || len(s.asked) != 2 || len(s.files) != 4 || len(s.req.Options[pod.OptionManifest]) != 64 || s.req.Config.Metadata.Name != "copy" || shown != "pulling "+from+"\n" {
			t.Errorf("restore %s: %v, printed %q, showed %q, asked %q with %q", from, err, out, shown, s.asked, s.files)
		}
	}
	s.restoring = restoring{fail: "restore"}
	if _, _, err := ran(t, s, RestoreCommand, ref, creds, "--name", "copy"); err == nil || !strings.Contains(err.Error(), "the disk is full") {
		t.Errorf("a restore that fails: %v", err)
	}
	s.restoring = restoring{}
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{ref}, "give some with --creds or --auth-file"},
		{[]string{r.Address + "/pods/web:2", creds}, "pull " + r.Address + "/pods/web:2: "},
		{[]string{"web-2026"}, "does not name a registry"},
		{[]string{output, creds}, "credentials are for registries"},
		{[]string{output, "--decrypt", "key"}, "--decrypt is for registries"},
	} {
		if out, _, err := ran(t, s, RestoreCommand, c.args...); err == nil || !strings.Contains(err.Error(), c.want) || out != "" || len(s.asked) > 0 {
			t.Errorf("%q: %v, printed %q, asked %q, want %q", c.args, err, out, s.asked, c.want)
		}
	}
	stranger := &shipping{t: t, root: t.TempDir()}
	must(t, os.CopyFS(stranger.root, os.DirFS(s.root)))
	must(t, os.Remove(filepath.Join(stranger.root, checkpoint.KeyFile)))
	if _, _, err := ran(t, stranger, RestoreCommand, ref, creds); err == nil || !strings.Contains(err.Error(), "was not signed by this node or by a key of runtime.restore_keys") || len(stranger.asked) > 0 {
		t.Errorf("a node that does not trust the first: %v", err)
	}
}

// An encrypted checkpoint is restored with the key of the command line, or else of the configuration.
func TestPushAndRestoreEncrypted(t *testing.T) {
	t.Parallel()
	r := distribution.Start(t, nil)
	s := &shipping{t: t, root: t.TempDir()}
	s.configure(r.Address)
	private, public, err := image.NewKey(elliptic.P256())
	must(t, err)
	key, pub, keys, ref := filepath.Join(t.TempDir(), "key"), filepath.Join(t.TempDir(), "pub"), t.TempDir(), r.Address+"/pods/web:1"
	must(t, os.WriteFile(key, private, 0o600))
	must(t, os.WriteFile(pub, public, 0o600))
	must(t, os.WriteFile(filepath.Join(keys, "key"), private, 0o600))
	_, _, err = ran(t, s, Command, "web", "--push", ref, "--encrypt", pub)
	must(t, err)
	for _, c := range []struct {
		configured string
		args       []string
		want       string
	}{
		{"", nil, "the checkpoint is encrypted: give its private key with --decrypt, or set image.decryption_keys_path"},
		{"", []string{"--decrypt", pub}, "keys in " + pub + " (--decrypt): "},
		{keys, []string{"--decrypt", filepath.Join(keys, "missing")}, "(--decrypt): "},
		{"", []string{"--decrypt", key}, ""},
		{keys, nil, ""},
	} {
		s.keys, s.restoring = c.configured, restoring{}
		out, _, err := ran(t, s, RestoreCommand, append(c.args, ref, "--name", "copy")...)
		if c.want == "" && (err != nil || out != "r1\n") || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want) || len(s.asked) > 0) {
			t.Errorf("%q with %q: %v, printed %q, want %q", c.args, c.configured, err, out, c.want)
		}
	}
}
