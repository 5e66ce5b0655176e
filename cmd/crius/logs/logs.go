// Package logs shows the log of a container, which the name of its pod selects.
package logs

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/cmd/crius/cli"
	"github.com/crius-run/crius/internal/regular"
)

// logPeriod is the interval at which a followed log is read.
const logPeriod = 200 * time.Millisecond

// Command is crius logs.
func Command(load cli.Load) *cobra.Command {
	var view logView
	cmd := &cobra.Command{
		Use:   "logs POD [CONTAINER]",
		Short: "Show the log of a container",
		Long: "Show what a container of the running server has written to its current log file. " + cli.PodNames +
			"; CONTAINER may be omitted if the pod has only one. " +
			"Of containers with the same name the newest is shown. The container's standard error goes to standard error. " +
			"On a terminal, control characters such as colors are shown escaped; a pipe or a file gets them as they are.",
		Args:              cli.Operands,
		ValidArgsFunction: cli.CompleteContainer(load),
	}
	cmd.Flags().BoolVarP(&view.follow, "follow", "f", false, "continue until the container exits")
	cmd.Flags().IntVar(&view.tail, "tail", -1, "begin with the last `n` lines; -1: all")
	cmd.Flags().BoolVarP(&view.timestamps, "timestamps", "t", false, "begin each line with its time")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		loaded, err := load(cmd)
		if err != nil {
			return err
		}
		view.out, view.err, view.within = cli.Shown(cmd.OutOrStdout()), cli.Shown(cmd.ErrOrStderr()), map[string]bool{}
		return cli.Ask(cmd.Context(), loaded.Config.API.Listen, func(ctx context.Context, server cli.Server) error {
			id, err := cli.FindContainer(ctx, server, args[0], slices.Concat(args, []string{""})[1])
			if err != nil {
				return err
			}
			return view.show(ctx, server, id)
		})
	}
	return cmd
}

// logView shows a log in CRI's format: each line of the file has time, stream, tag and
// text. The tag is F, or P if the container's line continues in the next one.
type logView struct {
	follow, timestamps bool
	tail               int // lines; negative: all
	out, err           io.Writer

	within map[string]bool // by stream: the line is not complete
	torn   bool            // only part of the file's last line was shown
}

// longestLine is more bytes than a line of a log has. Pods that mount the log directory may
// write longer ones; no more than this is kept in memory.
const longestLine = 1 << 20

func (v *logView) show(ctx context.Context, server cri.RuntimeServiceClient, id string) error {
	status, err := server.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: id})
	if err != nil {
		return err
	}
	path := status.Status.GetLogPath()
	if path == "" {
		return errors.New("the container has no log: its output is discarded")
	}
	file, err := regular.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	if err := v.seek(file); err != nil {
		return err
	}
	lines := bufio.NewReader(file)
	var rest []byte // the beginning of a line that is being written
	for {
		exited := !v.follow || hasExited(ctx, server, id) // ask before the log is read for the last time
		if rest, err = v.copy(lines, rest); err != nil {
			return err
		}
		switch next, err := reopened(file, path); {
		case err != nil:
			return err
		case v.follow && next != nil:
			_, err := v.copy(lines, rest) // lines that were written in between
			_ = file.Close()
			file, rest, v.torn = next, nil, false
			lines.Reset(file)
			if err != nil {
				return err
			}
			continue
		case next != nil:
			_ = next.Close()
		}
		if exited {
			return nil
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(logPeriod):
		}
	}
}

// hasExited reports whether the container has exited, so that its log is complete. It is
// false while the server does not answer, for example because it is being restarted.
func hasExited(ctx context.Context, server cri.RuntimeServiceClient, id string) bool {
	status, err := server.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: id})
	if err != nil {
		return grpcstatus.Code(err) == codes.NotFound
	}
	return status.Status.GetState() == cri.ContainerState_CONTAINER_EXITED
}

// reopened returns the file that has replaced a rotated one, nil if path is still the same
// file or does not exist yet.
func reopened(file *os.File, path string) (*os.File, error) {
	before, err := file.Stat()
	if err != nil {
		return nil, err
	}
	next, err := regular.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	now, err := next.Stat()
	if err == nil && !os.SameFile(before, now) {
		return next, nil
	}
	_ = next.Close()
	return nil, err
}

// seek moves to the beginning of the last tail lines.
func (v *logView) seek(file *os.File) error {
	if v.tail < 0 {
		return nil
	}
	starts := make([]int64, 0, v.tail+1) // of the last lines; reused in turn
	var at int64
	whole := true
	lines := bufio.NewReaderSize(file, longestLine)
	for {
		line, err := lines.ReadSlice('\n')
		if len(line) > 0 {
			if whole {
				if starts = append(starts, at); len(starts) > v.tail+1 {
					starts = slices.Delete(starts, 0, 1)
				}
			}
			at += int64(len(line))
		}
		switch {
		case errors.Is(err, bufio.ErrBufferFull):
			whole = false
			continue
		case errors.Is(err, io.EOF):
			starts = append(starts, at)
			_, err = file.Seek(starts[max(0, len(starts)-1-v.tail)], io.SeekStart)
			return err
		case err != nil:
			return err
		}
		record, ok := parseRecord(line)
		whole = !ok || !record.partial
	}
}

// copy shows all complete lines, and the available part of a line that is too long. It
// returns the available part of any other incomplete line.
func (v *logView) copy(lines *bufio.Reader, rest []byte) ([]byte, error) {
	for {
		part, err := lines.ReadSlice('\n')
		rest = append(rest, part...)
		switch {
		case err == nil || len(rest) >= longestLine:
			if err := v.line(rest); err != nil {
				return nil, err
			}
			rest = rest[:0]
		case errors.Is(err, io.EOF):
			return rest, nil
		case !errors.Is(err, bufio.ErrBufferFull):
			return nil, err
		}
	}
}

func (v *logView) line(raw []byte) error {
	ends := bytes.HasSuffix(raw, []byte("\n"))
	whole := ends && !v.torn
	v.torn = !ends
	r, ok := parseRecord(raw)
	if !whole || !ok {
		_, err := v.out.Write(raw) // not a line of a monitor
		return err
	}
	to := v.out
	if r.stream == "stderr" {
		to = v.err
	}
	text := r.text
	if v.timestamps && !v.within[r.stream] {
		text = slices.Concat([]byte(r.time+" "), text)
	}
	if v.within[r.stream] = r.partial; !r.partial {
		text = append(slices.Clip(text), '\n')
	}
	_, err := to.Write(text)
	return err
}

// logRecord is a line of a log file.
type logRecord struct {
	time, stream string
	partial      bool
	text         []byte
}

func parseRecord(line []byte) (r logRecord, ok bool) {
	parts := bytes.SplitN(bytes.TrimSuffix(line, []byte("\n")), []byte(" "), 4)
	if len(parts) < 4 {
		return r, false
	}
	stream, tag := string(parts[1]), string(parts[2])
	if stream != "stdout" && stream != "stderr" {
		return r, false
	}
	return logRecord{string(parts[0]), stream, tag == "P" || strings.HasPrefix(tag, "P:"), parts[3]}, true
}
