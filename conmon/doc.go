// Package conmon starts crius-conmon, the monitor of a container, and is its
// client.
//
// # The monitor
//
// A monitor is the parent of the container's init. It holds the container's
// standard streams, writes its log, sees its exit and records it. It starts
// before the container and ends by itself when the exit is on disk and the last
// process that holds the container's output has closed it: an exited container
// costs no process. It does not need the server, which may die and come back at
// any moment.
//
// Launch binds the socket and connects to it before the monitor exists, which
// inherits it as descriptor 3: no connection can come too early, and each
// client can learn why a monitor failed at its start. The monitor starts in its
// own cgroup and session. The runtime's environment is in a memfd, descriptor
// 4, because the Go runtime copies its own; everything else that the monitor
// needs is on its command line:
//
//	crius-conmon --id=ID --dir=DIR --pid-file=FILE --exit-file=FILE
//	    [--log-file=FILE [--log-dir=DIR]] [--terminal] [--stdin] [--stdin-once]
//	    [--journal=SOCKET [--journal-field=NAME=VALUE]...]
//	    [--attach-wait=MS] [--helpers] [--start=WORD]... [--wait=WORD]...
//	    -- RUNTIME create ... ID
//
// It runs the runtime's create. If that fails, the monitor kills the processes
// that create has left, reports the failure and ends. If it succeeds, the
// container's init, now an orphan, has become the monitor's child: it can die
// but not disappear, and no other process can get its pid, before the monitor
// has seen its exit code. If the container uses the PID namespace of the host,
// the monitor, a subreaper, inherits the other orphans too, and reaps them.
//
// When the init has ended the monitor kills the remaining processes in the
// container's cgroup: in a shared PID namespace the kernel does not do that. It
// reports the exit when no process of the container is alive, or after ten
// seconds.
//
// Once the container exists, and before it can be started, the monitor drops
// all capabilities except CAP_KILL and, if its files need it, CAP_DAC_OVERRIDE.
//
// # Rest
//
// A monitor that has had nothing to do for ten seconds gives back its memory,
// except for three pages, and its threads (package rest). Its state is in the
// file that was descriptor 4. Any event restarts the program in the same
// process, except for requests and ends of clients that knock (see below): a
// server that dies wakes no monitor. Each time the monitor waits twice as long
// before it rests, up to half an hour, because a restart costs more than a
// millisecond of CPU.
// Monitors of containers in the host's PID namespace, monitors of containers
// without a process, and monitors with an attached client stay awake.
//
// # Host paths
//
// The same program looks at host paths for the server (crius-conmon stat, look
// and make-dir PATH...): see Look.
//
// # Containers without a process
//
// If the runtime puts a container into an existing runtime sandbox, as gVisor does with
// all containers of a pod except the first, the container has no process of its
// own on the node: its pid is the sandbox's, whose parent is the monitor of the
// first container. The runtime takes such a container's streams when the
// container is started, not when it is created. So the monitor also runs the
// start command (--start), when a client requests it, and afterwards a command
// that ends when the container does and prints how it ended (--wait). The
// monitor runs the latter again if it dies while the sandbox lives. When the
// runtime sandbox dies, the container counts as killed by signal 9, and as OOM killed
// if the kernel has counted an OOM kill in the sandbox's cgroup. Only the
// runtime can kill such a container: release just ends the monitor.
//
// Such runtimes leave helper processes beside the container, which die with it
// (--helpers). They are the monitor's children, and it stays for a moment to
// reap them.
//
// # Files
//
// In the run directory of the container (Spec.Dir): monitor.sock; monitor.json,
// the identities of the monitor and of the container's init, each a pid with
// its start time, and whether the monitor rests; monitor.log, the monitor's own
// errors; console.sock while a terminal is being handed over. The exit file,
// which must survive a power cut, is elsewhere: it is written, synced and
// renamed before any client is notified.
//
// # The protocol
//
// The socket is of type SOCK_SEQPACKET. A packet is a message: words separated
// by single spaces, numbers in decimal; in some messages the last word is free
// text.
//
//	socat - UNIX-CONNECT:/run/crius/containers/ID/monitor.sock,type=5
//
// The monitor reports events. A client that connects late receives all earlier
// ones first:
//
//	hello VERSION STATE                      creating, running or exited
//	created PID START-TIME                   the container's init exists
//	failed CODE TEXT                         it never will: the runtime's exit code
//	                                         (0: not its fault, 256: a host path does
//	                                         not answer) and its last output
//	undead TEXT                              comes before exited if processes of the
//	                                         container could not be killed
//	exited CODE SIGNAL UNIXNANO OOM-KILLS    CODE is 128+SIGNAL if a signal ended it
//	dropped TEXT                             the monitor closes this connection, and why
//	rests BYTES BYTES BYTES                  bytes logged, discarded and lost to the
//	                                         journal, final until the monitor wakes
//	wakes                                    it no longer rests
//	logged BYTES                             growth of the log: sent to a new client once
//	                                         there is a container, on request, and at the end
//	log-discarded BYTES                      discarded by the log's limit; follows logged
//	                                         if the log has a limit
//	journal-lost BYTES                       not in the journal; follows logged if there is
//	                                         a journal
//
// The monitor answers each request of a client once, in order, with ok or with
// error TEXT:
//
//	reopen-log              the log has been renamed: continue in a new file at its path;
//	                        on an error the old file stays the log
//	resize WIDTH HEIGHT     of the terminal
//	close-stdin             end of the container's standard input
//	release                 the container is being deleted: kill its remaining
//	                        processes, record its exit, exit
//	start                   start the container, if the monitor does that; answered when
//	                        the runtime's start has ended, which holds a lock on
//	                        start.lock for as long as it runs
//	attach STREAMS          take part, from now on, in some of stdin, stdout and stderr
//	detach                  end the client's output: what the container has written until
//	                        now comes before the end of each stream
//	count-log               growth of the log: logged comes before the ok
//	knocks                  this client connects once more, for a moment, when it sends a
//	                        request after rests
//
// An attach request carries descriptors to which the monitor writes a copy of
// stdout and of stderr, and its ok carries the descriptor of the container's
// input: the streams need no framing, and input never passes through the
// monitor. Closing the connection detaches, too, and loses data on the way.
// With --stdin-once the container's stdin ends with the first client that had
// it.
//
// A packet never changes its form. New versions add packets; a client ignores
// and a monitor refuses unknown ones. No client can harm the container: there
// are at most 32, and one that does not read its packets is dropped. Of attached
// clients the slowest sets the pace of the container, once it leaves more than 1.5
// MiB of an output stream unread: it gets every byte. One that then reads nothing
// for half a minute (--attach-wait) is dropped, and the container and the other
// clients go on. The log has what the container has written at any time, and
// neither its exit nor its stop waits for a client.
//
// End of the stream without exited means that the monitor is lost, unless the
// exit file says that it had done its work.
//
// # The log
//
// Records are those of the CRI log format, with at most 16 KiB of content. How
// a stream is cut into records depends on its bytes alone. Nothing is ever
// dropped or garbled: if the file system refuses a write (for example because
// it is full), the monitor keeps the data and tries again, and meanwhile only
// the container waits in its write. Rotation never splits a record over two
// files.
//
// In addition to the log, records can go to journald (--journal), each as a
// datagram of its native protocol. Nothing waits for journald: the monitor
// keeps records that journald does not accept, up to a bound, and offers them
// again; what exceeds that is lost, noted in the journal and counted.
//
// Pods may be able to write where logs are. The monitor opens the log, also
// after rotation, without following a link in the pod's log directory
// (--log-dir) or below it, or in place of the log itself, and only if it is a
// regular file with one name.
//
// # Packages
//
// The monitor itself is conmon/monitor; conmon/wire has the packets and
// documents that both sides know. Those two import next to nothing; this
// package, which runs once per node and not once per container, may.
package conmon
