package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/crius-run/crius/cmd/crius/config"
	"github.com/crius-run/crius/server"
)

// facadeLink is a link in run_root to the socket of the façade for cAdvisor
// (docs/decisions/0008-crio-facade.md). By it the next server finds the socket that this
// one leaves.
const facadeLink = "crio-facade"

// placeFacade records the path of the façade's socket, "" for none, and removes the socket
// of an earlier path. It must be called before Listen.
func placeFacade(runRoot, socket string) error {
	link := filepath.Join(runRoot, facadeLink)
	old, err := os.Readlink(link)
	switch {
	case err != nil && !errors.Is(err, os.ErrNotExist):
		return err
	case old == socket:
		return nil
	case old != "":
		if err := errors.Join(server.Abandon(old), os.Remove(link)); err != nil {
			return fmt.Errorf("remove stale socket of a previous api.crio_socket: %w", err)
		}
	}
	if socket == "" {
		return nil
	}
	return os.Symlink(socket, link)
}

// tidyFacade is placeFacade, but only logs errors: serving is more important.
func tidyFacade(ctx context.Context, cfg config.Config) {
	if err := placeFacade(cfg.RunRoot, cfg.API.CrioSocket); err != nil {
		slog.WarnContext(ctx, "cannot remove leftovers of a previous api.crio_socket", "err", err)
	}
}
