package main

import (
	"encoding/xml"
	"fmt"
	"slices"
	"strings"
)

// plot is a picture of bars with a common scale.
type plot struct {
	title, unit string
	groups      []group
}

// group is the bars of one line.
type group struct {
	label  string
	values []figure
	ratio  string // of crius to containerd
}

// figure is the value of one target, as in a table; an empty text: unknown.
type figure struct{ name, text string }

// names returns the names of those that have bars, in their order.
func (p *plot) names() []string {
	var names []string
	for _, g := range p.groups {
		for _, v := range g.values {
			if !slices.Contains(names, v.name) {
				names = append(names, v.name)
			}
		}
	}
	return names
}

// Sizes in pixels.
const (
	plotWide  = 720
	barsFrom  = 170 // labels are to the left of it
	barsWide  = 460 // values are to the right of the bars
	barHigh   = 16
	barStep   = 20
	groupGap  = 12
	legendTop = 40
	barsTop   = 62
)

// style has colours for light and for dark pages.
const style = `
text { font: 13px sans-serif; fill: #24292f }
.title { font-weight: bold; font-size: 15px }
.floor { fill: #8c959f }
.crius { fill: #0969da }
.containerd { fill: #bf8700 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .floor { fill: #6e7681 }
  .crius { fill: #58a6ff }
  .containerd { fill: #d29922 }
}
`

// svg draws the plot. The longest bar has the full width.
func (p *plot) svg() string {
	var shapes strings.Builder
	text := func(x, y int, attributes, content string) {
		fmt.Fprintf(&shapes, "<text x=\"%d\" y=\"%d\"%s>", x, y, attributes)
		_ = xml.EscapeText(&shapes, []byte(content)) // a Builder takes everything
		shapes.WriteString("</text>\n")
	}
	text(0, 16, ` class="title"`, p.title+": "+p.unit)
	x := barsFrom
	for _, name := range p.names() {
		fmt.Fprintf(&shapes, "<rect class=\"%s\" x=\"%d\" y=\"%d\" width=\"12\" height=\"12\"/>\n", name, x, legendTop-11)
		text(x+18, legendTop, "", name)
		x += 120
	}
	longest := 0.0
	for _, g := range p.groups {
		for _, v := range g.values {
			longest = max(longest, parse(v.text))
		}
	}
	y := barsTop
	for _, g := range p.groups {
		text(barsFrom-10, y+len(g.values)*barStep/2+3, ` text-anchor="end"`, g.label)
		for _, v := range g.values {
			width := 0.0
			if longest > 0 {
				width = parse(v.text) / longest * barsWide
			}
			if v.text != "" {
				fmt.Fprintf(&shapes, "<rect class=\"%s\" x=\"%d\" y=\"%d\" width=\"%.1f\" height=\"%d\"/>\n", v.name, barsFrom, y, width, barHigh)
				text(barsFrom+int(width)+6, y+barHigh-3, "", v.text)
			}
			y += barStep
		}
		y += groupGap
	}
	return fmt.Sprintf("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" viewBox=\"0 0 %[1]d %[2]d\" role=\"img\">\n"+
		"<style>%s</style>\n%s</svg>\n", plotWide, y, style, shapes.String())
}
