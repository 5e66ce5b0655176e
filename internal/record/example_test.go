package record_test

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/record"
)

// A record is written before the work that it describes and deleted after the work is undone.
func ExampleDir() {
	type lease struct{ Address string }
	root, err := os.MkdirTemp("", "example-")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(root)
	ctx := context.Background()

	leases := record.At[lease](root, "lease.json", 1)
	if err := leases.Put(ctx, "web", &lease{Address: "10.0.0.2"}); err != nil {
		panic(err)
	}
	_ = leases.Sync() // now it survives a power cut, too

	// The next process, after this one was killed:
	leases = record.At[lease](root, "lease.json", 1)
	docs, orphans, damaged, err := leases.All()
	fmt.Println(docs["web"].Address, len(orphans), len(damaged), err)

	_ = leases.Delete(ctx, "web")
	_, err = leases.Get("web")
	fmt.Println(errors.Is(err, fault.NotFound))
	// Output:
	// 10.0.0.2 0 0 <nil>
	// true
}
