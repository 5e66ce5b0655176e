package cli

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
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
	answer, ok := grpcstatus.FromError(err)
	if ok && foreign(ctx, conn, answer) {
		return fmt.Errorf("%s does not serve CRI: name the socket of crius, api.listen (%s)", socket, answer.Message())
	}
	if ok {
		err = errors.New(answer.Message())
	}
	return fmt.Errorf("server at %s: %w", socket, err)
}

// foreign reports whether a socket accepts connections but speaks another protocol, so that no
// connection became ready.
func foreign(ctx context.Context, conn *grpc.ClientConn, answer *grpcstatus.Status) bool {
	if answer.Code() != codes.Unavailable || ctx.Err() != nil {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	conn.WaitForStateChange(ctx, connectivity.Connecting) // a call may end before the state changes
	return conn.GetState() == connectivity.TransientFailure
}

// Unserved returns an error with advice if no server can be reached at the socket.
func Unserved(ctx context.Context, socket string) error {
	conn, err := new(net.Dialer).DialContext(ctx, "unix", socket)
	switch {
	case err == nil:
		return conn.Close()
	case errors.Is(err, unix.EACCES):
		return fmt.Errorf("server at %s: permission denied: run as root", socket)
	case errors.Is(err, unix.ECONNREFUSED) && !isSocket(socket):
		return fmt.Errorf("%s is not a socket: name that of crius, api.listen", socket)
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ECONNREFUSED):
		return fmt.Errorf("no server at %s: start it (systemctl start crius); if it has ended, its log says why (journalctl -u crius)", socket)
	}
	return nil
}

// isSocket is true for a path that does not exist as well.
func isSocket(path string) bool {
	info, err := os.Stat(path)
	return err != nil || info.Mode()&os.ModeSocket != 0
}
