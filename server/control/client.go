package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/crius-run/crius/storage/foreign"
)

// Client sends commands to the server of a node.
type Client struct {
	socket string
	http   *http.Client
}

// NewClient returns a client of the server at socket. It sends nothing yet.
func NewClient(socket string) *Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}
	return &Client{socket, &http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}}
}

// Check calls Node.Check.
func (c *Client) Check(ctx context.Context, repair bool) (result Checked, err error) {
	err = c.ask(ctx, http.MethodPost, checkPath, url.Values{repairKey: {strconv.FormatBool(repair)}}, &result)
	return result, err
}

// Holdings calls Node.Holdings.
func (c *Client) Holdings(ctx context.Context) (result Holdings, err error) {
	err = c.ask(ctx, http.MethodGet, holdingsPath, nil, &result)
	return result, err
}

// Wipe calls Node.Wipe.
func (c *Client) Wipe(ctx context.Context, keepImages bool) (result Wiped, err error) {
	err = c.ask(ctx, http.MethodPost, wipePath, url.Values{imagesKey: {strconv.FormatBool(keepImages)}}, &result)
	return result, err
}

// Foreign calls Node.Foreign.
func (c *Client) Foreign(ctx context.Context, measure bool) (result []foreign.Container, err error) {
	err = c.ask(ctx, http.MethodGet, foreignPath+"?"+url.Values{measureKey: {strconv.FormatBool(measure)}}.Encode(), nil, &result)
	return result, err
}

// RemoveForeign calls Node.RemoveForeign.
func (c *Client) RemoveForeign(ctx context.Context, ids []string) (result ForeignRemoved, err error) {
	err = c.ask(ctx, http.MethodPost, foreignPath, url.Values{idKey: ids}, &result)
	return result, err
}

// Reload calls Node.Reload.
func (c *Client) Reload(ctx context.Context) (result Reloaded, err error) {
	err = c.ask(ctx, http.MethodPost, reloadPath, nil, &result)
	return result, err
}

// maxComplaint bounds what is shown of an invalid answer.
const maxComplaint = 16 << 10

// Goroutines writes the stacks of the server's goroutines to w.
func (c *Client) Goroutines(ctx context.Context, w io.Writer) error {
	return c.dump(ctx, goroutinesPath, w)
}

// Heap writes the profile of the server's heap to w, in the format of go tool
// pprof.
func (c *Client) Heap(ctx context.Context, w io.Writer) error { return c.dump(ctx, heapPath, w) }

// CPU has the server take a profile of its CPU time for that many seconds, and writes it to w, in the
// format of go tool pprof.
func (c *Client) CPU(ctx context.Context, seconds int, w io.Writer) error {
	return c.dump(ctx, cpuPath+"?"+url.Values{secondsKey: {strconv.Itoa(seconds)}}.Encode(), w)
}

func (c *Client) dump(ctx context.Context, path string, w io.Writer) error {
	return c.send(ctx, http.MethodGet, path, nil, func(r io.Reader) error { return copyDump(w, r) })
}

func (c *Client) ask(ctx context.Context, method, path string, form url.Values, result any) error {
	return c.send(ctx, method, path, form, func(r io.Reader) error { return json.NewDecoder(r).Decode(result) })
}

// send calls read with the body of the answer.
func (c *Client) send(ctx context.Context, method, path string, form url.Values, read func(io.Reader) error) error {
	request, err := http.NewRequestWithContext(ctx, method, "http://crius"+path, strings.NewReader(form.Encode()))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	response, err := c.http.Do(request)
	if err != nil {
		return fmt.Errorf("server at %s: %w", c.socket, err)
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(response.Body, maxComplaint))
		complaint := errors.New(strings.TrimSpace(string(text)))
		if response.StatusCode != http.StatusInternalServerError { // the server has not done what was requested
			complaint = fmt.Errorf("%w: %s: %w", ErrRefused, response.Status, complaint)
		}
		return fmt.Errorf("server at %s: %w", c.socket, complaint)
	}
	if err := read(response.Body); err != nil {
		return fmt.Errorf("server at %s: %w", c.socket, err)
	}
	return nil
}
