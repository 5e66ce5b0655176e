package checkpoint

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/cmd/crius/cli"
	"github.com/crius-run/crius/cmd/crius/config"
	"github.com/crius-run/crius/cmd/crius/credentials"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/pod"
	"github.com/crius-run/crius/pod/records"
	"github.com/crius-run/crius/storage/checkpoint"
)

// RestoreCommand is crius restore.
func RestoreCommand(load cli.Load) *cobra.Command {
	var r restorer
	var given credentials.Flags
	cmd := &cobra.Command{
		Use:   "restore DIR|REF",
		Short: "Restore a pod from a checkpoint",
		Long: "Have the running server make a pod from the checkpoint of one, start its containers where they were, and print the pod's id. " +
			"The checkpoint is in a directory, as crius checkpoint POD writes it, or an artifact in a registry, as crius checkpoint --push does. " +
			"What begins with / or . is a directory, and so is what exists as one; a REF has its registry in front (registry.example/checkpoints/web:1). " +
			"The server must allow it (runtime.restore), and this node or a key of runtime.restore_keys must have signed the checkpoint, which also says how the pod and its containers were made. " +
			"While that pod still exists, give the new one another --name. The new one has a uid and logs of its own. Images that are missing are pulled. " +
			"It is for nodes without a kubelet, which removes pods that it does not know. " +
			"Standard error shows what the server does: on a terminal continuously, else a line for each step. If it fails, nothing is left of the pod.",
		Args: cli.Operands,
	}
	flags := cmd.Flags()
	flags.StringVar(&r.name, "name", "", "name of the new pod (default: that of the checkpoint)")
	flags.StringVar(&r.namespace, "namespace", "", "namespace of the new pod (default: that of the checkpoint)")
	flags.BoolVar(&r.start, "start", true, "start the containers; false: they stay created, and none of their processes runs before CRI's StartContainer")
	flags.DurationVar(&r.timeout, "timeout", timeLimit, "time limit of the restore, without the download of a REF; when it is exceeded, nothing is left of the pod")
	flags.StringVar(&r.decrypt, "decrypt", "", "`path` of a private key for an encrypted REF, or of a directory of such keys (default: image.decryption_keys_path)")
	given.Add(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if r.timeout < time.Second {
			return cli.UsageError{Err: fmt.Errorf("--timeout is %s: give a second or more", r.timeout), Command: cmd.CommandPath()}
		}
		loaded, err := load(cmd)
		if err != nil {
			return err
		}
		r.config, r.progress = loaded.Config, cmd.ErrOrStderr()
		restore := r.directory
		switch isDir := isDirectory(args[0]); {
		case isDir && r.decrypt != "":
			return cli.UsageError{Err: fmt.Errorf("%s is a directory: --decrypt is for registries", args[0]), Command: cmd.CommandPath()}
		case isDir && given.Any(cmd):
			return cli.UsageError{Err: fmt.Errorf("%s is a directory: credentials are for registries", args[0]), Command: cmd.CommandPath()}
		case !isDir:
			if r.auth, err = given.Read(cmd, args[0]); err != nil {
				return err
			}
			restore = r.artifact
		}
		id, err := restore(cmd.Context(), args[0])
		if err != nil {
			return err
		}
		_, err = fmt.Fprintln(cmd.OutOrStdout(), id)
		return err
	}
	return cmd
}

// restorer has the server restore a pod.
type restorer struct {
	server          cli.Server
	config          config.Config
	auth            *cri.AuthConfig // for the registry
	decrypt         string          // path of private keys; empty: those of the configuration
	name, namespace string          // empty: those of the checkpoint
	start           bool
	timeout         time.Duration
	progress        io.Writer
}

// artifact restores a pod from an artifact in a registry, and returns its id.
func (r *restorer) artifact(ctx context.Context, ref string) (id string, err error) {
	s, err := newScratch(ctx, r.config.Root)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, s.remove(ctx)) }()
	dir, err := r.fetch(ctx, ref, s)
	if err != nil {
		return "", errors.New(fault.Text(err))
	}
	return r.directory(ctx, dir)
}

// directory restores a pod from a directory, and returns its id.
func (r *restorer) directory(ctx context.Context, dir string) (id string, err error) {
	ctx, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	req, parts, err := r.request(dir)
	if err != nil {
		return "", errors.New(fault.Text(err))
	}
	rename(req, r.name, r.namespace)
	err = cli.Ask(ctx, r.config.API.Listen, func(ctx context.Context, server cli.Server) error {
		r.server = server
		id, err = r.restore(ctx, req, parts)
		return err
	})
	return id, err
}

