package main

import (
	"context"
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// ask calls f with the server that the configuration names.
func ask(ctx context.Context, socket string, f func(context.Context, cri.RuntimeServiceClient) error) error {
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)))
	if err != nil {
		return fmt.Errorf("server at %s: %w", socket, err)
	}
	defer conn.Close()
	if err := f(ctx, cri.NewRuntimeServiceClient(conn)); err != nil {
		return fmt.Errorf("server at %s: %w", socket, err)
	}
	return nil
}
