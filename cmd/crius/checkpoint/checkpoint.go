// Package checkpoint writes checkpoints of containers and pods, and restores pods from them.
package checkpoint

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/cmd/crius/cli"
	"github.com/crius-run/crius/cmd/crius/credentials"
	"github.com/crius-run/crius/internal/fault"
)

// timeLimit is the default of --timeout.
const timeLimit = 10 * time.Minute

// Command is crius checkpoint.
func Command(load cli.Load) *cobra.Command {
	var output, push string
	var encrypt []string
	var timeout time.Duration
	var given credentials.Flags
	cmd := &cobra.Command{
		Use:   "checkpoint POD [CONTAINER]",
		Short: "Write a running container or pod to files",
		Long: "Have the running server write a running container, with its memory, to a new archive, or without CONTAINER all running containers of a pod, " +
			"as they are at one moment, to an empty directory, and print its path. " + cli.PodNames +
			". The containers are frozen meanwhile and continue afterwards. The files have all secrets of the processes. " +
			"With --push the pod's directory goes to a registry as an OCI artifact, from which crius restore takes it; its name by digest is printed, and the directory is kept only if --output names it. " +
			"Registries are used as for pulls. " +
			"Standard error shows what the server does: on a terminal continuously, else a line for each step. " +
			"If crius is interrupted, the server continues until the time limit.",
		Args:              cli.Operands,
		ValidArgsFunction: cli.CompleteContainer(load),
	}
	cmd.Flags().StringVar(&output, "output", "", "`path` of the archive, which must not exist, or of the pod's directory, which is created if it does not exist (default: a name made of the pod's and the time, in the current directory)")
	cmd.Flags().DurationVar(&timeout, "timeout", timeLimit, "time limit of the checkpoint; when it is exceeded, nothing is written")
	cmd.Flags().StringVar(&push, "push", "", "push the checkpoint of the pod under this `name`, with its registry and a tag")
	cmd.Flags().StringArrayVar(&encrypt, "encrypt", nil, "`file` with a public key (RSA or EC; PEM, DER or JWK): with --push, only owners of the private key can read the memory and files of the checkpoint in the registry; may be repeated for several recipients")
	given.Add(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		usage := func(text string, args ...any) error {
			return cli.UsageError{Err: fmt.Errorf(text, args...), Command: cmd.CommandPath()}
		}
		switch pushes := cmd.Flags().Changed("push"); {
		case timeout < time.Second:
			return usage("--timeout is %s: give a second or more", timeout)
		case pushes && push == "":
			return usage("--push is empty: give the name of an artifact, such as registry.example/checkpoints/web:1")
		case pushes && len(args) == 2:
			return usage("--push is for pods: leave out the container")
		case !pushes && len(encrypt) > 0:
			return usage("--encrypt is for --push: files on this node are not encrypted")
		case !pushes && given.Any(cmd):
			return usage("credentials are for --push")
		}
		loaded, err := load(cmd)
		if err != nil {
			return err
		}
		w := writer{output: output, encrypt: encrypt, timeout: timeout, progress: cmd.ErrOrStderr()}
		var printed string
		if push != "" {
			auth, err := given.Read(cmd, push)
			if err != nil {
				return err
			}
			printed, err = w.push(cmd.Context(), args[0], push, loaded.Config, auth)
			if err != nil {
				return errors.New(fault.Text(err))
			}
		} else {
			write := w.pod
			if len(args) == 2 {
				write = func(ctx context.Context, pod string) (string, error) { return w.container(ctx, pod, args[1]) }
			}
			if printed, err = w.asked(cmd.Context(), loaded.Config.API.Listen, args[0], write); err != nil {
				return err
			}
		}
		_, err = fmt.Fprintln(cmd.OutOrStdout(), printed)
		return err
	}
	return cmd
}

// writer has the server write a checkpoint.
type writer struct {
	server   cli.Server
	output   string   // empty: a name in the current directory
	encrypt  []string // files with the public keys for a push
	timeout  time.Duration
	progress io.Writer
}

// asked connects to the server for write, and returns the path of what it has written.
func (w *writer) asked(ctx context.Context, socket, pod string, write func(context.Context, string) (string, error)) (path string, err error) {
	err = cli.Ask(ctx, socket, func(ctx context.Context, server cli.Server) error {
		w.server = server
		path, err = write(ctx, pod)
		return err
	})
	return path, err
}

// container returns the path of the archive.
func (w *writer) container(ctx context.Context, pod, name string) (string, error) {
	pods, err := cli.FindPods(ctx, w.server, pod)
	if err != nil {
		return "", err
	}
	id, err := cli.FindContainer(ctx, w.server, pod, name)
	if err != nil {
		return "", err
	}
	path, err := w.path(pods[0].GetMetadata(), "-"+name, ".tar")
	if err != nil {
		return "", err
	}
	return path, watched(ctx, w.server, id, w.progress, func(ctx context.Context) error {
		_, err := w.server.CheckpointContainer(ctx, &cri.CheckpointContainerRequest{ContainerId: id, Location: path, Timeout: int64(w.timeout.Seconds())})
		return err
	})
}

// pod returns the path of the directory.
func (w *writer) pod(ctx context.Context, name string) (string, error) {
	pods, err := cli.FindPods(ctx, w.server, name)
	if err != nil {
		return "", err
	}
	pod := pods[0]
	all, err := w.server.ListContainers(ctx, &cri.ListContainersRequest{Filter: &cri.ContainerFilter{PodSandboxId: pod.Id}})
	if err != nil {
		return "", err
	}
	var ids []string
	for _, c := range all.Containers {
		if c.PodSandboxId == pod.Id && c.State == cri.ContainerState_CONTAINER_RUNNING {
			ids = append(ids, c.Id)
		}
	}
	if len(ids) == 0 {
		return "", fmt.Errorf("no container of pod %s is running", cli.Printable(cli.PodName(pod.GetMetadata())))
	}
	path, err := w.path(pod.GetMetadata(), "", "")
	if err != nil {
		return "", err
	}
	err = os.Mkdir(path, 0o700)
	made := err == nil
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return "", err
	}
	err = watched(ctx, w.server, pod.Id, w.progress, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, w.timeout)
		defer cancel()
		_, err := w.server.CheckpointPod(ctx, &cri.CheckpointPodRequest{PodSandboxId: pod.Id, OutputPath: path, ContainerIds: ids})
		return err
	})
	if err != nil && made && ctx.Err() == nil {
		_ = os.Remove(path) // which does nothing if it has files
	}
	return path, err
}

// path returns the absolute path of what is to be written.
func (w *writer) path(pod *cri.PodSandboxMetadata, container, suffix string) (string, error) {
	name := fmt.Sprintf("checkpoint-%s_%s%s-%s%s", pod.GetName(), pod.GetNamespace(), container, time.Now().UTC().Format("20060102T150405Z"), suffix)
	path := cmp.Or(w.output, strings.ReplaceAll(name, "/", "_"))
	if strings.HasSuffix(path, "/") && suffix != "" {
		return "", fmt.Errorf("--output is %q: give the path of a file that does not exist", path)
	}
	return filepath.Abs(path)
}
