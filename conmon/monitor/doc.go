// Package monitor is crius-conmon, the process that stands beside a container
// from before its birth until nobody speaks for it any more. Package conmon
// documents what it promises and the protocol it speaks.
//
// It is one goroutine around one epoll instance: what happens to it is an
// event, what it does about it stands in the table in loop.go.
//
// Memory is what there is most of: a node runs hundreds of monitors. So the
// package lives on system calls (see package wire), allocates its buffers once
// and hands their pages back to the kernel whenever the container falls
// silent.
package monitor
