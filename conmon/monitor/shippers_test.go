package monitor

import (
	"regexp"
	"strings"
	"testing"
	"time"
)

// How programs that ship logs take a record apart, as their documentation says.
var shippers = map[string]*regexp.Regexp{
	"Fluent Bit, cri":                   regexp.MustCompile(`^(?P<time>[^ ]+) (?P<stream>stdout|stderr) (?P<tag>[^ ]*) (?P<content>.*)$`),
	"Fluent Bit, cri of many lines":     regexp.MustCompile(`^(?P<time>.+?) (?P<stream>stdout|stderr) (?P<tag>F|P) (?P<content>.*)$`),
	"Promtail and Alloy, cri":           regexp.MustCompile(`^(?s)(?P<time>\S+?) (?P<stream>stdout|stderr) (?P<tag>\S+?) (?P<content>.*)$`),
	"OpenTelemetry, container":          regexp.MustCompile(`^(?P<time>[^ ^Z]+Z) (?P<stream>stdout|stderr) (?P<tag>[^ ]*) ?(?P<content>.*)$`),
	"Vector, four fields":               regexp.MustCompile(`^(?P<time>.*?) (?P<stream>stdout|stderr) (?P<tag>P|F) (?P<content>.*)$`),
	"Datadog, four fields by one space": regexp.MustCompile(`^(?P<time>[^ ]+) (?P<stream>[^ ]+) (?P<tag>[^ ]+) (?P<content>.*)$`),
}

// Every record of a log comes apart as its stream was, and partial records join to its lines.
func TestShippersOfLogsReadRecords(t *testing.T) {
	t.Parallel()
	text := "plain\n\n  two spaces  \n" + strings.Repeat("long ", maxContent/2) + "\n{\"log\":\"a P stdout F\"}\n\u00e4\u4e16\r\nno end"
	for _, stream := range []string{"stdout", "stderr"} {
		log, used, full := appendRecords(make([]byte, 0, 10*maxRecord), []byte(text), appendHead(nil, stream), true)
		if used != len(text) || full {
			t.Fatalf("%d of %d bytes are in the log", used, len(text))
		}
		for name, form := range shippers {
			var joined strings.Builder
			for record := range strings.Lines(string(log)) {
				m := form.FindStringSubmatch(strings.TrimSuffix(record, "\n"))
				if m == nil {
					t.Fatalf("%s does not read %.80q", name, record)
				}
				if _, err := time.Parse("2006-01-02T15:04:05.000000000Z07:00", m[form.SubexpIndex("time")]); err != nil || m[form.SubexpIndex("stream")] != stream {
					t.Errorf("%s: time and stream of %.80q: %v", name, record, err)
				}
				joined.WriteString(m[form.SubexpIndex("content")])
				if m[form.SubexpIndex("tag")] == "F" {
					joined.WriteString("\n")
				}
			}
			if joined.String() != text {
				t.Errorf("%s: the records join to %.200q", name, joined.String())
			}
		}
	}
}
