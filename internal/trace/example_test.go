package trace_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/crius-run/crius/internal/trace"
)

// Every side effect is a step. Observers hear of it (logs, metrics, spans), Active lists it while
// it runs, and tests inject errors at both of its edges.
func ExampleDo() {
	tracer := &trace.Tracer{Hook: func(at trace.Point) error {
		fmt.Printf("%s: %s, after=%t\n", at.Operation, at.Step, at.After)
		if at.Step == "mount" && at.After {
			return errors.New("injected")
		}
		return nil
	}}
	err := tracer.Do(context.Background(), "create container", "web", func(ctx context.Context) error {
		return trace.Do(ctx, "mount", func(context.Context) error {
			work := tracer.Active()[0]
			fmt.Println("under way:", work.Object, work.Step)
			return nil
		})
	})
	fmt.Println(err)
	// Output:
	// create container: mount, after=false
	// under way: web mount
	// create container: mount, after=true
	// injected
}
