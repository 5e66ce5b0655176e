package crowd

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"

	"golang.org/x/sys/unix"
)

// Peer identifies the client of a connection, by properties that it cannot
// choose freely.
type Peer struct {
	// Owner is a user of this machine, or the address of a remote client: for
	// IPv6 its /64 network, because a host may have all of its addresses.
	Owner string
	// Group is the cgroup v2 of a process of this machine: pods on the node's
	// network may have the same user as the kubelet and, with CAP_SETUID, any
	// number of users. On cgroup v1 all are in rootGroup.
	Group uint64
}

// rootGroup is the id of the root of cgroup v2.
const rootGroup = 1

// root is the owner of root's connections.
const root = "uid 0"

func (p Peer) String() string {
	if p.Group == 0 {
		return p.Owner
	}
	return fmt.Sprintf("%s, cgroup %d", p.Owner, p.Group)
}

// PeerOf returns the peer of a connection.
func PeerOf(c net.Conn) Peer {
	remote, local := addrPort(c.RemoteAddr()), addrPort(c.LocalAddr())
	if peer, err := localPeer(remote, local); err == nil {
		return peer
	}
	bits := 32
	if remote.Addr().Is6() {
		bits = 64
	}
	network, err := remote.Addr().Prefix(bits)
	if err != nil {
		return Peer{Owner: "an unknown address"}
	}
	return Peer{Owner: network.Masked().String()}
}

func addrPort(a net.Addr) netip.AddrPort {
	tcp, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.AddrPort{}
	}
	at := tcp.AddrPort()
	return netip.AddrPortFrom(at.Addr().Unmap().WithZone(""), at.Port())
}

// gone is the peer of connections whose other end has already been closed: the
// kernel would report root.
var gone = Peer{Owner: "a process that has closed"}

// Layout of sock_diag's messages (linux/inet_diag.h).
const (
	diagRequest   = 56
	diagAnswer    = 72
	diagID        = 8 // of the request: the socket's ports, addresses, interface and cookie
	diagUID       = 64
	diagInode     = 68
	diagCgroup    = 21 // INET_DIAG_CGROUP_ID
	sockDiagByFam = 20 // SOCK_DIAG_BY_FAMILY
)

var errNotLocal = errors.New("no socket of this network namespace")

// localPeer asks the kernel for the owner of the socket that is connected from
// one address to the other in this network namespace.
func localPeer(from, to netip.AddrPort) (Peer, error) {
	if !from.IsValid() || !to.IsValid() || from.Addr().Is4() != to.Addr().Is4() {
		return Peer{}, errNotLocal
	}
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return Peer{}, err
	}
	defer unix.Close(fd)
	if err := unix.Sendto(fd, question(from, to), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return Peer{}, err
	}
	answer := make([]byte, 4<<10)
	n, _, err := unix.Recvfrom(fd, answer, unix.MSG_DONTWAIT) // the kernel has answered before Sendto returned
	if err != nil {
		return Peer{}, err
	}
	return parseAnswer(answer[:n])
}

func question(from, to netip.AddrPort) []byte {
	family := byte(unix.AF_INET)
	if from.Addr().Is6() {
		family = unix.AF_INET6
	}
	b := make([]byte, unix.NLMSG_HDRLEN+diagRequest)
	binary.NativeEndian.PutUint32(b, uint32(len(b)))
	binary.NativeEndian.PutUint16(b[4:], sockDiagByFam)
	binary.NativeEndian.PutUint16(b[6:], unix.NLM_F_REQUEST)
	request := b[unix.NLMSG_HDRLEN:]
	request[0], request[1] = family, unix.IPPROTO_TCP
	binary.NativeEndian.PutUint32(request[4:], ^uint32(0)) // in any state
	id := request[diagID:]
	binary.BigEndian.PutUint16(id, from.Port())
	binary.BigEndian.PutUint16(id[2:], to.Port())
	copy(id[4:20], from.Addr().AsSlice())
	copy(id[20:36], to.Addr().AsSlice())
	binary.NativeEndian.PutUint64(id[40:], ^uint64(0)) // any cookie
	return b
}

func parseAnswer(b []byte) (Peer, error) {
	if len(b) < unix.NLMSG_HDRLEN+diagAnswer || binary.NativeEndian.Uint16(b[4:]) != sockDiagByFam {
		return Peer{}, errNotLocal
	}
	message := b[unix.NLMSG_HDRLEN:]
	if binary.NativeEndian.Uint32(message[diagInode:]) == 0 {
		return gone, nil
	}
	uid := binary.NativeEndian.Uint32(message[diagUID:])
	peer := Peer{Owner: "uid " + strconv.FormatUint(uint64(uid), 10), Group: rootGroup}
	for rest := message[diagAnswer:]; len(rest) >= unix.SizeofNlAttr; {
		size := int(binary.NativeEndian.Uint16(rest))
		if size < unix.SizeofNlAttr || size > len(rest) {
			break
		}
		if binary.NativeEndian.Uint16(rest[2:]) == diagCgroup && size >= unix.SizeofNlAttr+8 {
			peer.Group = binary.NativeEndian.Uint64(rest[unix.SizeofNlAttr:])
		}
		rest = rest[min((size+3)&^3, len(rest)):]
	}
	return peer, nil
}
