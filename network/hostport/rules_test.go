package hostport

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/crius-run/crius/internal/fault"
)

func ip(text string) netip.Addr { return netip.MustParseAddr(text) }

var (
	web = Pod{"web", []Mapping{
		{8080, 80, "tcp", netip.Addr{}}, {5353, 53, "udp", ip("192.0.2.1")}, {9999, 99, "sctp", ip("::")},
	}, []Target{{ip("10.7.0.5"), "cni0"}, {ip("fd00:7::5"), "cni0"}}}
	dns     = Pod{"dns", []Mapping{{53, 53, "udp", ip("0.0.0.0")}, {54, 53, "udp", ip("2001:db8::1")}}, []Target{{ip("10.7.0.6"), "veth1"}}}
	claimed = Pod{"claimed", []Mapping{{1, 1, "tcp", netip.Addr{}}}, nil}
)

func table(pods ...Pod) map[string]Pod {
	all := map[string]Pod{}
	for _, p := range pods {
		all[p.ID] = p
	}
	return all
}

func equal(t *testing.T, what, got, want string) {
	t.Helper()
	if got != want {
		t.Errorf("%s:\n%s\nwant\n%s", what, got, want)
	}
}

// A pod is a handful of elements; adding or removing it touches no others.
func TestDelta(t *testing.T) {
	t.Parallel()
	node := []netip.Addr{ip("192.0.2.1")}
	none, one, both := elements(table(claimed), node), elements(table(web), node), elements(table(web, dns, claimed), node)
	equal(t, "first pod", delta(none, one), `add element ip crius-hostports addresses { 192.0.2.1 . 17 . 5353 : 10.7.0.5 . 53 }
add element ip crius-hostports links { "cni0" }
add element ip crius-hostports near { 17 . 5353 . "cni0" }
add element ip crius-hostports near { 6 . 8080 . "cni0" }
add element ip crius-hostports node { 192.0.2.1 }
add element ip crius-hostports ports { 6 . 8080 : 10.7.0.5 . 80 }
add element ip6 crius-hostports near { 132 . 9999 . "cni0" }
add element ip6 crius-hostports near { 6 . 8080 . "cni0" }
add element ip6 crius-hostports ports { 132 . 9999 : fd00:7::5 . 99 }
add element ip6 crius-hostports ports { 6 . 8080 : fd00:7::5 . 80 }
`)
	second := `element ip crius-hostports links { "veth1" }
element ip crius-hostports near { 17 . 53 . "veth1" }
element ip crius-hostports ports { 17 . 53 : 10.7.0.6 . 53 }
`
	equal(t, "second pod", delta(one, both), strings.ReplaceAll(second, "element ip", "add element ip"))
	equal(t, "its end", delta(both, one), strings.ReplaceAll(second, "element ip", "delete element ip"))
	equal(t, "no change", delta(both, both), "")

	third := web // on the same link, and replacing a part of the first
	third.ID, third.Mappings = "third", []Mapping{{8080, 81, "tcp", netip.Addr{}}}
	third.Targets = []Target{{ip("10.7.0.7"), "cni0"}}
	moved := delta(elements(table(web), nil), elements(table(third), nil))
	for _, want := range []string{"delete element ip crius-hostports ports { 6 . 8080 : 10.7.0.5 . 80 }\n", "add element ip crius-hostports ports { 6 . 8080 : 10.7.0.7 . 81 }\n"} {
		if !strings.Contains(moved, want) {
			t.Errorf("no %q in\n%s", want, moved)
		}
	}
	if strings.Contains(moved, "links") || strings.LastIndex(moved, "delete ") > strings.Index(moved, "add ") {
		t.Errorf("the link stays, and what goes goes first:\n%s", moved)
	}
}

// One port may be mapped for one address of each family, and leads to the pod's address of that
// family (plugins#378, kubernetes#82373).
func TestElementsOfAPortInBothFamilies_plugins_378_kubernetes_82373(t *testing.T) {
	t.Parallel()
	p := web
	p.Mappings = []Mapping{{80, 80, "tcp", ip("192.0.2.1")}, {80, 80, "tcp", ip("2001:db8::1")}}
	var got []string
	for e := range elements(table(p), nil) {
		if e.set == "addresses" || e.set == "ports" {
			got = append(got, e.String())
		}
	}
	slices.Sort(got)
	equal(t, "elements", strings.Join(got, ""), `element ip crius-hostports addresses { 192.0.2.1 . 6 . 80 : 10.7.0.5 . 80 }
element ip6 crius-hostports addresses { 2001:db8::1 . 6 . 80 : fd00:7::5 . 80 }
`)
}

