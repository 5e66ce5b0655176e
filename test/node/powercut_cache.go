package main

import (
	"encoding/binary"
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
)

// sector is the unit in which the machine writes. A disk writes a physical
// sector completely or not at all: ext4 refuses a journal whose last block is
// torn.
const (
	sector   = 512
	physical = 4096
)

// unflushed is a write that was not followed by a flush: its place, and the
// data before it (see cache/cache.c).
type unflushed struct {
	offset int64
	before []byte
}

// readUndo reads the writes since the last flush, in order. The last may be
// truncated: it did not happen.
func readUndo(path string) ([]unflushed, error) {
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var writes []unflushed
	for len(data) >= 16 {
		offset, length := binary.LittleEndian.Uint64(data), binary.LittleEndian.Uint64(data[8:])
		data = data[16:]
		if uint64(len(data)) < length {
			break
		}
		writes = append(writes, unflushed{int64(offset), data[:length]})
		data = data[length:]
	}
	return writes, err
}

// forget makes a disk lose some writes that were never flushed, like a disk
// with a write cache when its power is cut: each write may be lost, be kept
// while earlier ones are lost, or be kept in part. It returns how many were
// lost.
func forget(disk, undo string, random *rand.Rand) (lost int, err error) {
	writes, err := readUndo(undo)
	if err != nil {
		return 0, err
	}
	f, err := os.OpenFile(disk, os.O_WRONLY, 0)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, f.Close(), os.RemoveAll(undo)) }()
	// Often everything or nothing arrives; otherwise chance decides.
	share := []float64{0, 0, 0.1, 0.5, 0.9, 1}[random.IntN(6)]
	kept := map[int64]bool{} // sectors decided by a later write
	for i := len(writes) - 1; i >= 0; i-- {
		w := writes[i]
		from := 0 // sectors of it that arrived
		all := len(w.before) / sector
		gone := random.Float64() < share
		switch {
		case !gone:
			from = all
		case random.IntN(4) == 0 && all > 0:
			from = random.IntN(all)
			from -= min(from, int(w.offset+int64(from)*sector)%physical/sector)
		}
		if from < all {
			lost++
		}
		for s := range all {
			at := w.offset + int64(s)*sector
			if s < from {
				kept[at] = true
			}
			if kept[at] {
				continue
			}
			if _, err := f.WriteAt(w.before[s*sector:(s+1)*sector], at); err != nil {
				return lost, err
			}
		}
	}
	return lost, nil
}
