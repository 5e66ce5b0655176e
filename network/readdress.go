package network

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"

	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/types/create"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/ns"
)

// readdress puts the addresses that ADD has given to the pod's interface back
// on it. A runtime sandbox with its own kernel (gVisor, virtual machines) removes them,
// and the plugins need them to find what to undo: without them bridge leaves
// its masquerading rules behind.
func (a *Attachment) readdress(netNS string) error {
	if netNS == "" || len(a.Result) == 0 {
		return nil
	}
	list, err := a.list()
	if err != nil {
		return err
	}
	result, err := create.Create(list.CNIVersion, a.Result)
	if err != nil {
		return fmt.Errorf("recorded CNI result: %w", err)
	}
	r, err := current.NewResultFromResult(result)
	if err != nil {
		return fmt.Errorf("recorded CNI result: %w", err)
	}
	var errs []error
	err = ns.Do(netNS, func() error {
		for _, ip := range r.IPs {
			if i := ip.Interface; i == nil || *i >= 0 && *i < len(r.Interfaces) && r.Interfaces[*i].Name == a.Interface && r.Interfaces[*i].Sandbox != "" {
				errs = append(errs, addAddress(a.Interface, ip.Address))
			}
		}
		return nil
	})
	return errors.Join(append(errs, err)...)
}

// readdressLost is readdress for a pod without a record, which may have its own
// kernel. Where the result of ADD is lost as well, the leases have the addresses.
func (a *Attachment) readdressLost(p Pod, leases []Lease) error {
	netNS := a.netNS(p)
	if netNS == "" {
		return nil
	}
	errs := []error{a.readdress(netNS)}
	err := ns.Do(netNS, func() error {
		link, err := linkIndex(a.Interface)
		if errors.Is(err, errNoLink) {
			return nil
		}
		if err != nil {
			return err
		}
		here, err := addressesOn(link)
		if err != nil {
			return err
		}
		for _, l := range leases {
			ip, err := netip.ParseAddr(l.Address)
			if err != nil || l.Network != a.Network || here.has(ip) {
				continue
			}
			bits := ip.BitLen() // the mask is not known, and plugins do not need it
			errs = append(errs, addAddress(a.Interface, net.IPNet{IP: ip.AsSlice(), Mask: net.CIDRMask(bits, bits)}))
		}
		return nil
	})
	return errors.Join(append(errs, err)...)
}

// addAddress gives an interface of the calling thread's network namespace an
// address. It is not an error if the interface already has it or does not
// exist.
func addAddress(name string, address net.IPNet) error {
	socket, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer unix.Close(socket)
	index, err := interfaceIndex(name)
	if errors.Is(err, unix.ENODEV) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("find %s: %w", name, err)
	}
	family, ip := byte(unix.AF_INET6), address.IP.To16()
	if four := address.IP.To4(); four != nil {
		family, ip = unix.AF_INET, four
	}
	ones, _ := address.Mask.Size()
	body := []byte{family, byte(ones), unix.IFA_F_NODAD, unix.RT_SCOPE_UNIVERSE}
	body = binary.NativeEndian.AppendUint32(body, index)
	for _, kind := range []uint16{unix.IFA_LOCAL, unix.IFA_ADDRESS} {
		body = binary.NativeEndian.AppendUint16(body, uint16(unix.SizeofRtAttr+len(ip)))
		body = append(binary.NativeEndian.AppendUint16(body, kind), ip...)
	}
	var message []byte
	message = binary.NativeEndian.AppendUint32(message, uint32(unix.SizeofNlMsghdr+len(body)))
	message = binary.NativeEndian.AppendUint16(message, unix.RTM_NEWADDR)
	message = binary.NativeEndian.AppendUint16(message, unix.NLM_F_REQUEST|unix.NLM_F_ACK|unix.NLM_F_CREATE|unix.NLM_F_REPLACE)
	message = append(message, make([]byte, 8)...) // sequence number and sender: there is only one message
	if err := unix.Sendto(socket, append(message, body...), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fmt.Errorf("assign address to %s: %w", name, err)
	}
	answer := make([]byte, 4096)
	n, _, err := unix.Recvfrom(socket, answer, 0)
	if err != nil || n < unix.SizeofNlMsghdr+4 {
		return fmt.Errorf("assign address to %s: no answer from the kernel: %w", name, err)
	}
	if code := int32(binary.NativeEndian.Uint32(answer[unix.SizeofNlMsghdr:])); code != 0 {
		return fmt.Errorf("set the address of %s to %s: %w", name, &address, unix.Errno(-code))
	}
	return nil
}

func interfaceIndex(name string) (uint32, error) {
	socket, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(socket)
	request, err := unix.NewIfreq(name)
	if err != nil {
		return 0, err
	}
	err = unix.IoctlIfreq(socket, unix.SIOCGIFINDEX, request)
	return request.Uint32(), err
}
