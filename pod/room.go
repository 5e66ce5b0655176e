package pod

import (
	"crypto/rand"
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

// bundleRest is how much a bundle has apart from the texts of the request: mostly the seccomp
// profile.
const bundleRest = 64 << 10

// claimRoom claims the room in the pod that the container may need with a spec of specSize
// bytes.
func (c *Container) claimRoom(specSize int) error {
	s := c.sandbox
	need := rundir.Use{
		Files:    2 * int64(specSize+bundleRest), // some runtimes keep a copy
		Requests: int64(proto.Size(c.plan.Config.M)),
	}
	if err := s.claim(c.ID, need); err != nil {
		return fmt.Errorf("pod %s (%s) has no room for the container: %w", s.ID, records.NameOfPod(s.plan.Config.M.GetMetadata()), err)
	}
	return nil
}

// claimExec claims the room that the files of a command need, until free is called.
func (s *Sandbox) claimExec(bytes int) (free func(), err error) {
	id := rand.Text()
	if err := s.claim(id, rundir.Use{Files: int64(bytes)}); err != nil {
		return nil, fmt.Errorf("pod %s (%s) has no room for the command: %w", s.ID, records.NameOfPod(s.plan.Config.M.GetMetadata()), err)
	}
	return func() { s.room.Free(id) }, nil
}

// claim claims room. Before it refuses, it shortens the bundles of containers that have just
// exited.
func (s *Sandbox) claim(id string, need rundir.Use) error {
	err := s.room.Claim(id, need, s.use)
	if err == nil {
		return nil
	}
	for _, c := range s.Now().containers {
		if c.Now().exit != nil {
			c.shorten()
		}
	}
	return s.room.Claim(id, need, s.use)
}

// use measures what the pod uses.
func (s *Sandbox) use() rundir.Use {
	used := rundir.Use{Files: rundir.Size(s.files.Dir, filepath.Join(s.runtime.Handler().Root, s.ID))}
	for _, c := range s.Now().containers {
		one := c.use()
		used.Files += one.Files
		used.Requests += one.Requests
	}
	return used
}

func (c *Container) use() rundir.Use {
	return rundir.Use{
		Files:    rundir.Size(c.ref.Dir, filepath.Join(c.runtime.Handler().Root, c.ID)),
		Requests: int64(proto.Size(c.plan.Config.M)),
	}
}

// shorten removes what nobody reads from the bundle of an exited container.
func (c *Container) shorten() {
	c.shortening.Lock()
	defer c.shortening.Unlock()
	if c.Now().Phase == records.Removing { // its files are being removed
		return
	}
	if err := trace.Call(c.engine.background.Closing(), "shorten bundle", c.shortenBundle); err != nil {
		slog.Warn("cannot shorten the bundle of an exited container", "container", c.ID, "err", err)
	}
}

// shortenBundle shortens the bundle, and crun's copy of it.
func (c *Container) shortenBundle() error {
	handler := c.runtime.Handler()
	if c.sandbox.plan.Sandboxed || handler.Type != "oci" {
		return nil // these runtimes read it when they delete the container
	}
	return errors.Join(oci.ShortenSpec(c.ref.Dir), oci.ShortenSpec(filepath.Join(handler.Root, c.ID)))
}
