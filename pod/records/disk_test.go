package records

import (
	"testing"

	"github.com/crius-run/crius/test/kit/disk"
)

func TestNamesOnDisk(t *testing.T) {
	disk.Names(t, map[string]any{"pod.json": Pod{}, "container.json": Container{}})
}

// Records that set every field are read, and written again unchanged.
func TestRecordsWithEveryField(t *testing.T) {
	pod := disk.Full[disk.Record[Pod]](t, "pod-full.json")
	if pod.Version != Version {
		t.Errorf("pod: version %d", pod.Version)
	}
	container := disk.Full[disk.Record[Container]](t, "container-full.json")
	if container.Version != Version {
		t.Errorf("container: version %d", container.Version)
	}
}
