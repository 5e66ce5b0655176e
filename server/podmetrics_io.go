package server

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/network"
	"github.com/crius-run/crius/pod/usage"
)

func diskMetrics() []podMetric {
	disk := func(name, help string, value func(*usage.ContainerMetrics) *uint64) podMetric {
		return podMetric{kind: "disk", name: name, help: help, gauge: true, labels: []string{"device"}, values: func(s *sample, add emit) {
			if s.container != nil && s.container.Disk != nil {
				add(value(s.container), valid(s.container.Disk.Device))
			}
		}}
	}
	used := disk("container_fs_usage_bytes", "Number of bytes that are consumed by the container on this filesystem.",
		func(c *usage.ContainerMetrics) *uint64 {
			if c.Layer == nil {
				return nil
			}
			return &c.Layer.UsedBytes
		})
	used.measured = func(s *sample) time.Time { return s.container.Layer.Timestamp }
	return []podMetric{
		disk("container_fs_inodes_free", "Number of available Inodes",
			func(c *usage.ContainerMetrics) *uint64 { return &c.Disk.FreeInodes }),
		disk("container_fs_inodes_total", "Number of Inodes",
			func(c *usage.ContainerMetrics) *uint64 { return &c.Disk.Inodes }),
		disk("container_fs_limit_bytes", "Number of bytes that can be consumed by the container on this filesystem.",
			func(c *usage.ContainerMetrics) *uint64 { return &c.Disk.Bytes }),
		used,
	}
}

func diskIOMetrics() []podMetric {
	io := func(name, help, operation string, value func(cgroup.Operation) *uint64) podMetric {
		return podMetric{kind: "diskIO", name: name, help: help, labels: []string{"device"}, values: func(s *sample, add emit) {
			eachOperation(s, func(_ cgroup.DeviceIO, device string, op cgroup.Operation) {
				if op.Name == operation {
					add(value(op), device)
				}
			})
		}}
	}
	bytes := func(op cgroup.Operation) *uint64 { return op.Bytes }
	count := func(op cgroup.Operation) *uint64 { return op.Count }
	return []podMetric{
		io("container_fs_reads_bytes_total", "Cumulative count of bytes read", "Read", bytes),
		io("container_fs_reads_total", "Cumulative count of reads completed", "Read", count),
		io("container_fs_writes_bytes_total", "Cumulative count of bytes written", "Write", bytes),
		io("container_fs_writes_total", "Cumulative count of writes completed", "Write", count),
		{kind: "diskIO", name: "container_blkio_device_usage_total", help: "Blkio Device bytes usage",
			labels: []string{"device", "major", "minor", "operation"}, values: func(s *sample, add emit) {
				eachOperation(s, func(d cgroup.DeviceIO, device string, op cgroup.Operation) {
					add(op.Bytes, device, strconv.FormatUint(d.Major, 10), strconv.FormatUint(d.Minor, 10), op.Name)
				})
			}},
	}
}

// eachOperation leaves out devices that are gone: without their names their
// series would be indistinguishable.
func eachOperation(s *sample, visit func(d cgroup.DeviceIO, device string, op cgroup.Operation)) {
	for _, d := range s.details.IO {
		device := s.devices.of(d)
		for _, op := range d.Operations {
			if device != "" {
				visit(d, device, op)
			}
		}
	}
}

// deviceNames are the names of block devices that have been looked up for one
// call.
type deviceNames map[[2]uint64]string

// of returns the device's file, such as /dev/sda; empty if it is gone.
func (names deviceNames) of(d cgroup.DeviceIO) string {
	key := [2]uint64{d.Major, d.Minor}
	name, known := names[key]
	if !known {
		if target, err := os.Readlink(fmt.Sprintf("/sys/dev/block/%d:%d", d.Major, d.Minor)); err == nil {
			name = "/dev/" + valid(filepath.Base(target))
		}
		names[key] = name
	}
	return name
}

// maxInterfaces is how many interfaces of a pod have metrics: a privileged pod
// can make any number of them.
const maxInterfaces = 64

