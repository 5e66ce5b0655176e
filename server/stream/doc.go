// Package stream serves what the CRI calls streaming: exec, attach and
// port-forward. An RPC registers what is wanted and gets a URL with a token; the
// kubelet, or whoever it sends there, then speaks SPDY or WebSocket at that URL.
//
// # Tokens
//
// A token has 130 random bits, is good for one connection and for a minute, and only
// for the kind of session that it was given for. A request without a valid token is
// refused. At most a thousand wait at any time, and with the sessions that run they are
// bounded for each container or pod and for the node.
//
// # Protocols
//
// Kubelets and crictl of all ages are served as they expect: SPDY/3.1 with the
// subprotocols channel.k8s.io and v2 to v5 of it, and portforward.k8s.io; the same
// over WebSockets, where v5 lets a client end its input and listen on, and where
// current clients of port-forward speak SPDY inside. The frames are the business of
// moby/spdystream and of k8s.io/streaming's WebSockets, the rest stands here;
// docs/decisions/0003 says why. What a hostile client could make those libraries
// hold is bounded by guard and frameGuard.
//
// # Sessions
//
// A session is one connection, and it ends with it: as soon as the client has
// closed, or the kernel has given it up, although nobody may be reading at that
// moment (see hangups), or when nothing has been said for too long. It also ends
// when the engine has nothing more to say, and when the server stops. What has been
// written by then still reaches a client that takes it, and the session is counted
// until its connection is closed. Its goroutines have ended when its handler returns,
// but for those of the libraries and those that only move bytes of the client's,
// which end with the connection.
package stream
