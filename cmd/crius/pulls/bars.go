package pulls

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/crius-run/crius/cmd/crius/cli"
	"github.com/crius-run/crius/storage/pull/progress"
)

// bars draws pulls for a terminal, again and again. (The library behind podman's bars must
// see every byte, but here the counts are samples from another process.)
type bars struct {
	rates map[pull]rate
}

// pull identifies a pull.
type pull struct {
	image string
	since int64
}

// rate is the recent speed of a pull.
type rate struct {
	at        time.Time
	bytes     int64
	perSecond float64
}

// next returns the rate at now. The bytes since the last sample count as much as all bytes
// before.
func (r rate) next(now time.Time, bytes int64) rate {
	took := now.Sub(r.at).Seconds()
	if took <= 0 {
		return r
	}
	latest := float64(bytes-r.bytes) / took
	if r.bytes > 0 {
		latest = (latest + r.perSecond) / 2
	}
	return rate{now, bytes, latest}
}

func (b *bars) write(w io.Writer, list []progress.Pull, now time.Time) {
	rates := map[pull]rate{}
	for _, p := range list {
		key := pull{p.Image, p.Since.UnixNano()}
		last, seen := b.rates[key]
		if !seen {
			last = rate{at: p.Since}
		}
		rates[key] = last.next(now, p.Bytes-p.Resumed)
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", cli.Printable(p.Image), bar(p), cli.Brief(now.Sub(p.Since).Round(time.Second)), phase(p, rates[key].perSecond))
	}
	b.rates = rates
}

// bar draws the bar of a pull. It is full when all known bytes have arrived.
func bar(p progress.Pull) string {
	const width = 24
	full := 0
	if p.Total > 0 {
		full = int(min(p.Bytes*width/p.Total, width))
	}
	return "[" + strings.Repeat("#", full) + strings.Repeat("-", width-full) + "]"
}

// phase describes what a pull is doing.
func phase(p progress.Pull, perSec float64) string {
	left := max(p.Total-p.Bytes, 0)
	switch {
	case p.Blobs == 0, p.Throttled != "":
		return registryState(p)
	case left > 0:
		text := fmt.Sprintf("%s, %s, %s", amount(p), blobs(p), speed(p, perSec))
		if perSec >= 1 {
			text += ", " + (time.Duration(float64(left)/perSec) * time.Second).String() + " left"
		}
		return text
	case p.Done < p.Blobs:
		return fmt.Sprintf("unpacking, %s", blobs(p))
	}
	return fmt.Sprintf("storing, %s", blobs(p))
}