// Two pods with one port must not exist; but if they are on record, the others
// still get theirs.
func TestElementsOfAClash(t *testing.T) {
	t.Parallel()
	second := web
	second.ID, second.Targets = "zweite", []Target{{ip("10.7.0.9"), "cni0"}}
	all := elements(table(second, web, dns), nil)
	keys := map[element]bool{}
	for e := range all {
		e.value = ""
		if keys[e] {
			t.Errorf("twice: %v", e)
		}
		keys[e] = true
	}
	if !all[element{ip4, "ports", "6 . 8080", "10.7.0.5 . 80"}] || !all[element{ip4, "ports", "17 . 53", "10.7.0.6 . 53"}] {
		t.Errorf("the first pod and the other one lost their ports: %v", all)
	}
}

func TestRefill(t *testing.T) {
	t.Parallel()
	only4 := elements(table(dns), []netip.Addr{ip("192.0.2.1"), ip("2001:db8::9")})
	for _, c := range []struct {
		what, got     string
		starts, lacks []string
	}{
		{"first", refill(nil, only4), []string{"table ip crius-hostports {\n\tmap addresses"}, []string{"flush", "delete", "ip6"}},
		{"again", refill([]family{ip4}, only4), []string{"flush table ip crius-hostports\n", "flush map ip crius-hostports ports\n", "flush set ip crius-hostports links\n"}, []string{"delete", "ip6"}},
		{"one family less", refill(families, only4), []string{"delete table ip6 crius-hostports\n"}, []string{"table ip6 crius-hostports {", "flush map ip6"}},
		{"the last pod", refill(families, nil), []string{"flush"}, nil},
		{"by force", replace(families, only4), []string{"delete table ip crius-hostports\ndelete table ip6 crius-hostports\n"}, []string{"flush"}},
	} {
		for _, want := range c.starts {
			if c.what != "the last pod" && !strings.Contains(c.got, want) {
				t.Errorf("%s: no %q in\n%s", c.what, want, c.got)
			}
		}
		for _, lacks := range c.lacks {
			if strings.Contains(c.got, lacks) {
				t.Errorf("%s: %q in\n%s", c.what, lacks, c.got)
			}
		}
	}
	equal(t, "the last pod", refill(families, nil), "delete table ip crius-hostports\ndelete table ip6 crius-hostports\n")
	equal(t, "never a pod", refill(nil, nil), "")
	if six := skeleton(ip6); strings.Contains(six, "ipv4") || strings.Contains(six, "127.") || strings.Contains(six, "LOOPBACK") || strings.Contains(six, "LOCALHOST") {
		t.Errorf("IPv6 table\n%s", six)
	}
}

func TestLocalLinks(t *testing.T) {
	t.Parallel()
	for host, want := range map[string]bool{"": true, "0.0.0.0": true, "127.0.0.1": true, "127.8.8.8": true, "192.0.2.1": false, "::": false, "2001:db8::1": false} {
		m := Mapping{HostPort: 1, ContainerPort: 1, Protocol: "tcp"}
		if host != "" {
			m.HostIP = ip(host)
		}
		p := Pod{"p", []Mapping{m}, []Target{{ip("fd00::1"), "six"}, {ip("10.0.0.1"), "four"}}}
		if got := p.localLinks(); slices.Equal(got, []string{"four"}) != want {
			t.Errorf("%q: %q", host, got)
		}
	}
}

func TestClaim(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		a, b  Mapping
		clash bool
	}{
		{Mapping{80, 1, "tcp", netip.Addr{}}, Mapping{80, 2, "tcp", netip.Addr{}}, true},
		{Mapping{80, 1, "tcp", netip.Addr{}}, Mapping{80, 1, "udp", netip.Addr{}}, false},
		{Mapping{80, 1, "tcp", netip.Addr{}}, Mapping{81, 1, "tcp", netip.Addr{}}, false},
		{Mapping{80, 1, "tcp", netip.Addr{}}, Mapping{80, 1, "tcp", ip("::")}, true},
		{Mapping{80, 1, "tcp", ip("0.0.0.0")}, Mapping{80, 1, "tcp", ip("::")}, false},
		{Mapping{80, 1, "tcp", ip("0.0.0.0")}, Mapping{80, 1, "tcp", ip("127.0.0.1")}, false},
		{Mapping{80, 1, "tcp", ip("::1")}, Mapping{80, 1, "tcp", ip("::1")}, true},
	} {
		for _, order := range [][2]Mapping{{c.a, c.b}, {c.b, c.a}} {
			table := New()
			if err := table.Claim("first", order[:1]); err != nil {
				t.Fatal(err)
			}
			if err := table.Claim("first", order[:1]); err != nil {
				t.Errorf("again: %v", err)
			}
			err := table.Claim("second", order[1:])
			if errors.Is(err, fault.Precondition) != c.clash || (err != nil) != c.clash {
				t.Errorf("%v: %v", order, err)
			}
			table.Close(t.Context(), Pod{ID: "first", Mappings: order[:1]})
			if err := table.Claim("second", order[1:]); err != nil {
				t.Errorf("%v after the end of the first: %v", order, err)
			}
		}
	}
}

