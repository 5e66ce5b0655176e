package network

import (
	"math/big"
	"strings"
	"testing"
)

func TestQuantity(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]int64{
		"0": 0, "1": 1, "+1": 1, "-1": -1, "1000": 1000, "1k": 1000, "10M": 10e6, "1.5M": 1500000, "1.1k": 1100, "0.1k": 100,
		"3G": 3e9, "1T": 1e12, "2P": 2e15, "9E": 9e18, "1Ki": 1024, "1.5Ki": 1536, "1Mi": 1 << 20, "1Gi": 1 << 30, "1Ti": 1 << 40, "1Pi": 1 << 50, "1Ei": 1 << 60,
		"1e6": 1e6, "1E6": 1e6, "1e+3": 1000, "15e-1": 2, "1500m": 2, "1000m": 1, "1u": 1, "1n": 1, "0m": 0, ".5k": 500, "5.k": 5000,
		"-1.5": -1, "12345678901234567": 12345678901234567,
	} {
		if got, err := quantity(text); err != nil || got != want {
			t.Errorf("quantity(%q) = %d, %v; want %d", text, got, err, want)
		}
	}
	for _, text := range []string{
		"", " ", "M", "1 M", " 1", "1M ", "1.2.3", "1..2", "--1", "+-1", "1-", "1+1", ".", "-", "e5", "1e", "1e5M", "1e1.5", "1e99", "1e-99", "1e999999999999",
		"1K", "1mi", "1ki", "1Mb", "1MM", "1i", "0x10", "1_000", "inf", "NaN", "1/3", "10E", "9223372036854775808", "１", "1\x00", strings.Repeat("1", 65),
	} {
		if got, err := quantity(text); err == nil {
			t.Errorf("quantity(%q) = %d", text, got)
		}
	}
}

func FuzzQuantity(f *testing.F) {
	for _, seed := range []string{"1", "1.5M", "10Mi", "1e6", "-0.5k", "9E", "1e-18", "00.00n"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		got, err := quantity(text)
		if err != nil {
			return
		}
		// Whatever the suffix: a plain number means itself, rounded up.
		if plain, ok := new(big.Rat).SetString(text); ok && strings.IndexFunc(text, func(r rune) bool { return r > '9' || r < '.' }) < 0 && !strings.Contains(text, "/") {
			diff := new(big.Rat).Sub(new(big.Rat).SetInt64(got), plain)
			if diff.Sign() < 0 || diff.Cmp(big.NewRat(1, 1)) >= 0 {
				t.Errorf("quantity(%q) = %d", text, got)
			}
		}
	})
}
