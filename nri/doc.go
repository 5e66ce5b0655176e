// Package nri connects NRI plugins (https://github.com/containerd/nri): resource
// policies, DRA drivers, injectors of devices and hooks.
//
// A plugin connects to a socket, or is a program that the server starts from a
// directory. The library sends requests to plugins one after the other, in the order
// of their index. This package decides when to send which event, describes pods and
// containers, and applies the adjustments in the answers.
//
// # Guarantees for plugins
//
//   - A plugin receives each event of a pod and of a container once and in order. A
//     container that exits by itself sends StopContainer, too. A creation that fails
//     after plugins were asked sends Stop and Remove.
//   - A plugin that connects receives every pod and container, in Synchronize or by an
//     event: while it synchronizes, no event is sent (Plugins.hold). A creation that
//     takes longer than Plugins.CreationTime fails if a plugin connected meanwhile: that
//     plugin receives Stop and Remove of a container that it does not know.
//   - If a plugin refuses a creation, the creation fails and leaves nothing behind.
//
// # Guarantees for the node
//
// The library disconnects a plugin that dies or does not answer within
// request_timeout, and the operation continues without it, unless the plugin asked for
// a failure when it registered. Errors of plugins do not stop a stop or a removal.
// A plugin that connects waits for creations under way, and events wait for the plugin:
// a runtime that hangs delays them by Plugins.CreationTime at most.
// Without a connected plugin an event costs one uncontended read lock.
package nri
