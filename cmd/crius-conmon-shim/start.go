package main

import (
	"context"
	"encoding/json"
	"os"

	"github.com/crius-run/crius/conmon/shim"
)

// start has the shim start the container, and prints how that went. The server has a process do it
// that outlives it: a shim ends what it does for a caller that dies, and gVisor's then reports that
// the container has ended with an unknown status.
func start(ctx context.Context, p shim.Program) error {
	return json.NewEncoder(os.Stdout).Encode(shim.Outcome(startBy(ctx, p)))
}

func startBy(ctx context.Context, p shim.Program) error {
	r, err := shim.ReadRecord(p.Dir)
	if err != nil {
		return err
	}
	client, err := r.Reach(ctx)
	if err != nil {
		return err
	}
	defer client.Close()
	_, err = client.Start(ctx, shim.Process{ID: p.ID})
	return err
}
