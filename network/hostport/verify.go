package hostport

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Load records the pods like Restore, and leaves the kernel alone: for a caller
// that wants to Verify without having made the rules.
func (t *Table) Load(pods []Pod) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, p := range pods {
		t.pods[p.ID] = p
	}
	t.unsure = true
}

// Verify returns how the rules in the kernel differ from those of the pods, one
// line each; none if they agree.
func (t *Table) Verify(ctx context.Context) ([]string, error) {
	ctx, cancel := limited(ctx)
	defer cancel()
	t.mu.Lock()
	defer t.mu.Unlock()
	there, err := tableHandles()
	if err != nil {
		return nil, err
	}
	want := t.have
	if t.unsure {
		// Check handles new addresses of the node.
		if want, _, err = t.want(); err != nil {
			return nil, err
		}
	}
	var wrong []string
	needed := familiesOf(want)
	for _, f := range families {
		_, is := there[f]
		switch {
		case is && !slices.Contains(needed, f):
			wrong = append(wrong, fmt.Sprintf("table %s %s exists, but no pod has host ports", f, tableName))
		case !is && slices.Contains(needed, f):
			wrong = append(wrong, fmt.Sprintf("table %s %s is missing", f, tableName))
		case is:
			text, err := listing(ctx, f)
			if err != nil {
				return nil, err
			}
			wrong = append(wrong, differences(f, text, want, t.unsure)...)
		}
	}
	return wrong, nil
}

// differences compares the listing of a table with what it should be. With
// anyNode the node's addresses do not matter.
func differences(f family, listed string, want map[element]bool, anyNode bool) []string {
	have := parseTable(f, listed)
	var wrong []string
	for chain, rules := range parseTable(f, skeleton(f)).rules {
		if have.rules[chain] != rules {
			wrong = append(wrong, fmt.Sprintf("chain %s of table %s %s has %d rules instead of %d", chain, f, tableName, have.rules[chain], rules))
		}
	}
	missing, more := maps.Clone(want), maps.Clone(have.elements)
	unimportant := func(e element, _ bool) bool { return e.family != f || anyNode && e.set == "node" }
	maps.DeleteFunc(missing, func(e element, _ bool) bool { return have.elements[e] || unimportant(e, true) })
	maps.DeleteFunc(more, func(e element, _ bool) bool { return want[e] || unimportant(e, true) })
	for _, one := range []struct {
		what string
		all  map[element]bool
	}{{"is missing", missing}, {"belongs to no pod", more}} {
		for e := range one.all {
			wrong = append(wrong, strings.TrimSpace(e.String())+" "+one.what)
		}
	}
	slices.Sort(wrong)
	return wrong
}

// content is the content of a listing.
type content struct {
	rules    map[string]int // by chain
	elements map[element]bool
}

// parseTable parses the output of "nft -nn list table", or skeleton.
func parseTable(f family, text string) content {
	found := content{map[string]int{}, map[element]bool{}}
	kind, name, inElements := "", "", false
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		fields := strings.Fields(line)
		switch {
		case len(fields) == 0:
			continue
		case len(fields) > 2 && (fields[0] == "chain" || fields[0] == "set" || fields[0] == "map") && kind == "":
			kind, name = fields[0], fields[1]
			if kind == "chain" {
				found.rules[name] = 0
			}
			if fields[len(fields)-1] == "}" {
				kind = ""
			}
			continue
		case line == "}":
			kind = ""
			continue
		}
		if kind == "chain" && fields[0] != "type" {
			found.rules[name]++
		}
		if kind != "set" && kind != "map" {
			continue
		}
		if rest, begins := strings.CutPrefix(line, "elements = {"); begins {
			line, inElements = rest, true
		}
		if !inElements {
			continue
		}
		rest, ends := strings.CutSuffix(line, "}")
		for item := range strings.SplitSeq(strings.TrimSuffix(rest, ","), ", ") { // a link's name may contain a comma
			if item = strings.TrimSpace(item); item != "" {
				key, value, _ := strings.Cut(item, " : ")
				found.elements[element{f, name, key, value}] = true
			}
		}
		inElements = !ends
	}
	return found
}
