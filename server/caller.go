package server

import (
	"context"
	"net"

	"google.golang.org/grpc/credentials"
	grpcpeer "google.golang.org/grpc/peer"

	"github.com/crius-run/crius/internal/peer"
)

// caller is the process at the other end of a connection to the CRI socket, as the kernel
// knows it. Its name is one that the process has chosen. It is zero if it is unknown.
type caller struct {
	credentials.CommonAuthInfo
	peer.Process
}

// AuthType implements credentials.AuthInfo.
func (caller) AuthType() string { return "unix" }

// callerOf returns who makes the call of ctx.
func callerOf(ctx context.Context) peer.Process {
	if p, ok := grpcpeer.FromContext(ctx); ok {
		if c, ok := p.AuthInfo.(caller); ok {
			return c.Process
		}
	}
	return peer.Process{}
}

// callers are transport credentials that exchange nothing and learn who calls. The permissions
// of the socket decide who may.
type callers struct{}

func (callers) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return conn, caller{credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}, peer.Caller(conn)}, nil
}

// ClientHandshake is never called: only servers have callers.
func (callers) ClientHandshake(_ context.Context, _ string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return conn, caller{}, nil
}

func (callers) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "unix"}
}
func (callers) Clone() credentials.TransportCredentials { return callers{} }
func (callers) OverrideServerName(string) error         { return nil }
