package pod

import (
	"context"
	"errors"
	"fmt"

	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/oci/spec"
)

// lookUpUser resolves the user that the container runs as, and adds missing entries to passwd
// and group. It reads files of the image into memory, so only a few containers do this at the
// same time.
func (c *Container) lookUpUser(ctx context.Context, in *spec.Input) (spec.Identity, error) {
	select {
	case c.engine.userLookups <- struct{}{}:
		defer func() { <-c.engine.userLookups }()
	case <-ctx.Done():
		return spec.Identity{}, context.Cause(ctx)
	}
	imageUser := ""
	if in.Request.Image != nil {
		imageUser = in.Request.Image.User
	}
	user, err := spec.ResolveUser(c.ref.Rootfs(), c.plan.Config.M.GetLinux().GetSecurityContext(), imageUser)
	if err != nil {
		return user, fmt.Errorf("resolve user: %w", err)
	}
	if err := trace.Call(ctx, "add user to /etc/passwd", func() error { return nameUser(c.ref.Rootfs(), user, in.Home()) }); err != nil {
		return user, fmt.Errorf("add the user to /etc/passwd and /etc/group: %w", err)
	}
	return user, nil
}

// nameUser adds the user and group that the container runs as to its passwd and group files, if
// they are missing: many programs look up their own user, and images cannot contain user ids
// that a cluster allots.
func nameUser(rootfs string, user spec.Identity, home string) error {
	return errors.Join(
		spec.AddAccount(rootfs, "/etc/passwd", user.PasswdLine(home)),
		spec.AddAccount(rootfs, "/etc/group", user.GroupLine()),
	)
}
