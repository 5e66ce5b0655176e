// Package monitor implements crius-conmon, the process that monitors a container from
// before its creation until its exit is recorded and its output has ended. Package
// conmon documents what it promises and its protocol.
//
// It is one goroutine around one epoll instance; the table in loop.go has the handler
// of each event.
//
// A node runs hundreds of monitors, so memory matters most: the package uses little but
// system calls (see package wire), allocates its buffers once and returns their pages
// to the kernel whenever the container writes nothing.
package monitor