func networkMetrics() []podMetric {
	traffic := func(name, help string, value func(network.Interface) uint64) podMetric {
		return podMetric{kind: "network", name: name, help: help, labels: []string{"interface"}, values: func(s *sample, add emit) {
			if s.pod == nil {
				return
			}
			var seen []string // invalid UTF-8 may become the same name
			for _, i := range s.pod.Interfaces[:min(len(s.pod.Interfaces), maxInterfaces)] {
				if name := valid(i.Name); !slices.Contains(seen, name) {
					seen = append(seen, name)
					add(new(value(i)), name)
				}
			}
		}}
	}
	return []podMetric{
		traffic("container_network_receive_bytes_total", "Cumulative count of bytes received",
			func(i network.Interface) uint64 { return i.RxBytes }),
		traffic("container_network_receive_packets_total", "Cumulative count of packets received",
			func(i network.Interface) uint64 { return i.RxPackets }),
		traffic("container_network_receive_packets_dropped_total", "Cumulative count of packets dropped while receiving",
			func(i network.Interface) uint64 { return i.RxDropped }),
		traffic("container_network_receive_errors_total", "Cumulative count of errors encountered while receiving",
			func(i network.Interface) uint64 { return i.RxErrors }),
		traffic("container_network_transmit_bytes_total", "Cumulative count of bytes transmitted",
			func(i network.Interface) uint64 { return i.TxBytes }),
		traffic("container_network_transmit_packets_total", "Cumulative count of packets transmitted",
			func(i network.Interface) uint64 { return i.TxPackets }),
		traffic("container_network_transmit_packets_dropped_total", "Cumulative count of packets dropped while transmitting",
			func(i network.Interface) uint64 { return i.TxDropped }),
		traffic("container_network_transmit_errors_total", "Cumulative count of errors encountered while transmitting",
			func(i network.Interface) uint64 { return i.TxErrors }),
	}
}

// tcpStates are cAdvisor's names for network.TCPStates.
var tcpStates = [...]string{"", "established", "synsent", "synrecv", "finwait1", "finwait2", "timewait", "close", "closewait", "lastack", "listen", "closing"}

func socketMetrics() []podMetric {
	tcp := func(name, help string, states func(*network.Sockets) *network.TCPStates) podMetric {
		return podMetric{kind: "tcp", name: name, help: help, gauge: true, labels: []string{"tcp_state"}, values: func(s *sample, add emit) {
			if s.pod == nil || s.pod.Sockets == nil || states(s.pod.Sockets) == nil {
				return
			}
			for i, n := range states(s.pod.Sockets) {
				if tcpStates[i] != "" {
					add(&n, tcpStates[i])
				}
			}
		}}
	}
	udp := func(name, help string, of func(*network.Sockets) *network.UDP) podMetric {
		return podMetric{kind: "udp", name: name, help: help, gauge: true, labels: []string{"udp_state"}, values: func(s *sample, add emit) {
			if s.pod == nil || s.pod.Sockets == nil || of(s.pod.Sockets) == nil {
				return
			}
			u := of(s.pod.Sockets)
			add(&u.Sockets, "listen")
			add(&u.Dropped, "dropped")
			add(&u.RxQueued, "rxqueued")
			add(&u.TxQueued, "txqueued")
		}}
	}
	return []podMetric{
		tcp("container_network_tcp_usage_total", "tcp connection usage statistic for container",
			func(s *network.Sockets) *network.TCPStates { return s.TCP }),
		tcp("container_network_tcp6_usage_total", "tcp6 connection usage statistic for container",
			func(s *network.Sockets) *network.TCPStates { return s.TCP6 }),
		udp("container_network_udp_usage_total", "udp connection usage statistic for container",
			func(s *network.Sockets) *network.UDP { return s.UDP }),
		udp("container_network_udp6_usage_total", "udp6 connection usage statistic for container",
			func(s *network.Sockets) *network.UDP { return s.UDP6 }),
	}
}