func TestValidate(t *testing.T) {
	t.Parallel()
	m := Mapping{80, 8080, "tcp", netip.Addr{}}
	other, exact := m, m
	other.ContainerPort, exact.HostIP, exact.ContainerPort = 9090, ip("192.0.2.1"), 9090
	for _, c := range []struct {
		mappings []Mapping
		wrong    string
	}{
		{nil, ""}, {[]Mapping{m, m}, ""}, {[]Mapping{m, exact}, ""},
		{[]Mapping{m, {80, 8080, "tcp", ip("0.0.0.0")}}, ""},
		{[]Mapping{m, other}, "host port 80/tcp is mapped to both port 8080 and port 9090"},
		{[]Mapping{{80, 80, "tcp", ip("::1")}}, "[::1]:80/tcp"},
		{[]Mapping{{80, 80, "udp", ip("224.0.0.1")}}, "multicast"},
	} {
		err := Validate(c.mappings)
		if (err != nil) != (c.wrong != "") || err != nil && (!errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), c.wrong)) {
			t.Errorf("%v: %v, want %q", c.mappings, err, c.wrong)
		}
	}
}

// The JSON form is that of CNI.
func TestMappingJSON(t *testing.T) {
	t.Parallel()
	text, err := json.Marshal(web.Mappings)
	equal(t, fmt.Sprint("JSON ", err), string(text), `[{"hostPort":8080,"containerPort":80,"protocol":"tcp"},`+
		`{"hostPort":5353,"containerPort":53,"protocol":"udp","hostIP":"192.0.2.1"},{"hostPort":9999,"containerPort":99,"protocol":"sctp","hostIP":"::"}]`)
	var back []Mapping
	if err := json.Unmarshal(text, &back); err != nil || !slices.Equal(back, web.Mappings) {
		t.Errorf("%v, %v", back, err)
	}
}

func TestStale(t *testing.T) {
	t.Parallel()
	udp := func(text string) end { return end{17, netip.MustParseAddrPort(text)} }
	own := ownAddress(func() ([]netip.Addr, error) { return []netip.Addr{ip("192.0.2.1")}, nil })
	exact := Pod{"exact", []Mapping{{53, 5353, "udp", ip("192.0.2.1")}}, []Target{{ip("10.7.0.9"), "cni0"}}}
	dead := map[end]bool{udp("10.7.0.8:53"): true}
	for _, c := range []struct {
		what     string
		pods     []Pod
		to, from string
		want     bool
	}{
		{"right", []Pod{dns}, "192.0.2.1:53", "10.7.0.6:53", false},
		{"to the host, before the pod", []Pod{dns}, "192.0.2.1:53", "192.0.2.1:53", true},
		{"to the dead pod", []Pod{dns}, "192.0.2.1:53", "10.7.0.8:53", true},
		{"to localhost, before the pod", []Pod{dns}, "127.0.0.53:53", "127.0.0.53:53", true},
		{"of a pod to the world's DNS", []Pod{dns}, "198.51.100.1:53", "198.51.100.1:53", false},
		{"of a pod to the cluster's DNS", []Pod{dns}, "10.96.0.10:53", "10.7.0.20:53", false},
		{"another port", []Pod{dns}, "192.0.2.1:54", "192.0.2.1:54", false},
		{"to another pod's exact mapping", []Pod{dns, exact}, "192.0.2.1:53", "10.7.0.9:5353", false},
		{"taken over by an exact mapping", []Pod{dns, exact}, "192.0.2.1:53", "10.7.0.6:53", true},
		{"no pod: to the dead one", nil, "192.0.2.1:53", "10.7.0.8:53", true},
		{"no pod: to the host", nil, "192.0.2.1:53", "192.0.2.1:53", false},
		{"a claim is no mapping", []Pod{{"c", dns.Mappings, nil}}, "192.0.2.1:53", "192.0.2.1:53", false},
	} {
		decide := stale(leads(table(c.pods...)), dead, own)
		if got := decide(flow{to: udp(c.to), from: udp(c.from)}); got != c.want {
			t.Errorf("%s: stale %v", c.what, got)
		}
	}
}

