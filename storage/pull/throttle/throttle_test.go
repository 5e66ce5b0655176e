package throttle

import (
	"slices"
	"testing"
	"time"
)

func TestWaitsReachTheirPull(t *testing.T) {
	var got []string
	note := func(name string) func(Wait) {
		return func(w Wait) {
			if left := time.Until(w.Until); left <= 0 || left > time.Hour {
				t.Errorf("%s waits for %s", name, left)
			}
			got = append(got, name+" for "+w.Host)
		}
	}
	defer Begin([]Source{{"mirror.example", "hub/shop"}, {"registry.example:5000", "shop"}}, note("shop"))()
	end := Begin([]Source{{"registry.example:5000", "shop/cart"}}, note("cart"))
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
	end()
	got = nil
	say("https://registry.example:5000/v2/shop/cart/manifests/1")
	Heard("Too many cooks")
	Heard("Detected 'Retry-After' header")
	if slices.Contains(got, "cart for registry.example:5000") {
		t.Errorf("after the end: %q", got)
	}
}
