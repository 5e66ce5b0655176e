// Package caller learns which process makes a call of gRPC over a unix socket.
package caller

import (
	"context"
	"net"

	"google.golang.org/grpc/credentials"
	grpcpeer "google.golang.org/grpc/peer"

	"github.com/crius-run/crius/internal/peer"
)

// info is the process at the other end of a connection.
type info struct {
	credentials.CommonAuthInfo
	peer.Process
}

// AuthType implements credentials.AuthInfo.
func (info) AuthType() string { return "unix" }

// Of returns the process that makes the call of ctx, as it was when it connected; zero if it is
// unknown.
func Of(ctx context.Context) peer.Process {
	if p, ok := grpcpeer.FromContext(ctx); ok {
		if c, ok := p.AuthInfo.(info); ok {
			return c.Process
		}
	}
	return peer.Process{}
}

// Credentials returns those of a server that asks the kernel who calls. They exchange nothing
// with the client. The permissions of the socket decide who may call.
func Credentials() credentials.TransportCredentials { return kernel{} }

type kernel struct{}

func (kernel) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return conn, info{credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}, peer.Caller(conn)}, nil
}

// ClientHandshake is never called: only servers have these credentials.
func (kernel) ClientHandshake(_ context.Context, _ string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return conn, info{}, nil
}

func (kernel) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "unix"}
}
func (kernel) Clone() credentials.TransportCredentials { return kernel{} }
func (kernel) OverrideServerName(string) error         { return nil }
