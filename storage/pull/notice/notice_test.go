package notice

import (
	"fmt"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestWaitsReachTheirPull(t *testing.T) {
	var got []string
	note := func(name string) Listener {
		return Listener{Wait: func(w Wait) {
			if left := time.Until(w.Until); left <= 0 || left > time.Hour {
				t.Errorf("%s waits for %s", name, left)
			}
			got = append(got, name+" for "+w.Host)
		}}
	}
	defer Begin([]Source{{"mirror.example", "hub/shop"}, {"registry.example:5000", "shop"}}, note("shop")).End()
	cart := Begin([]Source{{"registry.example:5000", "shop/cart"}}, note("cart"))
	say := func(address string) {
		Heard("Too many requests to " + address + ": sleeping for 3000.000000 seconds before next attempt")
	}
	for _, c := range []struct {
		address string
		want    []string
	}{
		{"https://registry.example:5000/v2/shop/manifests/1", []string{"shop for registry.example:5000"}},
		{"https://mirror.example/v2/hub/shop/blobs/sha256:0", []string{"shop for mirror.example"}},
		{"https://registry.example:5000/v2/shop/cart/manifests/1", []string{"cart for registry.example:5000"}},
		{"http://registry.example:5000/v2/", []string{"cart for registry.example:5000", "shop for registry.example:5000"}},
		{"https://other.example/v2/shop/manifests/1", nil},
		{"https://registry.example:5000/v2/shopping/manifests/1", nil},
	} {
		got = nil
		say(c.address)
		if slices.Sort(got); !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", c.address, got, c.want)
		}
	}
	cart.End()
	got = nil
	say("https://registry.example:5000/v2/shop/cart/manifests/1")
	Heard("Too many cooks")
	Heard("Detected 'Retry-After' header")
	if slices.Contains(got, "cart for registry.example:5000") {
		t.Errorf("after the end: %q", got)
	}
}

// The library does not say which registry it means.
func TestUnknownLoginsReachEachPull(t *testing.T) {
	var got []string
	defer Begin(nil, Listener{Scheme: func(scheme string) { got = append(got, scheme) }}).End()
	defer Begin([]Source{{"registry.example", "shop"}}, Listener{}).End()
	for _, message := range []string{"no handler for negotiate authentication", "no handler for x", "no handler for " + strings.Repeat("x", 33) + " authentication"} {
		if Heard(message) {
			t.Errorf("%q: kept from the log", message)
		}
	}
	Heard("Too many requests to https://registry.example/v2/shop/manifests/1: sleeping for 1.000000 seconds before next attempt")
	Heard(`Warning from registry (first encountered at "https://registry.example/v2/shop/manifests/1"): "moved"`)
	if !slices.Equal(got, []string{"negotiate"}) {
		t.Errorf("%q", got)
	}
}

func TestWarningsReachTheirPull(t *testing.T) {
	var got []string
	note := func(name string) Listener {
		return Listener{Warn: func(w Warning) { got = append(got, fmt.Sprintf("%s by %s: %q", name, w.Host, w.Text)) }}
	}
	shop := Begin([]Source{{"warner.example", "shop"}}, note("shop"))
	defer shop.End()
	defer Begin([]Source{{"warner.example", "cart"}}, note("cart")).End()
	shop.Asked(&url.URL{Host: "blobs.example"})
	shop.Asked(&url.URL{Host: "warner.example"})
	for _, c := range []struct {
		address, text string
		want          []string
	}{
		{"https://warner.example/v2/shop/manifests/1", "moved", []string{`shop by warner.example: "moved"`}},
		{"https://warner.example/v2/cart/blobs/sha256:0", `say "no" \`, []string{`cart by warner.example: "say \"no\" \\"`}},
		{"https://warner.example/v2/", "é \x00\u202e", []string{`cart by warner.example: "é \x00\u202e"`, `shop by warner.example: "é \x00\u202e"`}},
		{"https://blobs.example/some/where?X=1", "expires", []string{`shop by blobs.example: "expires"`}},
		{"https://warner.example/v2/other/manifests/1", "not ours", nil},
		{"https://other.example/v2/shop/manifests/1", "not ours", nil},
	} {
		got = nil
		if !Heard(fmt.Sprintf("Warning from registry (first encountered at %q): %q", c.address, c.text)) {
			t.Errorf("%s: not taken for a warning", c.address)
		}
		if slices.Sort(got); !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", c.address, got, c.want)
		}
	}
	for _, other := range []string{"Warning from registry", `Warning from registry (first encountered at "x"): "y" and more`, `Warning from registry (first encountered at "\x"): "y"`, "Failed, retrying"} {
		if Heard(other) {
			t.Errorf("%q is taken for a warning", other)
		}
	}
}
