package network

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"time"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/internal/trace"
)

// unlockTime bounds a run of nft, which takes milliseconds.
const unlockTime = 10 * time.Second

// Unlock removes the firewall tables with which criu locks the network of a pod while it dumps a
// container: if it is killed, they stay, and drop the packets of every connection. netns is the
// path of the pod's network namespace; a pod that has none any more has no tables either.
func (*Network) Unlock(ctx context.Context, netns string) error {
	err := ns.Do(netns, func() error {
		tables, err := nft(ctx, "list", "tables")
		if errors.Is(err, exec.ErrNotFound) {
			return nil // criu was given a library, but whoever has no nft cannot look either
		}
		for _, table := range locks(tables) {
			if _, failed := nft(ctx, append([]string{"delete"}, table...)...); failed != nil {
				err = errors.Join(err, failed)
			}
		}
		return err
	})
	if errors.Is(err, fault.NotFound) {
		return nil
	}
	return err
}

// locks returns criu's among the tables that nft lists, one in each line: table inet CRIU-123.
func locks(list string) (tables [][]string) {
	for line := range strings.Lines(list) {
		words := strings.Fields(line)
		if len(words) == 3 && words[0] == "table" && (words[2] == "CRIU" || strings.HasPrefix(words[2], "CRIU-")) {
			tables = append(tables, words)
		}
	}
	return tables
}

// nft runs the program in the network namespace of the calling thread.
func nft(ctx context.Context, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, unlockTime)
	defer cancel()
	defer trace.For(ctx, "nft")()
	cmd := exec.CommandContext(ctx, "nft", args...)
	cmd.Dir, cmd.WaitDelay = "/", time.Second
	out, err := cmd.Output()
	if failed := new(exec.ExitError); errors.As(err, &failed) {
		err = fmt.Errorf("nft %s: %w: %.200s", strings.Join(args, " "), err, failed.Stderr)
	}
	return string(out), err
}
