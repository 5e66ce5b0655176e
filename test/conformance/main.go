// Conformance runs the whole of critest, the conformance suite of CRI, against
// crius, without the internet:
//
//	go run ./test/conformance [-focus REGEXP] [HANDLER...]
//
// Each runtime handler, by default Debian's runc and crun and a current runc
// (runc-current), gets a node of its own. The images that the suite names are built on the spot and served by the node's
// registry under their public names. At the end of a run it prints one plain
// line, the specs that were skipped and those that failed:
//
//	runc: 102 passed, 0 failed, 20 skipped
//
// The exit code is 1 if any failed. What the suite itself prints is kept in
// .cache/conformance/HANDLER.log.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/crius-run/crius/internal/testkit/node"
	"github.com/crius-run/crius/internal/testkit/tools"
)

func main() {
	focus := flag.String("focus", "", "run only specs whose names match this regular expression")
	flag.Parse()
	handlers := flag.Args()
	if len(handlers) == 0 {
		handlers = []string{"runc", "crun", currentRunc}
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := conform(ctx, *focus, handlers); err != nil {
		fmt.Fprintln(os.Stderr, "\nconformance:", err)
		os.Exit(1)
	}
}

func conform(ctx context.Context, focus string, handlers []string) error {
	repo, err := node.Repository()
	if err != nil {
		return err
	}
	s := &suite{focus: focus}
	if s.critest, err = tools.Critest(ctx); err != nil {
		return err
	}
	if s.images, err = buildImages(ctx); err != nil {
		return err
	}
	failed := false
	for _, handler := range handlers {
		path := filepath.Join(repo, ".cache", "conformance", handler+".log")
		r, err := s.logged(ctx, path, handler)
		if err != nil {
			return fmt.Errorf("%s: %w\nthe suite's log: %s", handler, err, path)
		}
		r.print(os.Stdout, handler)
		failed = failed || len(r.failed) > 0
	}
	if failed {
		return errors.New("there were failures")
	}
	return nil
}

// logged is run, with the suite's output in a file.
func (s suite) logged(ctx context.Context, path, handler string) (*result, error) {
	log, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	s.log = log
	fmt.Printf("%s: the suite runs, its log is %s\n", handler, path)
	return s.run(ctx, handler)
}
