// Demo shows what crius does, on its own node and without the internet:
//
//	go run ./test/demo [-handler crun]
//
// It starts crius on a private root and socket inside a network namespace,
// serves an image built here, runs a pod of two containers, kills and restarts
// the server while the pod runs on, removes everything and counts what is left.
// Any surprise ends it with code 1 and the reason.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
)

func main() {
	handler := flag.String("handler", "runc", "RuntimeClass handler of the pod")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := show(ctx, *handler); err != nil {
		fmt.Fprintln(os.Stderr, "\ndemo failed:", err)
		os.Exit(1)
	}
}

// show runs the steps in order; the node is removed in any case.
func show(ctx context.Context, handler string) (err error) {
	began := time.Now()
	d := &demo{handler: handler}
	defer func() {
		if d.node == nil {
			return
		}
		if err != nil {
			err = fmt.Errorf("%w\nend of the server's log:\n%s", err, d.node.LogTail(20))
		}
		if closeErr := d.node.Close(); err == nil {
			err = closeErr
		}
	}()
	steps := []struct {
		title string
		do    func(context.Context) (string, error)
	}{
		{"make a private node", d.makeNode},
		{"make an image of a static Go program and serve it", d.serveImage},
		{"start crius", d.start},
		{"pull the image", d.pull},
		{"run a pod with handler " + handler, d.runPod},
		{"start a web server in it", d.startWeb},
		{"start a client in it", d.startClient},
		{"ask the web server at the pod's address", d.ask},
		{"read the containers' logs", d.logs},
		{"execute a command in the client", d.exec},
		{"kill the server with SIGKILL; the pod goes on", d.kill},
		{"start the server again; it finds everything as it was", d.restart},
		{"stop and remove the pod", d.remove},
		{"stop the server with SIGTERM", d.stop},
		{"count what is left", d.count},
	}
	for i, s := range steps {
		began := time.Now()
		fmt.Printf("%2d. %s\n", i+1, s.title)
		said, err := s.do(ctx)
		if err != nil {
			return fmt.Errorf("%s: %w", s.title, err)
		}
		for line := range strings.Lines(strings.TrimRight(said, "\n") + "\n") {
			fmt.Print("    ", line)
		}
		fmt.Printf("    (%v)\n", time.Since(began).Round(time.Millisecond))
	}
	fmt.Printf("\nAll of it took %v, and nothing is left.\n", time.Since(began).Round(time.Millisecond))
	return nil
}
