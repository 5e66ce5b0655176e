package cli

import (
	"context"
	"encoding/json"
	"fmt"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/pod"
)

// Vitals decodes parts of the server's report of itself, which a verbose Status has as JSON.
func Vitals(ctx context.Context, server Server, parts any) error {
	status, err := server.Status(ctx, &cri.StatusRequest{Verbose: true})
	if err != nil {
		return err
	}
	if err := json.Unmarshal([]byte(status.Info["server"]), parts); err != nil {
		return fmt.Errorf("the server's status cannot be parsed (is it another runtime, or older than this client?): %w", err)
	}
	return nil
}

// Checkpoints returns the checkpoints that are under way, none if the server does not report them.
func Checkpoints(ctx context.Context, server Server) []pod.Checkpointing {
	var vitals struct{ Checkpoints []pod.Checkpointing }
	if err := Vitals(ctx, server, &vitals); err != nil {
		return nil
	}
	return vitals.Checkpoints
}
