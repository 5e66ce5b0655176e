package main

import (
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// ping sends one echo request from an ICMP socket, which
// net.ipv4.ping_group_range may allow, and waits for the answer. The kernel
// fills in the identifier and the checksum.
func ping(args []string) error {
	if len(args) != 1 {
		return errUsage
	}
	to, err := netip.ParseAddr(args[0])
	if err != nil {
		return err
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, unix.IPPROTO_ICMP)
	if err != nil {
		return fmt.Errorf("open ICMP socket: %w", err)
	}
	defer unix.Close(fd)
	limit := unix.NsecToTimeval((10 * time.Second).Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit); err != nil {
		return err
	}
	request := []byte{8, 0, 0, 0, 0, 0, 0, 1, 'p', 'i', 'n', 'g'}
	if err := unix.Sendto(fd, request, 0, &unix.SockaddrInet4{Addr: to.As4()}); err != nil {
		return fmt.Errorf("send echo request: %w", err)
	}
	answer := make([]byte, 100)
	n, _, err := unix.Recvfrom(fd, answer, 0)
	if err != nil {
		return fmt.Errorf("receive echo answer: %w", err)
	}
	_, err = fmt.Println("answer of", n, "bytes")
	return err
}
