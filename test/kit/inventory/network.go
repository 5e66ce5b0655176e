package inventory

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
)

// network lists interfaces, firewall rules and abstract sockets of the calling
// thread's network namespace.
func (s *Snapshot) network(keep []string) error {
	links, err := net.Interfaces()
	if err != nil {
		return err
	}
	for _, l := range links {
		if !slices.Contains(keep, l.Name) {
			s.add("link", l.Name)
		}
	}
	for _, program := range []string{"iptables-save", "ip6tables-save"} {
		if err := s.rules(program); err != nil {
			return err
		}
	}
	if err := s.nftables(); err != nil {
		return err
	}
	return s.abstractSockets()
}

// nftables lists the tables that iptables-save does not show.
func (s *Snapshot) nftables() error {
	out, err := exec.Command("nft", "list", "ruleset").Output()
	if err != nil {
		return fmt.Errorf("nft: %w", err)
	}
	table, chain := "", ""
	for line := range strings.Lines(string(out)) {
		depth := len(line) - len(strings.TrimLeft(line, "\t"))
		text := strings.TrimSuffix(strings.TrimSpace(line), " {")
		switch {
		case depth == 0 && strings.HasPrefix(text, "table "):
			table, chain = text, ""
		case depth == 1:
			chain = text
		}
		if text != "" && text != "}" && !iptablesTable(table) {
			s.add("rule", strings.TrimSpace(fmt.Sprintf("nft %s %s: %s", table, chain, text)))
		}
	}
	return nil
}

// iptablesTable reports whether a table is iptables-nft's.
func iptablesTable(table string) bool {
	f := strings.Fields(table)
	return len(f) == 3 && (f[1] == "ip" || f[1] == "ip6") &&
		slices.Contains([]string{"filter", "nat", "mangle", "raw", "security"}, f[2])
}

func (s *Snapshot) rules(program string) error {
	out, err := exec.Command(program).Output()
	if err != nil {
		return fmt.Errorf("%s: %w", program, err)
	}
	family := strings.TrimSuffix(program, "-save")
	table := ""
	for line := range strings.Lines(string(out)) {
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, "*"):
			table = line[1:]
		case line == "" || line == "COMMIT" || strings.HasPrefix(line, "#") || permanentRule(line):
		default:
			s.add("rule", fmt.Sprintf("%s -t %s %s", family, table, line))
		}
	}
	return nil
}

// permanentRule reports whether a line is about built-in chains, or about chains
// and rules that the portmap plugin makes at its first use and then keeps.
func permanentRule(line string) bool {
	if strings.HasPrefix(line, ":") {
		chain := strings.Fields(line)[0][1:]
		return strings.ToUpper(chain) == chain && !strings.HasPrefix(chain, "CNI-") || kept[chain]
	}
	f := strings.Fields(line)
	if len(f) < 4 || f[0] != "-A" {
		return false
	}
	target := f[len(f)-1]
	for i, word := range f {
		if word == "-j" && i+1 < len(f) {
			target = f[i+1]
		}
	}
	return kept[target] && !strings.HasPrefix(f[1], "CNI-DN-") || kept[f[1]] && !strings.HasPrefix(target, "CNI-")
}

var kept = map[string]bool{
	"CNI-HOSTPORT-DNAT": true, "CNI-HOSTPORT-MASQ": true, "CNI-HOSTPORT-SETMARK": true,
}

// abstractSockets: any process in the network namespace may connect to one
// (CVE-2020-15257).
func (s *Snapshot) abstractSockets() error {
	data, err := os.ReadFile("/proc/thread-self/net/unix")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(data)) {
		if f := strings.Fields(line); len(f) == 8 && strings.HasPrefix(f[7], "@") {
			s.add("abstract socket", f[7])
		}
	}
	return nil
}
