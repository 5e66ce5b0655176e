package record

import (
	"testing"

	"github.com/crius-run/crius/test/kit/disk"
)

type content struct {
	Text string `json:"text"`
}

func TestNamesOnDisk(t *testing.T) {
	disk.Names(t, map[string]any{"document": envelope[content]{}})
}
