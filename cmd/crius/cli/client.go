package cli

import (
	"context"
	"errors"
	"fmt"
	"net"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	grpcstatus "google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Server is the CRI API of a server.
type Server struct {
	cri.RuntimeServiceClient
	cri.ImageServiceClient
}

// Ask connects to the server at a socket and calls f with it.
func Ask(ctx context.Context, socket string, f func(context.Context, Server) error) error {
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)))
	if err != nil {
		return fmt.Errorf("server at %s: %w", socket, err)
	}
	defer conn.Close()
	err = f(ctx, Server{cri.NewRuntimeServiceClient(conn), cri.NewImageServiceClient(conn)})
	if err == nil {
		return nil
	}
	if away := Unserved(ctx, socket); away != nil {
		return away
	}
	if answer, ok := grpcstatus.FromError(err); ok {
		err = errors.New(answer.Message())
	}
	return fmt.Errorf("server at %s: %w", socket, err)
}

// Unserved returns an error with advice if no server can be reached at the socket.
func Unserved(ctx context.Context, socket string) error {
	conn, err := new(net.Dialer).DialContext(ctx, "unix", socket)
	switch {
	case err == nil:
		return conn.Close()
	case errors.Is(err, unix.EACCES):
		return fmt.Errorf("server at %s: permission denied: run as root", socket)
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ECONNREFUSED):
		return fmt.Errorf("no server at %s: start it (systemctl start crius); if it has ended, its log says why (journalctl -u crius)", socket)
	}
	return nil
}
