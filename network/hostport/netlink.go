package hostport

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/eintr"
	"github.com/crius-run/crius/internal/fault"
)

// The few requests that go directly to the kernel: whether our table still
// exists, by which link the node reaches a pod, which flows go to a port. They
// are too frequent for nft, or nft has no answer to them.

// answerTime bounds the wait for the kernel, which answers at once.
const answerTime = 10 * time.Second

// attribute is a netlink attribute.
type attribute struct {
	kind uint16 // without flags
	data []byte
}

// pack encodes attributes for the kernel.
func pack(list ...attribute) []byte {
	var out []byte
	for _, a := range list {
		out = binary.NativeEndian.AppendUint16(out, uint16(unix.SizeofNlAttr+len(a.data)))
		out = binary.NativeEndian.AppendUint16(out, a.kind)
		out = append(out, a.data...)
		out = append(out, make([]byte, -len(out)&3)...)
	}
	return out
}

// unpack is the reverse of pack. It leaves out truncated attributes.
func unpack(data []byte) map[uint16][]byte {
	found := map[uint16][]byte{}
	for len(data) >= unix.SizeofNlAttr {
		size := int(binary.NativeEndian.Uint16(data))
		if size < unix.SizeofNlAttr || size > len(data) {
			break
		}
		kind := binary.NativeEndian.Uint16(data[2:]) &^ (unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER)
		found[kind] = data[unix.SizeofNlAttr:size]
		data = data[min(len(data), (size+3)&^3):]
	}
	return found
}

// nested returns an attribute that contains others.
func nested(kind uint16, list ...attribute) attribute {
	return attribute{kind | unix.NLA_F_NESTED, pack(list...)}
}

// request is one message to the kernel.
type request struct {
	protocol int // of the socket
	kind     uint16
	flags    uint16
	header   []byte // of the subsystem
	body     []attribute
}

// ask sends a request and passes each message of the answer, without its
// netlink header, to see. Errors of the kernel are returned as a unix.Errno.
func (r request) ask(see func(message []byte)) error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, r.protocol)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	limit := unix.NsecToTimeval(answerTime.Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit); err != nil {
		return err
	}
	payload := append(slices.Clone(r.header), pack(r.body...)...)
	message := binary.NativeEndian.AppendUint32(nil, uint32(unix.SizeofNlMsghdr+len(payload)))
	message = binary.NativeEndian.AppendUint16(message, r.kind)
	message = binary.NativeEndian.AppendUint16(message, r.flags|unix.NLM_F_REQUEST)
	message = append(message, make([]byte, 8)...) // sequence and port: one request per socket
	if err := unix.Sendto(fd, append(message, payload...), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	buffer := make([]byte, 64<<10)
	for {
		var n int
		if err := eintr.Retry(func() (err error) {
			n, _, err = unix.Recvfrom(fd, buffer, 0)
			return err
		}); err != nil {
			return err
		}
		messages, err := syscall.ParseNetlinkMessage(buffer[:n])
		if err != nil {
			return err
		}
		for _, m := range messages {
			if done, err := r.last(m); done {
				return err
			}
			see(m.Data)
			if r.flags&unix.NLM_F_DUMP == 0 {
				return nil
			}
		}
	}
}

// last reports whether m ends the answer, and with which error.
func (r request) last(m syscall.NetlinkMessage) (bool, error) {
	if m.Header.Type != unix.NLMSG_ERROR && m.Header.Type != unix.NLMSG_DONE {
		return false, nil
	}
	if len(m.Data) >= 4 {
		if code := int32(binary.NativeEndian.Uint32(m.Data)); code < 0 {
			return true, unix.Errno(-code)
		}
	}
	return true, nil
}

const (
	nfHeader       = 4 // size of struct nfgenmsg
	nftTableHandle = 4 // NFTA_TABLE_HANDLE, which x/sys does not have
)

// netfilter is a request to a subsystem of netfilter.
func netfilter(subsystem, kind, flags uint16, f family, body ...attribute) request {
	return request{unix.NETLINK_NETFILTER, subsystem<<8 | kind, flags, []byte{f.number(), unix.NFNETLINK_V0, 0, 0}, body}
}

