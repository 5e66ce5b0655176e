package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/crius-run/crius/cmd/crius/cli"
	"github.com/crius-run/crius/cmd/crius/config"
	"github.com/crius-run/crius/server/control"
	"github.com/crius-run/crius/storage"
)

// Limits of each part of the archive.
const (
	partTime = time.Minute
	partSize = 32 << 20 // bytes
)

// part is a file of the archive. Its output before an error is kept.
type part struct {
	name  string
	write func(ctx context.Context, w io.Writer) error
}

func (p *program) debugCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "debug [FILE]",
		Short: "Write an archive of what a bug report needs",
		Long: "Write an archive (tar, gzip) of what a bug report needs: versions, configuration, the result of crius check, the server's status, goroutines and heap, " +
			"the logs of crius and of the kernel, mounts, processes, firewall rules, and the names of the files in its directories. " +
			"It contains no files of containers, no records, no environment and no command lines, which may hold secrets. Of the kernel's log it has the times, " +
			"known words and numbers of messages, since many quote what containers choose, and of processes in other mount namespaces no names. " +
			"Some names that containers choose remain: in crius's own log, commands and paths in errors of crius and of runtimes; in the lists of mounts and disks, " +
			"what is mounted through Bidirectional mounts; and in the lists of interfaces, firewall rules and processes, what privileged containers " +
			"and those with the node's network have made on the node. Review the archive before you share it.\n\n" +
			"FILE is made with mode 0600 and must not exist; - is the standard output. The default is crius-debug-TIME.tar.gz in the current directory. " +
			"What could not be collected is listed in errors.txt in the archive.",
		Args: cli.Operands,
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			loaded, err := p.loadForClient(cmd)
			if err != nil {
				return err
			}
			now := time.Now().UTC()
			file := "crius-debug-" + now.Format("20060102T150405Z") + ".tar.gz"
			if len(args) > 0 {
				file = args[0]
			}
			if file == "-" {
				return writeArchive(cmd.Context(), cmd.OutOrStdout(), now, debugParts(loaded), secretsOf(loaded.Config))
			}
			f, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
			if err != nil {
				return err
			}
			err = writeArchive(cmd.Context(), f, now, debugParts(loaded), secretsOf(loaded.Config))
			if err = errors.Join(err, f.Close()); err != nil {
				return errors.Join(err, os.Remove(file))
			}
			fmt.Fprintln(cmd.OutOrStdout(), file)
			return nil
		},
	}
}

// secretsOf returns a replacer for secrets in the configuration: the values of environment
// variables, in plain text and in JSON.
func secretsOf(cfg config.Config) *strings.Replacer {
	var pairs []string
	for _, entry := range cfg.Pod.DefaultEnv {
		name, _, _ := strings.Cut(entry, "=")
		quoted, _ := json.Marshal(entry) // cannot fail for a string
		for _, text := range []string{entry, strings.Trim(string(quoted), `"`)} {
			pairs = append(pairs, text, name+"=<redacted>")
		}
	}
	return strings.NewReplacer(pairs...)
}

// userInfo matches the user information in a URL, such as a proxy's.
var userInfo = regexp.MustCompile(`://[^/@\s"']+@`)

// writeArchive writes the parts one after the other, without secrets, and a list of their
// errors.
func writeArchive(ctx context.Context, to io.Writer, now time.Time, parts []part, secrets *strings.Replacer) error {
	packed := gzip.NewWriter(to)
	archive := tar.NewWriter(packed)
	add := func(name string, content []byte) error {
		header := &tar.Header{Name: "crius-debug/" + name, Mode: 0o600, Size: int64(len(content)), ModTime: now}
		if err := archive.WriteHeader(header); err != nil {
			return err
		}
		_, err := archive.Write(content)
		return err
	}
	var missing strings.Builder
	for _, one := range parts {
		content := &limited{left: partSize}
		if err := one.run(ctx, content); err != nil {
			fmt.Fprintf(&missing, "%s: %v\n", one.name, err)
		}
		if context.Cause(ctx) != nil {
			return context.Cause(ctx)
		}
		text := content.Bytes()
		if !strings.HasSuffix(one.name, ".gz") {
			text = userInfo.ReplaceAll([]byte(secrets.Replace(string(text))), []byte("://<redacted>@"))
			text = rewriteAll(text, []rewrite{quotedProcess})
		}
		if err := add(one.name, text); err != nil {
			return err
		}
	}
	return errors.Join(add("errors.txt", []byte(missing.String())), archive.Close(), packed.Close())
}