// restore returns the id of the pod.
func (r *restorer) restore(ctx context.Context, req *cri.RestorePodRequest, parts []checkpoint.PodPart) (string, error) {
	if err := r.checkFree(ctx, req.GetConfig().GetMetadata()); err != nil {
		return "", err
	}
	for _, part := range parts {
		if err := r.pullMissing(ctx, part); err != nil {
			return "", fmt.Errorf("image of container %s: %w", cli.Printable(part.Name), said(err))
		}
	}
	var resp *cri.RestorePodResponse
	err := watched(ctx, r.server, records.NameOfPod(req.GetConfig().GetMetadata()).String(), r.progress, func(ctx context.Context) (err error) {
		resp, err = r.server.RestorePod(ctx, req)
		return err
	})
	if err != nil {
		return "", err
	}
	if r.start {
		err = r.startAll(ctx, resp)
	}
	return resp.GetPodSandboxId(), err
}

// request returns the request that the checkpoint in a directory signs for, and its containers.
func (r *restorer) request(dir string) (*cri.RestorePodRequest, []checkpoint.PodPart, error) {
	path, err := filepath.Abs(dir)
	if err == nil {
		path, err = filepath.EvalSymlinks(path) // the server follows none
	}
	if err != nil {
		return nil, nil, err
	}
	keys, err := checkpoint.TrustedKeys(r.config.Root, r.config.Runtime.RestoreKeys)
	if err != nil {
		return nil, nil, err
	}
	source, err := checkpoint.OpenSource(path, keys)
	if err != nil {
		return nil, nil, err
	}
	defer source.Close()
	req, err := pod.ReadRestoreRequest(source)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", path, err)
	}
	req.CheckpointPath = path
	req.Options = map[string]string{pod.OptionManifest: source.SHA256} // or it could be replaced until the server opens it
	return req, source.Manifest.Containers, nil
}

// Labels that kubelets and tools like crictl read.
const (
	labelName      = "io.kubernetes.pod.name"
	labelNamespace = "io.kubernetes.pod.namespace"
	labelUID       = "io.kubernetes.pod.uid"
)

// rename makes a request one for another pod than that of the checkpoint: with a uid and a directory of logs of its
// own, since the logs of that one do not continue. Empty names are kept.
func rename(req *cri.RestorePodRequest, name, namespace string) {
	c := req.GetConfig()
	if c.Metadata == nil {
		c.Metadata = &cri.PodSandboxMetadata{}
	}
	m := c.Metadata
	m.Name, m.Namespace, m.Uid = cmp.Or(name, m.Name), cmp.Or(namespace, m.Namespace), newUID()
	if c.LogDirectory != "" {
		c.LogDirectory = filepath.Join(filepath.Dir(c.LogDirectory), m.Namespace+"_"+m.Name+"_"+m.Uid)
	}
	now := map[string]string{labelName: m.Name, labelNamespace: m.Namespace, labelUID: m.Uid}
	relabel(c.Labels, now)
	for _, c := range req.GetContainerConfigs() {
		relabel(c.Labels, now)
	}
}

// relabel changes the labels that there are.
func relabel(labels, now map[string]string) {
	for key, value := range now {
		if _, there := labels[key]; there {
			labels[key] = value
		}
	}
}

// newUID returns a random UUID, as Kubernetes gives them to pods.
func newUID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// checkFree refuses the name of a pod that exists: whoever names it could not say which of them is meant.
func (r *restorer) checkFree(ctx context.Context, m *cri.PodSandboxMetadata) error {
	pods, err := r.server.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	if err != nil {
		return err
	}
	for _, p := range pods.GetItems() {
		if name := cli.PodName(m); cli.PodName(p.GetMetadata()) == name {
			return fmt.Errorf("pod %s already exists as %s: remove it, or choose another name with --name", cli.Printable(name), p.GetId())
		}
	}
	return nil
}

// pullMissing pulls the image of a container if the node does not have it.
func (r *restorer) pullMissing(ctx context.Context, part checkpoint.PodPart) error {
	there, err := r.server.ImageStatus(ctx, &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: part.ImageID}})
	if err != nil || there.GetImage() != nil {
		return err
	}
	if part.ImageRef == "" || part.ImageRef == part.ImageID {
		return fmt.Errorf("%s is not on this node, and the checkpoint does not say where it was pulled from: load it first", cli.Printable(part.ImageID))
	}
	fmt.Fprintf(r.progress, "pulling %s\n", cli.Printable(part.ImageRef))
	_, err = r.server.PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: part.ImageRef}})
	return err
}

// said returns what the server has said, without its code.
func said(err error) error {
	if answer, ok := status.FromError(err); ok && err != nil {
		return errors.New(answer.Message())
	}
	return err
}

// startAll starts the containers of a restored pod, or removes it.
func (r *restorer) startAll(ctx context.Context, resp *cri.RestorePodResponse) error {
	for _, c := range resp.GetRestoredContainers() {
		_, err := r.server.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: c.GetContainerId()})
		if err != nil {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), timeLimit)
			defer cancel()
			_, undo := r.server.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: resp.GetPodSandboxId()})
			return fmt.Errorf("start container %s: %w", cli.Printable(c.GetName()), errors.Join(said(err), said(undo)))
		}
	}
	return nil
}
