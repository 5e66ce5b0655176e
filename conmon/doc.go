// Package conmon starts crius-conmon, the monitor of a container, and is its client.
//
// # The monitor
//
// A monitor is the parent of the container's init. It holds the container's standard
// streams, writes its log, sees its exit and records it. It starts before the container
// and ends by itself when the exit is on disk and the last process that holds the
// container's output has closed it: a dead container costs no process. It does not need
// the server, which may die and come back at any moment.
//
// Launch binds the socket and connects to it before the monitor exists, which inherits
// it as descriptor 3: no connection can come too early, and each can learn why a
// monitor failed at its start. The monitor is born in its own cgroup and session. The
// runtime's environment is in a file in memory, descriptor 4, since the Go runtime
// copies its own; all else it has to know stands on its command line:
//
//	crius-conmon --id=ID --dir=DIR --pid-file=FILE --exit-file=FILE
//	    [--log-file=FILE [--log-dir=DIR]] [--terminal] [--stdin] [--stdin-once]
//	    [--journal=SOCKET [--journal-field=NAME=VALUE]...]
//	    [--helpers] [--start=WORD]... [--wait=WORD]...
//	    -- RUNTIME create ... ID
//
// It runs the runtime's create. If that fails, the monitor kills what is left of it,
// reports the failure and ends. If it succeeds the container's init, an orphan by then,
// has become the monitor's child: it can die but not disappear, and no other process
// can get its pid, before the monitor has seen its exit code. Of a container in the PID
// namespace of the host the monitor, a subreaper, inherits the other orphans too, and
// reaps them.
//
// When the init has ended the monitor kills what is left in the container's cgroup: in a
// PID namespace that others have as well the kernel does not. It reports the exit when
// nothing of the container is alive, or after ten seconds.
//
// Once the container exists, and before anybody can start it, the monitor drops all
// capabilities but CAP_KILL and, where its files take it, CAP_DAC_OVERRIDE.
//
// # Rest
//
// A monitor that has had nothing to do for a minute gives back its memory, but for three
// pages, and its threads (package rest). What it has to remember is in the file that was
// descriptor 4. Any event makes the program begin again in the same process. Each time it
// waits twice as long before it rests, up to half an hour, since a beginning costs more
// than a millisecond of CPU. Monitors of containers in the host's PID namespace, and of
// those without a process, stay awake, and so do monitors with somebody attached.
//
// # Host paths
//
// The same program looks at host paths for the server (crius-conmon stat, look and
// make-dir PATH...): see Look.
//
// # Containers without a process
//
// A container that the runtime has put into a sandbox which exists already, as gVisor
// does with all containers of a pod but the first, has no process of its own here: its
// pid is that of the sandbox, whose parent is the monitor of the first. The runtime
// takes such a container's streams not when it is created but when it is started. So
// the monitor runs the command for that as well (--start), when a client asks for it,
// and afterwards one that ends when the container does and says how (--wait). That one
// is run again if it dies, as long as the sandbox lives. When the sandbox dies, the
// container counts as killed by signal 9, and as OOM killed if the kernel has counted
// an OOM kill in the sandbox's cgroup. Only the runtime can kill such a container:
// release just ends the monitor.
//
// Such runtimes leave processes of their own beside the container, which die with
// it (--helpers). They are the monitor's children, and it stays for a moment to
// reap them.
//
// # Files
//
// In the run directory of the container (Spec.Dir): monitor.sock; monitor.json, the
// identities of the monitor and of the container's init, each a pid with its start
// time, and whether the monitor rests; monitor.log, the monitor's own errors; console.sock while a terminal is being
// handed over. The exit file, which must survive a power cut, is elsewhere: it is
// written, synced and renamed before any client is notified.
//
// # The protocol
//
// The socket is of type SOCK_SEQPACKET. A packet is a message: words separated
// by single spaces, numbers in decimal, the last word of some free text.
//
//	socat - UNIX-CONNECT:/run/crius/containers/ID/monitor.sock,type=5
//
// The monitor reports events. A client that connects late receives all earlier ones
// first:
//
//	hello VERSION STATE                      creating, running or exited
//	created PID START-TIME                   the container's init exists
//	failed CODE TEXT                         it never will: the runtime's exit code
//	                                         (0: not its fault, 256: a host path is
//	                                         silent) and last words
//	undead TEXT                              comes before exited if processes of the
//	                                         container could not be killed
//	exited CODE SIGNAL UNIXNANO OOM-KILLS    CODE is 128+SIGNAL if a signal ended it
//	dropped TEXT                             the monitor closes this connection, and why
//	rests BYTES BYTES BYTES                  as much was logged, discarded and lost to the
//	                                         journal, and no more until the monitor wakes
//	wakes                                    it does not rest any more
//	logged BYTES                             the log has grown by so much: told to who connects
//	                                         once there is a container, when asked, and at the end
//	log-discarded BYTES                      that were too many for the log; follows logged where
//	                                         the log has a limit
//	journal-lost BYTES                       that the journal has not got; follows logged where
//	                                         there is a journal
//
// The monitor answers each request of a client once, in order, with ok or with error
// TEXT:
//
//	reopen-log              the log has been renamed: go on in a new file at its path;
//	                        on an error the old file stays the log
//	resize WIDTH HEIGHT     of the terminal
//	close-stdin             end of the container's standard input
//	release                 the container is to be deleted: kill what still lives of
//	                        it, record its exit, leave
//	start                   the container, where that is the monitor's; answered when
//	                        the runtime's start has ended, which has start.lock
//	                        locked for as long as it runs
//	attach STREAMS          a share, from now on, in some of stdin, stdout and stderr
//	detach                  the client's output ends: what the container has written until
//	                        now comes before the end of each stream
//	count-log               how much the log has grown: logged comes before the ok
//
// With attach come descriptors to which a copy of stdout and of stderr is to be
// written, and with its ok goes the one that the container's input is written to:
// nothing has to be framed, and input never passes through the monitor. The end
// of the connection detaches, too, and loses what is on the way. If the container's
// stdin is to be used once it ends with the first client that had it.
//
// A packet never changes its form. New versions add packets; a client ignores and a
// monitor refuses what it does not know. No client can hurt the container: there are at
// most 32, one that does not read its packets is dropped, and so is one that leaves
// more than 4 MiB of an output stream unread. Neither the container nor its log nor
// another client ever waits for a client.
//
// End of the stream without exited means that the monitor is lost, unless the
// exit file says that it had done its work.
//
// # The log
//
// Records are those of the CRI log format, with at most 16 KiB of content. How
// a stream is cut into records depends on its bytes alone. Nothing is ever
// dropped or garbled: what the file system refuses (it is full, for instance) is
// kept and tried again, and meanwhile the container, and only it, waits in its
// write. Rotation never splits a record over two files.
//
// Beside the log, records can go to journald (--journal), each as a datagram of its
// native protocol. Nothing waits for journald: what it does not take is kept up to a
// bound and offered again, and what exceeds that is lost, told in the journal and counted.
//
// Pods may write where logs are. The log is opened and opened again without
// following a link in the pod's log directory (--log-dir) or below it, or in its
// own place, and only if it is a regular file with one name.
//
// # Packages
//
// The monitor itself is conmon/monitor, the packets and documents that both
// sides know conmon/wire. Those two import next to nothing; this package, which
// runs once per node and not once per container, may.
package conmon
