package spec

import (
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Real-time signals as C programs count them: the C library reserves the
// kernel's two lowest.
const (
	sigRTMin = 34
	sigRTMax = 64
)

// StopSignal picks the signal that stops a container: the request's, else the
// image's STOPSIGNAL (SIGTERM, TERM, 15, RTMIN+3), else SIGTERM. It returns
// the number and the value to report in the container's status. A STOPSIGNAL that
// is none, or cannot be sent to a container (0, 32, 65, SIGFOO), counts as absent:
// peers start such images, and the grace period ends with SIGKILL in any case.
func StopSignal(asked cri.Signal, image string) (unix.Signal, cri.Signal, error) {
	if asked != cri.Signal_SIGNAL_RUNTIME_DEFAULT {
		number, ok := signalNumber(asked)
		if !ok {
			return 0, 0, invalid("stop_signal %d is unknown", asked)
		}
		return number, asked, nil
	}
	if number, signal, ok := ImageStopSignal(image); ok {
		return number, signal, nil
	}
	return unix.SIGTERM, cri.Signal_SIGNAL_SIGTERM, nil
}

// ImageStopSignal is an image's STOPSIGNAL, if that can be sent to a container.
func ImageStopSignal(image string) (unix.Signal, cri.Signal, bool) {
	number, ok := parseSignal(image)
	for value := range int32(len(cri.Signal_name)) {
		if n, known := signalNumber(cri.Signal(value)); ok && known && n == number {
			return number, cri.Signal(value), true
		}
	}
	return 0, 0, false
}

// signalNumber derives the number from the enum's name: SIGNAL_ followed by the
// signal's name, with plus and minus spelled out.
func signalNumber(signal cri.Signal) (unix.Signal, bool) {
	name, ok := strings.CutPrefix(cri.Signal_name[int32(signal)], "SIGNAL_")
	if !ok {
		return 0, false
	}
	return parseSignal(strings.NewReplacer("PLUS", "+", "MINUS", "-").Replace(name))
}

// parseSignal reads a number, or a name in any case with or without SIG.
func parseSignal(s string) (unix.Signal, bool) {
	if number, err := strconv.ParseUint(s, 10, 7); err == nil {
		return unix.Signal(number), true
	}
	name := strings.TrimPrefix(strings.ToUpper(s), "SIG")
	switch name {
	case "RTMIN":
		return sigRTMin, true
	case "RTMAX":
		return sigRTMax, true
	case "CLD":
		return unix.SIGCLD, true
	case "IOT":
		return unix.SIGIOT, true
	case "POLL":
		return unix.SIGPOLL, true
	}
	if text, ok := strings.CutPrefix(name, "RTMIN+"); ok {
		offset, err := strconv.ParseUint(text, 10, 7)
		return sigRTMin + unix.Signal(offset), err == nil
	}
	if text, ok := strings.CutPrefix(name, "RTMAX-"); ok {
		offset, err := strconv.ParseUint(text, 10, 7)
		return sigRTMax - unix.Signal(offset), err == nil
	}
	number := unix.SignalNum("SIG" + name)
	return number, number != 0
}
