// Package pod implements the verbs on pods and containers: it decides in which order
// the backends (oci, storage, network) act, what is recorded before and after, and what
// is undone when something fails or dies. Each verb has a file of its own (run.go, create.go,
// start.go, stop.go, ...). Code that needs neither the order of verbs nor the states of
// objects is in the packages below: pod/blueprint plans what is made, pod/object keeps what
// pods and containers have in common.
//
// # Facts and their owners
//
// Every fact has one writer. This package writes the two records:
//
//	<state>/pods/<id>/pod.json              the request, phase, network plan and result
//	<state>/containers/<id>/container.json  the request, phase, image, start time
//
// oci/tuning records in <state>/tuning what it did for containers with CPUs of their own, and
// how the node was before.
//
// The monitor writes <state>/containers/<id>/exit.json (this package does so only if the
// monitor was lost), containers/storage its layers, the CNI plugins their leases. Everything
// else is derived from the records and may be thrown away:
//
//	<state>/pods/<id>/cni/                  libcni's cache
//	<state>/containers/<id>/{upper,work}    writable layer
//	<run>/pods/<id>/                        infra bundle
//	<run>/pods/<id>/{files,shm}             tmpfs: resolv.conf and hostname; /dev/shm
//	<run>/containers/<id>/                  bundle, monitor socket
//	<run>/containers/<id>/copies            tmpfs: copies of the files in mounts.conf
//	<run>/containers/<id>/devices           tmpfs: device nodes, for user namespaces
//	<namespaces_dir>/{net,ipc,uts}ns/crius-<id>
//
// A record has two parts (pod/records). The plan was decided when the object was made: it
// never changes and is read freely. Verbs change the state: it is read as a whole by Now,
// changed in one step by Change, and out of reach otherwise (pod/object).
//
// The state of a container (created, running, exited) is never stored. It is
// computed from the record, the monitor and the exit file. If the monitor of an earlier
// server does not answer, the container is shown as the record has it.
//
// # Three rules
//
// Record first in, last out. A verb that makes things writes the record as
// creating, runs its steps, and writes it as ready. A failed create, Remove and
// restart recovery call the same idempotent teardown, which goes through every
// step backwards, takes "already gone" for success, joins the errors and
// deletes the record last. If something cannot be undone now, it is a pending
// cleanup: the record stays, hidden from readers, the name is free again, and
// the engine retries.
//
// The work outlives the caller. Verbs run in flights; a kubelet that gives up
// and retries joins the work or gets the finished id.
//
// Readers never wait. They get immutable views from atomic pointers.
//
//	phase      creating ──► ready ──► stopping ──► stopped   (pod)
//	           creating ──► created ─► starting ─► started   (container)
//	              └────────────┴──────────┴──────► removing ──► no record
//
// # Lock order
//
// Life of a Sandbox, then Life of a Container, then the locks of Change and Now
// (pod/object). A Life is held for the length of a verb that changes its object (a check,
// pod/audit, only tries to get it); the locks of Change and Now only for a few instructions,
// never over I/O. StopContainer takes no Life (pod/stop): killing is always possible, even
// if something hangs.
package pod