func (f family) number() byte {
	if f == ip6 {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

// tableHandles returns the handles of our existing tables.
func tableHandles() (map[family]uint64, error) {
	handles := map[family]uint64{}
	for _, f := range families {
		err := netfilter(unix.NFNL_SUBSYS_NFTABLES, unix.NFT_MSG_GETTABLE, 0, f,
			attribute{unix.NFTA_TABLE_NAME, append([]byte(tableName), 0)}).ask(func(message []byte) {
			if handle := unpack(message[min(nfHeader, len(message)):])[nftTableHandle]; len(handle) == 8 {
				handles[f] = binary.BigEndian.Uint64(handle)
			}
		})
		switch {
		case err == nil, errors.Is(err, unix.ENOENT):
		case errors.Is(err, unix.EINVAL), errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.EAFNOSUPPORT), errors.Is(err, unix.EOPNOTSUPP):
			// A kernel without nf_tables, or without the family, has no tables; nft
			// reports that if one must be made.
		default:
			return nil, fmt.Errorf("look for nftables table %s %s: %w", f, tableName, err)
		}
	}
	return handles, nil
}

// serviceLink is the interface to which kube-proxy, in its IPVS mode, adds the
// addresses of all Services. They are the cluster's and not the node's: a host
// port that included them would take the port of every Service.
const serviceLink = "kube-ipvs0"

// nodeAddresses returns the addresses at which this node is reachable, from
// others and from itself. It leaves out link-local ones: every link of a pod
// has one.
func nodeAddresses() ([]netip.Addr, error) {
	services := -1
	if link, err := net.InterfaceByName(serviceLink); err == nil {
		services = link.Index
	}
	var all []netip.Addr
	err := request{unix.NETLINK_ROUTE, unix.RTM_GETADDR, unix.NLM_F_DUMP, make([]byte, unix.SizeofIfAddrmsg), nil}.ask(func(message []byte) {
		if len(message) < unix.SizeofIfAddrmsg || int(binary.NativeEndian.Uint32(message[4:])) == services {
			return
		}
		attributes := unpack(message[unix.SizeofIfAddrmsg:])
		own := attributes[unix.IFA_LOCAL] // not the peer's, if there is a peer
		if own == nil {
			own = attributes[unix.IFA_ADDRESS]
		}
		if a, ok := netip.AddrFromSlice(own); ok && !a.IsLinkLocalUnicast() && !a.IsLoopback() {
			all = append(all, a)
		}
	})
	return all, err
}

// plainLink matches an interface name without special meaning to nft.
var plainLink = regexp.MustCompile(`^[A-Za-z0-9_.@-]{1,15}$`)

// LinkTo returns the name of the interface by which this node reaches ip. If
// there is none the error is fault.Precondition.
func LinkTo(ip netip.Addr) (string, error) {
	header := make([]byte, unix.SizeofRtMsg)
	header[0], header[1] = familyOf(ip).number(), byte(ip.BitLen())
	index := 0
	err := request{unix.NETLINK_ROUTE, unix.RTM_GETROUTE, 0, header, []attribute{{unix.RTA_DST, ip.AsSlice()}}}.ask(func(message []byte) {
		if len(message) >= unix.SizeofRtMsg {
			if oif := unpack(message[unix.SizeofRtMsg:])[unix.RTA_OIF]; len(oif) == 4 {
				index = int(binary.NativeEndian.Uint32(oif))
			}
		}
	})
	if err != nil {
		return "", fmt.Errorf("this node has no route to %s: %w: %w", ip, err, fault.Precondition)
	}
	link, err := net.InterfaceByIndex(index)
	if err != nil {
		return "", fmt.Errorf("the interface of the route to %s: %w: %w", ip, err, fault.Precondition)
	}
	if !plainLink.MatchString(link.Name) {
		return "", fmt.Errorf("nftables rules cannot name the interface %q: %w", link.Name, fault.Precondition)
	}
	return link.Name, nil
}
