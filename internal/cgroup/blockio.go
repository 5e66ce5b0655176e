package cgroup

import (
	"bytes"
	"cmp"
	"slices"
	"strconv"

	"github.com/crius-run/crius/internal/fault"
)

// maxDevices bounds the devices reported for one cgroup: a node has a handful
// of disks, but loop devices come and go.
const maxDevices = 64

// io reads the I/O of block devices, by number.
func (r *reader) io(at place) []DeviceIO {
	devices := blockIO{}
	if at.v2 {
		r.blockLines(at, "io.stat", devices.v2)
	} else {
		r.blockLines(at, "blkio.throttle.io_service_bytes_recursive", devices.v1(func(op *Operation, n uint64) { op.Bytes = &n }))
		r.blockLines(at, "blkio.throttle.io_serviced_recursive", devices.v1(func(op *Operation, n uint64) { op.Count = &n }))
	}
	return devices.sorted()
}

// blockLines calls visit with the words of each line that begins with a device.
func (r *reader) blockLines(at place, name string, visit func(device [2]uint64, words [][]byte) error) {
	text, ok := r.text(at, name)
	if !ok {
		return
	}
	for line := range bytes.Lines(text) {
		words := bytes.Fields(line)
		if len(words) < 2 || string(words[0]) == "Total" { // v1's last line
			continue
		}
		device, err := deviceNumber(words[0])
		if err == nil {
			err = visit(device, words[1:])
		}
		if err != nil {
			r.fail(at, name, err)
			return
		}
	}
}

func deviceNumber(word []byte) (device [2]uint64, err error) {
	major, minor, ok := bytes.Cut(word, []byte(":"))
	if !ok {
		return device, problem{fault.Invalid, "not a device: " + strconv.Quote(string(word[:min(len(word), 80)]))}
	}
	if device[0], err = number(major); err == nil {
		device[1], err = number(minor)
	}
	return device, err
}

// blockIO collects operations by device.
type blockIO map[[2]uint64][]Operation

// at returns the operation of a device, and adds a missing one; nil if there
// are too many devices.
func (b blockIO) at(device [2]uint64, name string) *Operation {
	all, known := b[device]
	if !known && len(b) >= maxDevices {
		return nil
	}
	i := slices.IndexFunc(all, func(op Operation) bool { return op.Name == name })
	if i < 0 {
		i, all = len(all), append(all, Operation{Name: name})
		b[device] = all
	}
	return &all[i]
}

// v1 reads lines such as "8:0 Read 4096".
func (b blockIO) v1(set func(*Operation, uint64)) func([2]uint64, [][]byte) error {
	return func(device [2]uint64, words [][]byte) error {
		if len(words) != 2 {
			return problem{fault.Invalid, "cannot parse block I/O counters"}
		}
		n, err := number(words[1])
		if err != nil {
			return err
		}
		switch name := string(words[0]); name {
		case "Read", "Write", "Sync", "Async", "Discard", "Total":
			if op := b.at(device, name); op != nil {
				set(op, n)
			}
		}
		return nil
	}
}

// v2 reads lines such as "8:0 rbytes=4096 wbytes=0 rios=1 wios=0 dbytes=0".
func (b blockIO) v2(device [2]uint64, words [][]byte) error {
	for _, word := range words {
		key, value, _ := bytes.Cut(word, []byte("="))
		var name string
		bytes := true
		switch string(key) {
		case "rbytes":
			name = "Read"
		case "wbytes":
			name = "Write"
		case "rios":
			name, bytes = "Read", false
		case "wios":
			name, bytes = "Write", false
		default:
			continue
		}
		n, err := number(value)
		if err != nil {
			return err
		}
		switch op := b.at(device, name); {
		case op == nil:
		case bytes:
			op.Bytes = &n
		default:
			op.Count = &n
		}
	}
	return nil
}

func (b blockIO) sorted() []DeviceIO {
	var all []DeviceIO
	for device, operations := range b {
		all = append(all, DeviceIO{Major: device[0], Minor: device[1], Operations: operations})
	}
	slices.SortFunc(all, func(a, b DeviceIO) int { return cmp.Or(cmp.Compare(a.Major, b.Major), cmp.Compare(a.Minor, b.Minor)) })
	return all
}
