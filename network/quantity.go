package network

import (
	"fmt"
	"math/big"
	"strconv"
	"strings"
)

// quantity reads a Kubernetes resource quantity ("1.5M", "10Mi", "1e6"), rounded
// up to a whole number as Kubernetes does.
func quantity(text string) (int64, error) {
	bad := fmt.Errorf("%.64q is not a quantity such as 1500k or 10M", text)
	if len(text) > 64 {
		return 0, bad
	}
	end := strings.IndexFunc(text, func(r rune) bool { return !strings.ContainsRune("+-.0123456789", r) })
	if end < 0 {
		end = len(text)
	}
	number, ok := decimal(text[:end])
	if !ok {
		return 0, bad
	}
	unit, ok := multiplier(text[end:])
	if !ok {
		return 0, bad
	}
	number.Mul(number, unit)
	whole, rest := new(big.Int).QuoRem(number.Num(), number.Denom(), new(big.Int))
	if rest.Sign() > 0 {
		whole.Add(whole, big.NewInt(1))
	}
	if !whole.IsInt64() {
		return 0, fmt.Errorf("%.64q is too large", text)
	}
	return whole.Int64(), nil
}

func decimal(text string) (*big.Rat, bool) {
	digits := strings.TrimLeft(text, "+-")
	if len(text)-len(digits) > 1 || strings.ContainsAny(digits, "+-") || strings.Count(digits, ".") > 1 || strings.Trim(digits, ".") == "" {
		return nil, false
	}
	return new(big.Rat).SetString(text)
}

// multiplier returns the factor of a suffix.
func multiplier(suffix string) (*big.Rat, bool) {
	if suffix == "" {
		return big.NewRat(1, 1), true
	}
	if i := strings.Index("numkMGTPE", suffix); i >= 0 && len(suffix) == 1 {
		power := []int{-9, -6, -3, 3, 6, 9, 12, 15, 18}[i]
		return ten(power), true
	}
	if i := strings.Index("KMGTPE", suffix[:1]); i >= 0 && len(suffix) == 2 && suffix[1] == 'i' {
		return new(big.Rat).SetInt(new(big.Int).Lsh(big.NewInt(1), uint(10*(i+1)))), true
	}
	if suffix[0] == 'e' || suffix[0] == 'E' {
		power, err := strconv.Atoi(suffix[1:])
		if err != nil || power < -18 || power > 18 { // before it becomes a number with a billion digits
			return nil, false
		}
		return ten(power), true
	}
	return nil, false
}

func ten(power int) *big.Rat {
	r := new(big.Rat).SetInt(new(big.Int).Exp(big.NewInt(10), big.NewInt(int64(max(power, -power))), nil))
	if power < 0 {
		r.Inv(r)
	}
	return r
}
