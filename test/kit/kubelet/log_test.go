package kubelet

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

func TestReadLog(t *testing.T) {
	const good = "2016-10-06T00:17:09.669794202Z stdout P first half, \n" +
		"2016-10-06T00:17:09.669794203Z stderr F an error\n" +
		"2016-10-06T00:17:09.669794204+02:00 stdout F second half\n" +
		"2016-10-06T00:17:09Z stdout F \n"
	file := filepath.Join(t.TempDir(), "0.log")
	if err := os.WriteFile(file, []byte(good), 0o600); err != nil {
		t.Fatal(err)
	}
	records, err := ReadLog(file)
	if err != nil {
		t.Fatal(err)
	}
	if got := Text(records, "stdout"); got != "first half, second half\n\n" {
		t.Errorf("stdout is %q", got)
	}
	if got := Text(records, "stderr"); got != "an error\n" {
		t.Errorf("stderr is %q", got)
	}
	if len(records) != 4 || !records[0].Partial || records[1].Partial {
		t.Errorf("records are %v", records)
	}
}

func TestReadLogRefusesWhatIsNoLog(t *testing.T) {
	for name, text := range map[string]string{
		"no newline":      "2016-10-06T00:17:09Z stdout F cut o",
		"no time":         "stdout F x\n",
		"wrong time":      "yesterday stdout F x\n",
		"unknown stream":  "2016-10-06T00:17:09Z stdin F x\n",
		"unknown tag":     "2016-10-06T00:17:09Z stdout X x\n",
		"missing content": "2016-10-06T00:17:09Z stdout F\n",
		"blank line":      "\n",
	} {
		file := filepath.Join(t.TempDir(), "0.log")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		records, err := ReadLog(file)
		if err == nil {
			t.Errorf("%s: read as %v", name, records)
		}
		if errors.Is(err, ErrUnfinished) != (name == "no newline") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestPodsAreNotTheSamePodTwice(t *testing.T) {
	a, b := Pod("web"), Pod("web")
	if a.Metadata.Uid == b.Metadata.Uid {
		t.Error("two pods have one uid")
	}
	if a.Labels["io.kubernetes.pod.uid"] != a.Metadata.Uid {
		t.Error("the label tells another uid than the metadata")
	}
}
