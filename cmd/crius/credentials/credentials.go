// Package credentials reads the credentials for a registry that are given on the command line.
package credentials

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/pkg/docker/config"
	"go.podman.io/image/v5/types"
	"golang.org/x/term"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/cmd/crius/cli"
)

// longestPassword is more bytes than tokens of registries have.
const longestPassword = 64 << 10

// Flags say where the credentials for the registry of one image come from. Without any those of the
// node are used.
type Flags struct {
	user          string // with or without a password behind a colon
	passwordStdin bool
	authFile      string
}

// Add adds the flags to a command.
func (c *Flags) Add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&c.user, "creds", "", "user for the image's registry; the password is asked for on the terminal, or read with --password-stdin; USER:PASSWORD is accepted as well, but other users of the machine can see it")
	cmd.Flags().BoolVar(&c.passwordStdin, "password-stdin", false, "read the password of --creds from standard input")
	cmd.Flags().StringVar(&c.authFile, "auth-file", "", "file of credentials, as podman login and docker login write it (containers-auth.json(5))")
	cmd.MarkFlagsMutuallyExclusive("creds", "auth-file")
}

// Any reports whether one of the flags was given.
func (c *Flags) Any(cmd *cobra.Command) bool {
	return cmd.Flags().Changed("creds") || cmd.Flags().Changed("password-stdin") || cmd.Flags().Changed("auth-file")
}

// Read returns the credentials for an image. They are only for its registry, which the name
// must include: a short name may mean several.
func (c *Flags) Read(cmd *cobra.Command, image string) (*cri.AuthConfig, error) {
	flags := cmd.Flags()
	switch { // an empty variable in a script must not select the node's credentials
	case flags.Changed("creds") && c.user == "":
		return nil, errors.New("--creds is empty: give USER, or leave it out to use the node's credentials")
	case flags.Changed("auth-file") && c.authFile == "":
		return nil, errors.New("--auth-file is empty: give a file, or leave it out to use the node's credentials")
	case c.user == "" && c.authFile == "":
		if c.passwordStdin {
			return nil, errors.New("--password-stdin needs --creds USER")
		}
		return nil, nil
	}
	name, err := reference.ParseNormalizedNamed(image)
	if err != nil {
		return nil, fmt.Errorf("image %q: %w", image, err)
	}
	registry := reference.Domain(name)
	if !strings.HasPrefix(image, registry+"/") {
		return nil, fmt.Errorf("image %q: credentials need a name with its registry, such as %s", image, name)
	}
	auth := &cri.AuthConfig{ServerAddress: registry}
	if c.authFile != "" {
		return auth, c.fromFile(name, auth)
	}
	var given bool
	auth.Username, auth.Password, given = strings.Cut(c.user, ":")
	switch {
	case auth.Username == "":
		return nil, errors.New("--creds: no user before the colon")
	case given && c.passwordStdin:
		return nil, errors.New("--creds has a password: leave it out, or --password-stdin")
	case c.passwordStdin:
		auth.Password, err = readPassword(cmd.InOrStdin())
	case !given:
		auth.Password, err = askPassword(cmd, auth.Username, registry)
	}
	if err == nil && auth.Password == "" {
		err = errors.New("the password is empty")
	}
	return auth, err
}

func (c *Flags) fromFile(name reference.Named, auth *cri.AuthConfig) error {
	if _, err := os.Stat(c.authFile); err != nil { // the library treats a missing file as empty
		return fmt.Errorf("--auth-file: %w", err)
	}
	found, err := config.GetCredentialsForRef(&types.SystemContext{AuthFilePath: c.authFile}, name)
	if err != nil {
		return fmt.Errorf("--auth-file %s: %w", c.authFile, err)
	}
	if found == (types.DockerAuthConfig{}) {
		return fmt.Errorf("--auth-file %s: no credentials for %s", c.authFile, name.Name())
	}
	auth.Username, auth.Password, auth.IdentityToken = found.Username, found.Password, found.IdentityToken
	return nil
}

// readPassword reads in to its end and drops the final newline.
func readPassword(in io.Reader) (string, error) {
	text, err := io.ReadAll(io.LimitReader(in, longestPassword+1))
	if err != nil {
		return "", fmt.Errorf("read password: %w", err)
	}
	if len(text) > longestPassword {
		return "", fmt.Errorf("read password: standard input has more than %d bytes", longestPassword)
	}
	return strings.TrimSuffix(strings.TrimSuffix(string(text), "\n"), "\r"), nil
}

// askPassword prompts for the password and does not echo it.
func askPassword(cmd *cobra.Command, user, registry string) (string, error) {
	terminal, ok := cmd.InOrStdin().(*os.File)
	if !ok || !term.IsTerminal(int(terminal.Fd())) {
		return "", errors.New("no terminal to ask for the password on: use --password-stdin")
	}
	fmt.Fprintf(cmd.ErrOrStderr(), "password of %s at %s: ", cli.Printable(user), registry)
	defer fmt.Fprintln(cmd.ErrOrStderr())
	return typed(cmd.Context(), int(terminal.Fd()))
}

// typed reads a line with echo off, and turns echo on again before it returns. If ctx ends
// first, the reading goroutine stays behind, since the program ends then.
func typed(ctx context.Context, fd int) (string, error) {
	before, err := term.GetState(fd)
	if err != nil {
		return "", fmt.Errorf("read password: %w", err)
	}
	type line struct {
		text []byte
		err  error
	}
	read := make(chan line, 1)
	go func() {
		text, err := term.ReadPassword(fd)
		read <- line{text, err}
	}()
	select {
	case l := <-read:
		if l.err != nil {
			return "", fmt.Errorf("read password: %w", l.err)
		}
		return string(l.text), nil
	case <-ctx.Done():
		return "", errors.Join(errors.New("interrupted"), term.Restore(fd, before))
	}
}
