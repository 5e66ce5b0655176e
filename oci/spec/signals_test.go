package spec

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
)

// TestEveryStopSignal: each of CRI's 65 signals has its own number.
func TestEveryStopSignal(t *testing.T) {
	numbers := map[unix.Signal]int{}
	for value := 1; value <= 65; value++ {
		asked := cri.Signal(value)
		number, reported, err := StopSignal(asked, "SIGHUP")
		if err != nil || reported != asked || number < 1 || number > 64 {
			t.Errorf("%s: %d, %s, %v", asked, number, reported, err)
		}
		numbers[number]++
	}
	twice := map[unix.Signal]bool{unix.SIGABRT: true, unix.SIGCHLD: true, unix.SIGIO: true} // IOT, CLD, POLL
	for number := unix.Signal(1); number <= 64; number++ {
		want := 1
		switch {
		case number == 32 || number == 33: // the C library's
			want = 0
		case twice[number]:
			want = 2
		}
		if numbers[number] != want {
			t.Errorf("signal %d has %d names, want %d", number, numbers[number], want)
		}
	}
	for signal, number := range map[cri.Signal]unix.Signal{
		cri.Signal_SIGNAL_SIGTERM: 15, cri.Signal_SIGNAL_SIGKILL: 9, cri.Signal_SIGNAL_SIGUSR2: 12, cri.Signal_SIGNAL_SIGPOLL: 29,
		cri.Signal_SIGNAL_SIGRTMIN: 34, cri.Signal_SIGNAL_SIGRTMINPLUS3: 37, cri.Signal_SIGNAL_SIGRTMINPLUS15: 49,
		cri.Signal_SIGNAL_SIGRTMAXMINUS14: 50, cri.Signal_SIGNAL_SIGRTMAX: 64,
	} {
		if got, _, _ := StopSignal(signal, ""); got != number {
			t.Errorf("%s is %d, want %d", signal, got, number)
		}
	}
}

func TestImageStopSignal(t *testing.T) {
	for image, want := range map[string]cri.Signal{
		"": cri.Signal_SIGNAL_SIGTERM, "SIGTERM": cri.Signal_SIGNAL_SIGTERM, "TERM": cri.Signal_SIGNAL_SIGTERM,
		"sigint": cri.Signal_SIGNAL_SIGINT, "15": cri.Signal_SIGNAL_SIGTERM, "3": cri.Signal_SIGNAL_SIGQUIT,
		"RTMIN": cri.Signal_SIGNAL_SIGRTMIN, "SIGRTMIN+3": cri.Signal_SIGNAL_SIGRTMINPLUS3, "rtmin+3": cri.Signal_SIGNAL_SIGRTMINPLUS3,
		"37": cri.Signal_SIGNAL_SIGRTMINPLUS3, "RTMAX-2": cri.Signal_SIGNAL_SIGRTMAXMINUS2, "SIGRTMAX": cri.Signal_SIGNAL_SIGRTMAX,
		"RTMIN+20": cri.Signal_SIGNAL_SIGRTMAXMINUS10, "RTMAX-30": cri.Signal_SIGNAL_SIGRTMIN, "RTMIN+0": cri.Signal_SIGNAL_SIGRTMIN,
		"CLD": cri.Signal_SIGNAL_SIGCHLD, "64": cri.Signal_SIGNAL_SIGRTMAX,
	} {
		number, got, err := StopSignal(cri.Signal_SIGNAL_RUNTIME_DEFAULT, image)
		wantNumber, _ := signalNumber(want)
		if err != nil || got != want || number != wantNumber {
			t.Errorf("%q: %d, %s, %v", image, number, got, err)
		}
	}
	for _, image := range []string{
		"0", "-1", "65", "SIGFOO", "15 ", "32", "33", "128", "99999999999999999999", "SIG", "SIGSIGTERM", "SIGTERM ", "RTMIN+", "RTMIN-1",
		"RTMIN+31", "RTMIN+100", "RTMAX-31", "RTMAX+1", "RTMINPLUS3", "RUNTIME_DEFAULT", "KILL\n",
	} {
		number, got, err := StopSignal(cri.Signal_SIGNAL_RUNTIME_DEFAULT, image)
		if _, _, known := ImageStopSignal(image); known || err != nil || number != unix.SIGTERM || got != cri.Signal_SIGNAL_SIGTERM {
			t.Errorf("%q: %d, %s, %v", image, number, got, err)
		}
	}
	if _, _, err := StopSignal(cri.Signal(66), ""); !errors.Is(err, fault.Invalid) {
		t.Errorf("signal 66 of the request: %v", err)
	}
}

func FuzzStopSignal(f *testing.F) {
	f.Add(int32(0), "SIGRTMIN+3")
	f.Add(int32(65), "")
	f.Add(int32(-1), "RTMAX-99")
	f.Fuzz(func(t *testing.T, asked int32, image string) {
		number, reported, err := StopSignal(cri.Signal(asked), image)
		if err != nil {
			if !errors.Is(err, fault.Invalid) {
				t.Fatal(err)
			}
			return
		}
		if again, ok := signalNumber(reported); !ok || again != number || number < 1 || number > 64 {
			t.Fatalf("%d %q: %d, reported as %s", asked, image, number, reported)
		}
	})
}