func (p part) run(ctx context.Context, w io.Writer) error {
	ctx, cancel := context.WithTimeoutCause(ctx, partTime, fmt.Errorf("not done within %s", partTime))
	defer cancel()
	if err := p.write(ctx, w); err != nil {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return err
	}
	return nil
}

// limited is a buffer that drops everything beyond its limit.
type limited struct {
	bytes.Buffer
	left int
}

func (l *limited) Write(b []byte) (int, error) {
	n, _ := l.Buffer.Write(b[:min(len(b), l.left)])
	if l.left -= n; n < len(b) {
		return n, fmt.Errorf("truncated after %d bytes", partSize)
	}
	return n, nil
}

func debugParts(loaded *config.Loaded) []part {
	cfg := loaded.Config
	server := control.NewClient(controlSocket(cfg))
	return []part{
		{"version.txt", func(_ context.Context, w io.Writer) error { return printVersion(w) }},
		{"configuration.toml", func(_ context.Context, w io.Writer) error { return loaded.Write(w) }},
		{"status.json", func(ctx context.Context, w io.Writer) error {
			var report statusReport
			err := cli.Ask(ctx, cfg.API.Listen, func(ctx context.Context, server cli.Server) (err error) {
				report, err = askStatus(ctx, server)
				return err
			})
			return errors.Join(err, cli.Format("json").Print(w, report, nil))
		}},
		{"goroutines.txt", server.Goroutines},
		{"heap.pb.gz", server.Heap},
		{"check.txt", func(ctx context.Context, w io.Writer) error {
			writeFindings(w, append(runChecks(ctx, (&node{config: loaded, host: host{"/"}}).checks()), checkNode(ctx, cfg, false)...))
			return nil
		}},
		// Only the logs of the server and of systemd: monitors belong to the unit as well,
		// but may send output of containers (runtime.container_log_journal).
		{"crius.log", cleaned(output("journalctl", "--no-pager", "--output=short-precise", "--lines=50000",
			"_SYSTEMD_UNIT=crius.service", "_COMM=crius", "+", "UNIT=crius.service", "_PID=1"), serverLog)},
		// Without messages that processes write to /dev/kmsg.
		{"kernel.log", cleaned(output("dmesg", "--ctime", "--kernel"), kernelLog)},
		{"files.txt", func(ctx context.Context, w io.Writer) error {
			return errors.Join(writeNames(ctx, w, cfg.Root), writeNames(ctx, w, cfg.RunRoot))
		}},
		{"mounts.txt", contents("/proc/self/mountinfo")},
		{"cgroups.txt", contents("/proc/cgroups", "/proc/self/cgroup")},
		{"machine.txt", contents("/proc/version", "/etc/os-release", "/proc/meminfo", "/proc/loadavg", "/proc/pressure/cpu", "/proc/pressure/io", "/proc/pressure/memory")},
		// No command lines or environments: they may contain secrets.
		{"processes.txt", writeProcesses},
		{"network.txt", output("ip", "address")},
		{"firewall.txt", output("nft", "list", "ruleset")},
		{"disks.txt", output("df", "--print-type")},
	}
}

// output writes the output of a program.
func output(name string, args ...string) func(context.Context, io.Writer) error {
	return func(ctx context.Context, w io.Writer) error {
		cmd := exec.CommandContext(ctx, name, args...)
		cmd.Stdout, cmd.Stderr = w, w
		cmd.WaitDelay = time.Second
		return cmd.Run()
	}
}

// contents writes files one after the other.
func contents(paths ...string) func(context.Context, io.Writer) error {
	return func(_ context.Context, w io.Writer) error {
		var errs []error
		for _, path := range paths {
			text, err := os.ReadFile(path)
			if err == nil {
				_, err = fmt.Fprintf(w, "%s\n%s\n", path, text)
			}
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	}
}

// writeNames lists the names below a directory of crius, except in mounts and writable
// layers, which belong to pods.
func writeNames(ctx context.Context, w io.Writer, root string) error {
	device := func(info fs.FileInfo) uint64 { return info.Sys().(*syscall.Stat_t).Dev }
	top, err := os.Lstat(root)
	if err != nil {
		return err
	}
	return filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			_, err = fmt.Fprintf(w, "%q: %v\n", path, err)
			return err
		}
		info, err := e.Info()
		if err != nil {
			return nil //nolint:nilerr // it no longer exists
		}
		if _, err := fmt.Fprintf(w, "%v %10d %s %q\n", info.Mode(), info.Size(), info.ModTime().UTC().Format(time.RFC3339), path); err != nil {
			return err
		}
		if e.IsDir() && (device(info) != device(top) || storage.IsWritableLayer(e.Name())) {
			return filepath.SkipDir
		}
		return nil
	})
}
