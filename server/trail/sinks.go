package trail

import (
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// sinks write records. They are used by one goroutine.
type sinks struct {
	journal string
	file    *os.File // that is open
	failing bool     // the last record did not get into the file, and the log says so
}

// sinkTime is how long a socket may take for a record.
const sinkTime = time.Second

func (s *sinks) put(ctx context.Context, r Record, file string) {
	if s.journal == "" || s.toJournal(r) != nil {
		toLog(ctx, r)
	}
	err := s.toFile(r, file)
	if err != nil && !s.failing {
		slog.ErrorContext(ctx, "audit record not written to api.audit_file: correct its path or its disk", "file", file, "err", err)
	}
	s.failing = err != nil
}

func (s *sinks) close() {
	if s.file != nil {
		_ = s.file.Close()
		s.file = nil
	}
}

// toFile appends the record to a file, or sends it to a unix socket, as a line of JSON.
func (s *sinks) toFile(r Record, path string) error {
	if path == "" {
		s.close()
		return nil
	}
	line, err := json.Marshal(r)
	if err != nil {
		return err
	}
	line = append(line, '\n')
	info, err := os.Stat(path)
	switch {
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return err
	case err == nil && info.Mode().Type() == fs.ModeSocket:
		return send("unix", path, line)
	}
	if err := s.open(path, info); err != nil {
		return err
	}
	_, err = s.file.Write(line)
	return err
}

// open opens the file that has the path now, unless it is open: somebody may have rotated it.
func (s *sinks) open(path string, found os.FileInfo) error {
	if s.file != nil && found != nil {
		if opened, err := s.file.Stat(); err == nil && os.SameFile(opened, found) {
			return nil
		}
	}
	s.close()
	// Without O_NONBLOCK, a FIFO that nobody reads would block.
	file, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY|unix.O_NONBLOCK, 0o600)
	if err != nil {
		return err
	}
	info, err := file.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is neither a regular file nor a unix socket", path)
	}
	if err != nil {
		return errors.Join(err, file.Close())
	}
	s.file = file
	return nil
}

func send(network, path string, data []byte) error {
	conn, err := net.DialTimeout(network, path, sinkTime)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetWriteDeadline(time.Now().Add(sinkTime)); err != nil {
		return err
	}
	_, err = conn.Write(data)
	return err
}

// toLog writes the record as a line of the server's log, whatever its level is.
func toLog(ctx context.Context, r Record) {
	line := slog.NewRecord(time.Now(), slog.LevelInfo, "audit", 0)
	for _, f := range fields(r) {
		line.AddAttrs(slog.String(f.name, f.value))
	}
	_ = slog.Default().Handler().Handle(ctx, line)
}

// field is a part of a record, as text.
type field struct{ name, value string }

// fields are the parts that a record has. Their names in the journal are in journalName.
func fields(r Record) []field {
	all := []field{
		{"verb", r.Verb},
		{"namespace", r.Namespace}, {"pod_name", r.Pod}, {"pod_uid", r.PodUID}, {"pod", r.PodID},
		{"container_name", r.Container}, {"container", r.ContainerID},
		{"command", quoted(r.Command)}, {"ports", joined(r.Ports)},
		{"client", r.Client}, {"client_pid", strconv.Itoa(int(r.ClientPID))}, {"client_uid", strconv.FormatUint(uint64(r.ClientUID), 10)}, {"remote", r.Remote},
		{"bytes_in", strconv.FormatUint(r.Received, 10)}, {"bytes_out", strconv.FormatUint(r.Sent, 10)}, {"took_ms", strconv.FormatInt(r.Milliseconds, 10)},
		{"error", r.Error},
	}
	if r.Terminal {
		all = append(all, field{"terminal", "true"})
	}
	if r.Kubelet {
		all = append(all, field{"kubelet", "true"})
	}
	if r.ExitCode != nil {
		all = append(all, field{"exit_code", strconv.Itoa(int(*r.ExitCode))})
	}
	if r.Connections != nil {
		all = append(all, field{"connections", strconv.FormatUint(*r.Connections, 10)})
	}
	return slices.DeleteFunc(all, func(f field) bool { return f.value == "" })
}

// quoted returns a command as one text in which its arguments can be told apart.
func quoted(command []string) string {
	var words []string
	for _, arg := range command {
		if arg == "" || strings.ContainsFunc(arg, func(r rune) bool { return r <= ' ' || r == '"' || r == '\\' || r > '~' }) {
			arg = strconv.Quote(arg)
		}
		words = append(words, arg)
	}
	return strings.Join(words, " ")
}

func joined(ports []uint16) string {
	var texts []string
	for _, port := range ports {
		texts = append(texts, strconv.Itoa(int(port)))
	}
	return strings.Join(texts, ",")
}

// journalNames are the names of fields in the journal that are not CRIUS_ and the name. Those of
// the pod are the ones that entries of containers have.
var journalNames = map[string]string{
	"verb": "CRIUS_AUDIT", "namespace": "K8S_NAMESPACE_NAME", "pod_name": "K8S_POD_NAME", "pod_uid": "K8S_POD_UID", "container_name": "K8S_CONTAINER_NAME",
}

// toJournal sends the record in journald's native protocol.
func (s *sinks) toJournal(r Record) error {
	entry := appendField(nil, "PRIORITY", "6")
	entry = appendField(entry, "SYSLOG_IDENTIFIER", "crius")
	entry = appendField(entry, "MESSAGE", message(r))
	for _, f := range fields(r) {
		name, own := journalNames[f.name]
		if !own {
			name = "CRIUS_" + strings.ToUpper(f.name)
		}
		entry = appendField(entry, name, f.value)
	}
	return send("unixgram", s.journal, entry)
}

// appendField appends a field as text, or with its length if it has lines.
func appendField(entry []byte, name, value string) []byte {
	entry = append(entry, name...)
	if strings.Contains(value, "\n") {
		entry = append(entry, '\n')
		entry = binary.LittleEndian.AppendUint64(entry, uint64(len(value)))
	} else {
		entry = append(entry, '=')
	}
	return append(append(entry, value...), '\n')
}

// message returns the record as a sentence.
func message(r Record) string {
	var b strings.Builder
	fmt.Fprintf(&b, "audit: %s", r.Verb)
	if r.Pod != "" {
		fmt.Fprintf(&b, " %s/%s", r.Namespace, r.Pod)
	} else {
		fmt.Fprintf(&b, " pod %s", r.PodID)
	}
	switch {
	case r.Container != "":
		fmt.Fprintf(&b, " %s", r.Container)
	case r.ContainerID != "":
		fmt.Fprintf(&b, " container %s", r.ContainerID)
	}
	fmt.Fprintf(&b, " by %s (process %d, user %d)", cmp.Or(r.Client, "an unknown process"), r.ClientPID, r.ClientUID)
	for _, f := range fields(r) {
		switch f.name {
		case "command", "ports", "exit_code", "error":
			fmt.Fprintf(&b, ", %s %s", strings.ReplaceAll(f.name, "_", " "), f.value)
		}
	}
	return b.String()
}
