package pod

import (
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"

	"google.golang.org/protobuf/proto"

	"github.com/crius-run/crius/internal/trace"
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

// shorten gives back what nobody reads of the bundle of a container that has exited.
func (c *Container) shorten() {
	c.life.Lock()
	defer c.life.Unlock()
	if c.now().Phase == records.Removing { // its files are going
		return
	}
	if err := trace.Call(c.engine.background.Closing(), "shorten bundle", c.shortenBundle); err != nil {
		slog.Warn("cannot shorten the bundle of an exited container", "container", c.id, "err", err)
	}
}

// shortenBundle shortens the bundle, and the copy that crun has of it.
func (c *Container) shortenBundle() error {
	handler := c.runtime.Handler()
	if c.sandbox.plan.Sandboxed || handler.Type != "oci" {
		return nil // these read it when they delete the container
	}
	return errors.Join(oci.ShortenSpec(c.ref.Dir), oci.ShortenSpec(filepath.Join(handler.Root, c.id)))
}
