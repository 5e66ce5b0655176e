package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// get fetches a page over any kind of socket.
func get(ctx context.Context, network, address, path string) (string, error) {
	client := http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, address)
		},
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://server"+path, nil)
	if err != nil {
		return "", err
	}
	resp, err := client.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s of %s: %s", path, address, resp.Status)
	}
	return string(text), err
}

// series returns the value of a metric without labels, in Prometheus's text
// format.
func series(text, name string) (float64, error) {
	for line := range strings.Lines(text) {
		if value, ok := strings.CutPrefix(line, name+" "); ok {
			return strconv.ParseFloat(strings.TrimSpace(value), 64)
		}
	}
	return 0, fmt.Errorf("the server has no metric %s", name)
}

// heap is everything that a Go program has allocated in its life.
type heap struct{ objects, bytes float64 }

func (h heap) minus(before heap) heap {
	return heap{h.objects - before.objects, h.bytes - before.bytes}
}

// allocated reads it from a server written in Go.
func (s *server) allocated(ctx context.Context) (h heap, err error) {
	text, err := s.metrics(ctx)
	if err != nil {
		return h, err
	}
	if h.objects, err = series(text, "go_memstats_mallocs_total"); err != nil {
		return h, err
	}
	h.bytes, err = series(text, "go_memstats_alloc_bytes_total")
	return h, err
}
