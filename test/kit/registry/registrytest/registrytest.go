// Package registrytest starts registries for the length of a test.
package registrytest

import (
	"testing"

	"github.com/crius-run/crius/test/kit/registry"
)

// Start serves an empty registry on a free port of 127.0.0.1.
func Start(t testing.TB) *registry.Registry {
	t.Helper()
	return StartAt(t, "127.0.0.1:0")
}

// StartAt serves on an address of its own, such as 127.0.0.2:0, for tests that
// distinguish hosts.
func StartAt(t testing.TB, address string) *registry.Registry {
	t.Helper()
	r := registry.New()
	if err := r.Listen(address); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	return r
}
