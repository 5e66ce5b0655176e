package wire

// StampLen is the length of every stamp until the year 10000.
const StampLen = len("2006-01-02T15:04:05.000000000Z")

// AppendStamp appends a point of Unix time as RFC 3339 in UTC with nine digits
// of the second's fraction. Package time would parse it exactly, but would cost
// too much memory for writing it.
func AppendStamp(b []byte, sec int64, nsec int) []byte {
	days, rest := sec/86400, int(sec%86400)
	if rest < 0 {
		days, rest = days-1, rest+86400
	}
	year, month, day := date(days)
	b = digits(b, year, 4)
	b = digits(append(b, '-'), month, 2)
	b = digits(append(b, '-'), day, 2)
	b = digits(append(b, 'T'), rest/3600, 2)
	b = digits(append(b, ':'), rest/60%60, 2)
	b = digits(append(b, ':'), rest%60, 2)
	b = digits(append(b, '.'), nsec, 9)
	return append(b, 'Z')
}

// date returns the civil date, in the Gregorian calendar, for a count of days
// since 1970-01-01. It counts in years that begin on 1 March, so that the leap
// day is a year's last, and in eras of 400 such years, which are all alike.
func date(days int64) (year, month, day int) {
	const (
		perEra   = 400*365 + 97
		toMarch0 = 719468 // from 0000-03-01 to 1970-01-01
	)
	days += toMarch0
	era := days / perEra
	if days < 0 {
		era = (days - perEra + 1) / perEra
	}
	d := int(days - era*perEra)
	y := (d - d/1460 + d/36524 - d/146096) / 365
	d -= 365*y + y/4 - y/100
	m := (5*d + 2) / 153 // months from March on: 153 days in five months, repeated
	day = d - (153*m+2)/5 + 1
	month, year = m+3, y+int(era)*400
	if month > 12 {
		month, year = month-12, year+1
	}
	return year, month, day
}

func digits(b []byte, n, width int) []byte {
	for range width {
		b = append(b, '0')
	}
	for i := len(b) - 1; width > 0; width-- {
		b[i] = byte('0' + n%10)
		n /= 10
		i--
	}
	return b
}
