// Package shim is a client of containerd's shims: programs that make containers
// and are asked over a socket (ttrpc), by the protocol that containerd calls its
// runtime v2. Kata Containers 2 and 3 have no other way in; gVisor has it beside
// its command line, and runc by way of containerd's own shim.
//
// A shim serves one container or all of a pod, as it likes: Begin is called for
// each, and says where the container's shim listens. What is needed to find it
// again stands in the container's run directory, which is the bundle and the
// working directory in which the shim was started (Record).
//
// Answers are passed on as the shim gives them. Only Wait is reliable about how a
// container ended; events may be lost or never be sent.
package shim

// Namespace is that of containerd in which all of crius's containers are. Some
// shims make directories of that name.
const Namespace = "k8s.io"
