package pod

import (
	"errors"
	"fmt"
	"path/filepath"

	"google.golang.org/protobuf/proto"

	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/pod/records"
	"github.com/crius-run/crius/pod/rundir"
)

// bundleRest is what a bundle has beside its texts: the seccomp profile, mostly.
const bundleRest = 64 << 10

// claimRoom takes the room in its pod that a container may need with a spec of that size.
func claimRoom(s *Sandbox, c *Container, specSize int) error {
	need := rundir.Use{
		Files:    2 * int64(specSize+bundleRest), // some runtimes keep a copy
		Requests: int64(proto.Size(c.plan.Config.M)),
	}
	root := s.runtime.Handler().Root
	paths := []string{s.files.Dir, filepath.Join(root, s.id)}
	var used rundir.Use
	for _, other := range s.now().containers {
		paths = append(paths, other.ref.Dir, filepath.Join(root, other.id))
		used.Requests += int64(proto.Size(other.plan.Config.M))
	}
	used.Files = rundir.Size(paths...)
	if err := s.room.Claim(c.id, need, used); err != nil {
		return fmt.Errorf("pod %s (%s) has no room for the container: %w", s.id, records.NameOfPod(s.plan.Config.M.GetMetadata()), err)
	}
	return nil
}

// shortenBundle gives back what nobody reads of the bundle of a container that has exited, and
// of the copy that crun has of it.
func shortenBundle(c *Container) error {
	handler := c.runtime.Handler()
	if c.sandbox.plan.Sandboxed || handler.Type != "oci" {
		return nil // these read it when they delete the container
	}
	return errors.Join(oci.ShortenSpec(c.ref.Dir), oci.ShortenSpec(filepath.Join(handler.Root, c.id)))
}
