package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/crius-run/crius/cmd/crius/cli"
)

const (
	// period is the interval at which the server is asked.
	period = 500 * time.Millisecond
	// linePeriod is the interval between lines with the same step, if the output is not a terminal.
	linePeriod = 10 * time.Second
)

// operation is what crius status shows of the work on an object.
type operation struct {
	Operation string
	Object    string
	Seconds   float64
	Step      string
	WaitsFor  string
}

// watched shows what the server does with an object while work has it do that.
func watched(ctx context.Context, server cli.Server, object string, out io.Writer, work func(context.Context) error) error {
	watching, end := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		watch(watching, server, object, out)
	}()
	err := work(ctx)
	end()
	<-done
	if errors.Is(ctx.Err(), context.Canceled) {
		return errors.New("interrupted; the server continues until the time limit, and crius status shows it")
	}
	return err
}

// operations are those that watch shows.
var operations = []string{"checkpoint", "checkpoint pod", "restore pod"}

// watch shows what the server does with an object until ctx ends. It ignores errors: the work itself
// reports them.
func watch(ctx context.Context, server cli.Server, object string, out io.Writer) {
	terminal := cli.IsTerminal(out)
	if terminal {
		pages := cli.NewPages(out)
		defer func() { _, _ = pages.Write(nil) }() // further output replaces it
		out = pages
	}
	var last string
	var shown time.Time
	for cli.Pause(ctx, period) {
		var vitals struct{ Work []operation }
		if err := cli.Vitals(ctx, server, &vitals); err != nil {
			continue
		}
		for _, o := range vitals.Work {
			if o.Object != object || !slices.Contains(operations, o.Operation) {
				continue
			}
			if doing := o.doing(); terminal || doing != last || time.Since(shown) >= linePeriod {
				last, shown = doing, time.Now()
				fmt.Fprintf(out, "%s, for %s\n", cli.Printable(doing), cli.Brief(time.Duration(o.Seconds*float64(time.Second))))
			}
		}
	}
}

// doing returns the present step, and what it waits for.
func (o operation) doing() string {
	text := o.Operation
	if o.Step != "" {
		text += ": " + o.Step
	}
	if o.WaitsFor != "" {
		text += ", waits for " + o.WaitsFor
	}
	return text
}
