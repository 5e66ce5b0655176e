// Package shim is a client of containerd's shims: programs that create
// containers and are controlled over a socket (ttrpc), by the protocol that
// containerd calls its runtime v2. Kata Containers 2 and 3 have no other
// interface; gVisor has it beside its command line, and runc through
// containerd's own shim.
//
// A shim decides whether it serves one container or all of a pod: Begin is
// called for each container, and returns where its shim listens. A Record in
// the container's run directory, which is the bundle and the shim's working
// directory, has what is needed to find it again.
//
// Answers are passed on unchanged. Only Wait is reliable about how a container
// ended; events may be lost or never sent.
package shim

// Namespace is the containerd namespace of all of crius's containers. Some
// shims make directories of that name.
const Namespace = "k8s.io"