// The kernel's message is parsed within its bounds.
func FuzzUnpack(f *testing.F) {
	f.Add(pack(nested(ctTupleOrig, nested(ctTupleIP, attribute{ctIP4Src, []byte{10, 0, 0, 1}}, attribute{ctIP4Dst, []byte{10, 0, 0, 2}}),
		nested(ctTupleProto, attribute{ctProtoNum, []byte{17}}, attribute{ctProtoSrcPort, []byte{0, 7}}, attribute{ctProtoDstPort, []byte{0, 53}}))))
	f.Add([]byte{4, 0, 1, 0, 3})
	f.Fuzz(func(t *testing.T, data []byte) {
		parseFlow(append(make([]byte, nfHeader), data...))
		for kind, value := range unpack(data) {
			if len(value) > len(data) {
				t.Errorf("attribute %d has %d bytes of %d", kind, len(value), len(data))
			}
		}
	})
}

func TestParseTuple(t *testing.T) {
	t.Parallel()
	text := unpack(pack(nested(ctTupleOrig, nested(ctTupleIP, attribute{ctIP4Src, []byte{10, 0, 0, 1}}, attribute{ctIP4Dst, []byte{10, 0, 0, 2}}),
		nested(ctTupleProto, attribute{ctProtoNum, []byte{17}}, attribute{ctProtoSrcPort, []byte{0, 7}}, attribute{ctProtoDstPort, []byte{0, 53}}))))[ctTupleOrig]
	from, to, ok := parseTuple(text)
	if !ok || from != (end{17, netip.MustParseAddrPort("10.0.0.1:7")}) || to != (end{17, netip.MustParseAddrPort("10.0.0.2:53")}) {
		t.Errorf("%v %v %v", from, to, ok)
	}
	if _, _, ok := parseTuple(text[:len(text)-8]); ok {
		t.Error("a tuple without its port is read")
	}
}

// A changed listing differs from what the pods want, and one with exactly their
// elements does not, whatever the names of links.
func FuzzListing(f *testing.F) {
	for _, link := range []string{"cni0", "veth1,2", "a{}b", `q"`, "}", "x : y", "#"} {
		f.Add(skeleton(ip4), link, uint16(8080))
	}
	f.Add("table ip crius-hostports {\n\tset node {\n\t\ttype ipv4_addr\n\t\telements = { 10.0.0.1,\n\t\t\t     10.0.0.2 }\n\t}\n\tchain x {\n\t}\n}\n", "l", uint16(1))
	f.Add("set\nmap a {\nelements = {", "l", uint16(0))
	f.Fuzz(func(t *testing.T, text, link string, port uint16) {
		found := parseTable(ip4, text)
		wrong := differences(ip4, text, found.elements, false)
		for _, line := range wrong {
			if !strings.HasPrefix(line, "chain ") {
				t.Errorf("%q: %s", text, line)
			}
		}
		if link == "" || len(link) > 15 || strings.ContainsFunc(link, func(r rune) bool { return r <= ' ' || r > '~' || r == '/' || r == ':' || r == '"' }) {
			return // the kernel allows no such name, or nft does not
		}
		pods := map[string]Pod{"p": {"p", []Mapping{{port, 80, "tcp", netip.Addr{}}}, []Target{{ip("10.7.0.5"), link}}}}
		want := elements(pods, []netip.Addr{ip("192.0.2.1")})
		if got := differences(ip4, listed(want), want, false); len(got) > 0 {
			t.Errorf("link %q: %q", link, got)
		}
	})
}

// listed returns nft's output for our table with these elements of IPv4.
func listed(all map[element]bool) string {
	sets := map[string][]string{}
	for e := range all {
		item := e.key
		if e.value != "" {
			item += " : " + e.value
		}
		sets[e.set] = append(sets[e.set], item)
	}
	text := skeleton(ip4)
	for set, items := range sets {
		text = strings.Replace(text, "}\n\tchain", fmt.Sprintf("}\n\tset %s {\n\t\ttype x\n\t\telements = { %s }\n\t}\n\tchain", set, strings.Join(items, ",\n\t\t\t     ")), 1)
	}
	return text
}
