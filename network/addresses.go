package network

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Limits on what is read from a network namespace, in which a pod with
// CAP_NET_ADMIN can make any number of links and addresses.
const (
	maxLinks     = maxInterfaces
	maxAddresses = 1024
)

var errNoLink = errors.New("no such network interface")

// linkIndex finds a link of the thread's network namespace by its name.
func linkIndex(name string) (int, error) {
	if name == "" {
		return 0, errors.New("the name of the network interface is empty")
	}
	request, err := unix.NewIfreq(name)
	if err != nil {
		return 0, fmt.Errorf("network interface %q: %w", name, err)
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	err = unix.IoctlIfreq(fd, unix.SIOCGIFINDEX, request)
	if errors.Is(err, unix.ENODEV) {
		return 0, errNoLink
	}
	if err != nil {
		return 0, fmt.Errorf("network interface %q: %w", name, err)
	}
	return int(request.Uint32()), nil
}

// addressSet is a bounded set of addresses of the thread's network namespace.
type addressSet struct {
	ips       map[netip.Addr]bool
	truncated bool
}

// addressesOn reads the addresses of a link, or of all links if it is 0.
func addressesOn(link int) (addressSet, error) {
	set := addressSet{ips: map[netip.Addr]bool{}}
	body := make([]byte, unix.SizeofIfAddrmsg)
	binary.NativeEndian.PutUint32(body[4:], uint32(link)) // old kernels ignore it
	all, err := dump(unix.RTM_GETADDR, body, maxAddresses, func(message []byte) bool {
		if len(message) < unix.SizeofIfAddrmsg || link != 0 && binary.NativeEndian.Uint32(message[4:]) != uint32(link) {
			return false
		}
		if ip, ok := addressIn(message[unix.SizeofIfAddrmsg:]); ok {
			set.ips[ip] = true
		}
		return true
	})
	set.truncated = !all
	return set, err
}

// has reports whether the address is in the set or, for an incomplete set,
// whether the namespace accepts packets to it.
func (s addressSet) has(ip netip.Addr) bool {
	return s.ips[ip.Unmap()] || s.truncated && isLocal(ip.Unmap())
}

// global reports whether other hosts can reach one of the addresses.
func (s addressSet) global() bool {
	for ip := range s.ips {
		if !ip.IsLoopback() && !ip.IsLinkLocalUnicast() {
			return true
		}
	}
	return false
}

// addressIn returns the link's own address from the attributes of a message.
func addressIn(attributes []byte) (ip netip.Addr, ok bool) {
	eachAttribute(attributes, func(kind uint16, value []byte) {
		if kind == unix.IFA_LOCAL || kind == unix.IFA_ADDRESS && !ok { // IFA_LOCAL is never the peer's
			if a, is := netip.AddrFromSlice(value); is {
				ip, ok = a.Unmap(), true
			}
		}
	})
	return ip, ok
}

func eachAttribute(b []byte, visit func(kind uint16, value []byte)) {
	for len(b) >= unix.SizeofRtAttr {
		size := int(binary.NativeEndian.Uint16(b))
		if size < unix.SizeofRtAttr || size > len(b) {
			return
		}
		visit(binary.NativeEndian.Uint16(b[2:]), b[unix.SizeofRtAttr:size])
		b = b[min((size+3)&^3, len(b)):]
	}
}

// hasUpLink reports whether a link other than the loopback is up.
func hasUpLink() (up bool, err error) {
	_, err = dump(unix.RTM_GETLINK, make([]byte, unix.SizeofIfInfomsg), maxLinks, func(message []byte) bool {
		if len(message) >= unix.SizeofIfInfomsg {
			flags := binary.NativeEndian.Uint32(message[8:])
			// Tunnel modules put a link that is down into every namespace.
			up = up || flags&unix.IFF_LOOPBACK == 0 && flags&unix.IFF_UP != 0
		}
		return true
	})
	return up, err
}

// isLocal asks the kernel for the route to an address of the thread's network
// namespace.
func isLocal(ip netip.Addr) bool {
	const header = unix.SizeofRtMsg + unix.SizeofRtAttr
	raw := ip.AsSlice()
	body := make([]byte, header+len(raw))
	body[0] = unix.AF_INET
	if ip.Is6() {
		body[0] = unix.AF_INET6
	}
	body[1] = byte(8 * len(raw))
	binary.NativeEndian.PutUint16(body[unix.SizeofRtMsg:], uint16(unix.SizeofRtAttr+len(raw)))
	binary.NativeEndian.PutUint16(body[unix.SizeofRtMsg+2:], unix.RTA_DST)
	copy(body[header:], raw)
	local := false
	_, err := ask(unix.RTM_GETROUTE, unix.NLM_F_ACK, body, 1, func(message []byte) bool {
		local = len(message) >= unix.SizeofRtMsg && message[7] == unix.RTN_LOCAL
		return true
	})
	return err == nil && local
}

// dump reads a table of the thread's network namespace until visit has accepted
// most entries. It reports whether that was the whole table.
func dump(kind uint16, body []byte, most int, visit func(message []byte) (taken bool)) (all bool, err error) {
	return ask(kind, unix.NLM_F_DUMP, body, most, visit)
}

const answerTime = 10 * time.Second

func ask(kind, flags uint16, body []byte, most int, visit func(message []byte) (taken bool)) (all bool, err error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return false, os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	_ = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1) // since Linux 4.20: filter by link
	limit := unix.NsecToTimeval(answerTime.Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit); err != nil {
		return false, os.NewSyscallError("setsockopt", err)
	}
	request := make([]byte, unix.NLMSG_HDRLEN, unix.NLMSG_HDRLEN+len(body))
	binary.NativeEndian.PutUint32(request, uint32(cap(request)))
	binary.NativeEndian.PutUint16(request[4:], kind)
	binary.NativeEndian.PutUint16(request[6:], unix.NLM_F_REQUEST|flags)
	if err := unix.Sendto(fd, append(request, body...), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return false, os.NewSyscallError("sendto", err)
	}
	return receive(fd, most, visit)
}

// receive reads messages until the last one, an error or the limit.
func receive(fd, most int, visit func(message []byte) (taken bool)) (all bool, err error) {
	buffer := make([]byte, 32<<10)
	for taken := 0; ; {
		n, _, err := unix.Recvfrom(fd, buffer, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return false, os.NewSyscallError("recvfrom", err)
		}
		messages, err := syscall.ParseNetlinkMessage(buffer[:n])
		if err != nil {
			return false, err
		}
		for _, m := range messages {
			switch {
			case m.Header.Type == unix.NLMSG_DONE:
				return true, nil
			case m.Header.Type == unix.NLMSG_ERROR:
				return true, errnoOf(m.Data)
			case taken == most:
				return false, nil
			case visit(m.Data):
				taken++
			}
		}
	}
}

// errnoOf returns the error of an NLMSG_ERROR; nil: an acknowledgement.
func errnoOf(data []byte) error {
	if len(data) < 4 {
		return unix.EINVAL
	}
	if code := int32(binary.NativeEndian.Uint32(data)); code != 0 {
		return unix.Errno(-code)
	}
	return nil
}
