package oci

import (
	"context"
	"errors"
	"path"

	"github.com/crius-run/crius/internal/cgroup"
)

// cgroups returns the cgroups that the container may have: Kata 1 makes others
// of the one that it is told.
func (r Ref) cgroups() []string {
	if r.Cgroup == "" { // its id alone is known
		return nil
	}
	return append([]string{r.Cgroup}, KataCgroups(r.Cgroup)...)
}

// kataPrefix is what Kata 1 puts before the name of a container's cgroup.
const kataPrefix = "kata_"

// KataCgroups returns the cgroups that Kata 1 makes of a container's: one in the
// same place and, for what it does not limit, another one below /vc.
func KataCgroups(cgroup string) []string {
	parent, name := path.Split(cgroup)
	limited := parent + kataPrefix + name
	return []string{limited, "/vc" + limited}
}

// removeCgroup removes the container's cgroups.
func removeCgroup(ctx context.Context, ref Ref) error { return ref.eachCgroup(ctx, cgroup.Remove) }

// emptyCgroup kills everything in the container's cgroups.
func emptyCgroup(ctx context.Context, ref Ref) error { return ref.eachCgroup(ctx, cgroup.Kill) }

func (r Ref) eachCgroup(ctx context.Context, do func(context.Context, string) error) error {
	there, err := cgroup.Existing(r.cgroups())
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range there {
		errs = append(errs, do(ctx, name))
	}
	return errors.Join(errs...)
}
