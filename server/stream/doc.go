// Package stream serves what the CRI calls streaming: exec, attach and
// port-forward. An RPC registers what is wanted and gets a URL with a token; the
// kubelet, or whoever it sends there, then speaks SPDY or WebSocket at that URL.
//
// # Tokens
//
// A token has 130 random bits, is good for one connection and for a minute, and
// only for the kind of session that it was given for. Without one there is
// nothing to be had here. At most a thousand wait at any time.
//
// # Protocols
//
// k8s.io/cri-streaming speaks them, by which kubelets and crictl of all ages are
// served as they expect: SPDY/3.1 with the subprotocols channel.k8s.io and its
// v2 to v4, the port-forward protocol, and both over WebSocket. Two things that
// the library leaves out stand here, on the same WebSocket package: the v5
// subprotocol, in which a client can end its input without ending the session,
// and SPDY inside a WebSocket for port-forward. Current clients ask for nothing
// else when they use WebSockets.
//
// # Sessions
//
// A session is one connection, and it ends with it: as soon as the client has
// closed, or the kernel has given it up, although nobody may be reading at that
// moment; see hangups. It also ends when the engine has nothing more to say, a
// few seconds being left for the status to reach a client, and when the server
// stops. All its goroutines have ended when its handler returns, but those of the
// library, which end with the connection.
package stream
