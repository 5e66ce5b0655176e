package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/crius-run/crius/test/kit/image"
)

func TestBytesOfTakesMegabytesAndGigabytes(t *testing.T) {
	const variable = "CRIUS_TEST_BYTES"
	for text, want := range map[string]int64{"": 7, "300M": 300e6, "10G": 10e9, "299M": 0, "10": 0, "G": 0, "-5G": 0, "1.5G": 0, "10g": 0, "10MG": 0} {
		t.Setenv(variable, text)
		got, err := bytesOf(variable, 7)
		if got != want || (err == nil) != (want > 0) {
			t.Errorf("%q is %d bytes, %v; want %d", text, got, err, want)
		}
		if err != nil && !strings.Contains(err.Error(), variable+"="+text) {
			t.Errorf("the error does not name the variable: %v", err)
		}
	}
}

// The required space is reported before half of it has been pulled.
func TestBigImageThatDoesNotFit(t *testing.T) {
	of := &bigImage{layers: []bulkLayer{{Layer: image.Layer{Size: 7e9}, unpacked: 10e9}}}
	if err := of.fits(20e9); err != nil { // 17 GB, a tenth more, and 1 GB to spare
		t.Error(err)
	}
	err := of.fits(19e9)
	if err == nil {
		t.Fatal("19 GB are said to suffice")
	}
	for _, part := range []string{"19.7 GB", "19.0 GB are free", "SIZE=9600M"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("the error does not say %q: %v", part, err)
		}
	}
}

// A run of all rows needs neither the time nor the space of the largest image.
func TestBigRowIsMeasuredOnlyWhereItIsNamed(t *testing.T) {
	isBig := func(r row) bool { return r.name == "big" }
	if all, err := pick(nil); err != nil || slices.ContainsFunc(all, isBig) {
		t.Errorf("a run of all rows has it, or fails: %v", err)
	}
	if named, err := pick([]string{"pull", "big"}); err != nil || len(named) != 2 || !isBig(named[1]) {
		t.Errorf("named, it is not there: %v", err)
	}
	if _, err := pick([]string{"huge"}); err == nil || !strings.Contains(err.Error(), "big") {
		t.Errorf("of an unknown row: %v", err)
	}
}
