package rundir

import (
	"errors"
	"strings"
	"testing"

	"github.com/crius-run/crius/internal/fault"
)

func TestRoom(t *testing.T) {
	t.Parallel()
	const half = MaxPod / 2
	var r Room
	claim := func(id string, need, used Use, words string) {
		t.Helper()
		err := r.Claim(id, need, func() Use {
			if r.mu.TryLock() {
				t.Error("a claim may be freed while the pod is measured")
			}
			return used
		})
		if (err == nil) != (words == "") || err != nil && (!errors.Is(err, fault.Exhausted) || !strings.Contains(err.Error(), words)) {
			t.Errorf("%s: %v", id, err)
		}
	}
	claim("a", Use{half, half}, Use{}, "")
	claim("b", Use{half, half}, Use{}, "")
	claim("c", Use{1, 0}, Use{}, "run directory")
	claim("c", Use{0, 1}, Use{}, "request")
	r.Free("a")
	r.Free("c")
	claim("c", Use{half, 0}, Use{}, "")
	claim("d", Use{0, 1}, Use{}, "")
	r.Free("b")
	r.Free("c")
	r.Free("d")
	claim("e", Use{1, 1}, Use{MaxPod, 0}, "67108864 bytes in the run directory")
	claim("e", Use{1, 1}, Use{0, MaxPod}, "67108864; at most")
	claim("e", Use{0, 0}, Use{MaxPod, MaxPod}, "")
	r.Keep("f", Use{MaxPod, 0})
	claim("g", Use{1, 0}, Use{}, "run directory")
	r.Free("f")
	claim("g", Use{1, 0}, Use{}, "")
}

// Usual commands, such as probes, do not pay for a look at what the pod has.
func TestSmallCommandsAreNotMeasured(t *testing.T) {
	t.Parallel()
	var r Room
	measured := 0
	for _, id := range []string{"a", "b", "c"} {
		if err := r.Claim(id, Use{Files: Unmeasured / 2}, func() Use { measured++; return Use{} }); err != nil {
			t.Error(err)
		}
	}
	if measured != 1 {
		t.Errorf("%d of 3 claims were measured, want the one beyond the limit", measured)
	}
}
