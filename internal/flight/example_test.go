package flight_test

import (
	"context"
	"fmt"

	"github.com/crius-run/crius/internal/flight"
)

// A caller that gives up does not stop the work, and a second one joins it.
func ExampleGroup() {
	var pods flight.Group[string, string]
	release := make(chan struct{})
	started := 0
	run := func(context.Context) (string, error) {
		started++
		<-release
		fmt.Println("pod is ready")
		return "id", nil
	}

	hasty, cancel := context.WithCancel(context.Background())
	cancel()
	for range 2 {
		_, err := pods.Do(hasty, "default/web", run)
		fmt.Println("caller left:", err)
	}

	close(release)
	_ = pods.Wait(context.Background())
	fmt.Println("started:", started)
	// Output:
	// caller left: context canceled
	// caller left: context canceled
	// pod is ready
	// started: 1
}
