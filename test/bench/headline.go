package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// headline is what the page shows of a run: lines of its tables that have the
// same unit.
type headline struct {
	name  string // of the plot's file
	title string
	about string
	unit  string
	picks []selection
}

// selection is one line of one table.
type selection struct {
	label string
	row   string
	table string // beginning of its title
	line  string
}

var headlines = []headline{
	{"pods", "A pod is up", "From RunPodSandbox to the end of StartContainer, one pod at a time and eight.", "ms", []selection{
		{"runc, 1 at once", "pods", "Pods with runc, 1 at once", phases[podUp]},
		{"runc, 8 at once", "pods", "Pods with runc, 8 at once", phases[podUp]},
		{"crun, 1 at once", "pods", "Pods with crun, 1 at once", phases[podUp]},
		{"crun, 8 at once", "pods", "Pods with crun, 8 at once", phases[podUp]},
	}},
	{"exec", "A probe is run", "ExecSync of a program that ends at once.", "ms", []selection{
		{"runc, 1 at once", "exec", "Exec probes with runc, 1 at once", phases[execSync]},
		{"runc, 8 at once", "exec", "Exec probes with runc, 8 at once", phases[execSync]},
		{"crun, 1 at once", "exec", "Exec probes with crun, 1 at once", phases[execSync]},
		{"crun, 8 at once", "exec", "Exec probes with crun, 8 at once", phases[execSync]},
	}},
	{"sessions", "Sessions of people", "By kubectl over SPDY, with runc; all but the first carry 100 MiB.", "ms", []selection{
		{"exec of a program that ends at once", "sessions", sessionTimes, sessions[0].name},
		{"exec, output", "sessions", sessionTimes, execOutput},
		{"exec of cat, there and back", "sessions", sessionTimes, execBothWays},
		{"attach, output", "sessions", sessionTimes, attachOutput},
		{"port-forward", "sessions", sessionTimes, forwarded},
	}},
	{"pull", "An image is pulled", "A large one in several layers, from a registry on the same machine to a tmpfs.", "seconds", []selection{
		{"time", "pull", "Image of", "nothing of it there"},
		{"CPU", "pull", "Image of", "CPU"},
	}},
	{"memory", "Memory of a pod", "What the node needs beside the container's own program.", "KiB", []selection{
		{"monitor or shim", "node", "Idle nodes", "KiB a pod: monitor or shim"},
		{"the same, after a minute", "node", "Idle nodes", "KiB a pod: the same, silent for a minute"},
		{"pause process", "node", "Idle nodes", "KiB a pod: pause"},
	}},
	{"lists", "Calls of a kubelet", "The calls that it repeats all the time, on a node with 2000 containers.", "ms", []selection{
		{"ListPodSandbox", "lists", manyContainers, "ListPodSandbox"},
		{"ListContainers", "lists", manyContainers, "ListContainers"},
		{"ListContainers, running", "lists", manyContainers, "ListContainers, running"},
		{"PodSandboxStatus", "lists", manyContainers, "PodSandboxStatus"},
		{"ContainerStatus", "lists", manyContainers, "ContainerStatus"},
		{"Status", "lists", manyContainers, "Status"},
	}},
}

const (
	manyContainers = "2000 containers, 300 calls"
	sessionTimes   = "Sessions with runc: ms"

	ratio = crius + "/containerd" // the head of a column
)

// canShow returns why a run of these rows has too little for the page, before
// it is made.
func canShow(wanted []row) error {
	for _, variable := range []string{"PODS", "CONTAINERS"} {
		if os.Getenv(variable) != "" {
			return fmt.Errorf("the page is of a whole run: do without %s", variable)
		}
	}
	for _, h := range headlines {
		if !slices.ContainsFunc(wanted, func(w row) bool { return w.name == h.picks[0].row }) {
			return fmt.Errorf("the page needs the row %s as well", h.picks[0].row)
		}
	}
	return nil
}

// find returns a line of a plot: the values of all targets, in the table's
// order.
func (r *report) find(p selection) (group, error) {
	for _, row := range r.Rows {
		for _, t := range row.Tables {
			if row.Name != p.row || !strings.HasPrefix(t.title, p.table) {
				continue
			}
			for _, cells := range t.lines {
				if cells[0] != p.line {
					continue
				}
				g := group{label: p.label}
				for _, column := range t.bars {
					g.values = append(g.values, figure{plainName(t.head[column]), cells[column]})
				}
				if i := slices.IndexFunc(t.head, func(head string) bool { return plainName(head) == ratio }); i >= 0 {
					g.ratio = cells[i]
				}
				return g, nil
			}
		}
	}
	return group{}, fmt.Errorf("row %s has no line %q in a table %q", p.row, p.line, p.table)
}

// plainName returns the head of a column without the kind of containerd, which
// differs between handlers, as the page explains.
func plainName(head string) string { return strings.TrimSuffix(head, ofDebian) }

// page writes the short page to file, and its plots into the directory of the
// same name beside it. raw is the file with all tables, to which the page
// links.
func (r *report) page(file, raw string) error {
	plots := strings.TrimSuffix(file, filepath.Ext(file))
	if err := os.MkdirAll(plots, 0o755); err != nil {
		return err
	}
	var text strings.Builder
	r.introduce(&text, link(file, raw))
	for _, h := range headlines {
		p := plot{title: h.title, unit: h.unit}
		for _, pick := range h.picks {
			g, err := r.find(pick)
			if err != nil {
				return err
			}
			p.groups = append(p.groups, g)
		}
		name := filepath.Join(plots, h.name+".svg")
		if err := os.WriteFile(name, []byte(p.svg()), 0o644); err != nil {
			return err
		}
		fmt.Fprintf(&text, "\n## %s\n\n%s\n\n![%s](%s)\n\n", h.title, h.about, h.title, link(file, name))
		p.markdown(&text)
	}
	r.explain(&text)
	return os.WriteFile(file, []byte(text.String()), 0o644)
}

// link returns the path of a file relative to the page at from; "": there is
// none.
func link(from, to string) string {
	if to == "" {
		return ""
	}
	relative, err := filepath.Rel(filepath.Dir(from), to)
	if err != nil { // one is absolute, and the other is not
		return to
	}
	return relative
}

func (r *report) introduce(w io.Writer, raw string) {
	fmt.Fprintf(w, "# Performance\n\n"+
		"What pods cost with crius, beside containerd and beside the floor, which is what nobody\n"+
		"can avoid: CNI plugins and OCI runtime, run as raw commands on a bundle that is ready.\n")
	if raw != "" {
		fmt.Fprintf(w, "The headlines of a run; [all its tables](%s) have percentiles, and CPU time,\n"+
			"restarts, logs and allocations as well.\n", raw)
	}
}

func (r *report) explain(w io.Writer) {
	fmt.Fprintf(w, "\n## How to read it\n\n"+
		"- Figures are medians, except for memory (Pss), and less is better.\n"+
		"- crius, containerd and the floor took turns in one run, on nodes that are alike, so that a\n"+
		"  machine that is busy for a while is so for all. Compare within a run only.\n"+
		"- The floor does not report, record or recover anything. Where crius is near it there is\n"+
		"  little left to gain.\n"+
		"- One at a time shows how long a pod takes on a node that is idle, eight at once how much\n"+
		"  work it is on one that is busy.\n"+
		"- With crun the peer is Debian's containerd, since Debian's crun does not take the version of\n"+
		"  the runtime specification that a current one writes.\n"+
		"- Nodes are tmpfs, except in [row disk](performance/run.md#disk), where pods and pulls cost\n"+
		"  their syncs as well. An image of 10 GB has [a run of its own](performance/big.md)\n"+
		"  (`make bench ROW=big`), and so has [a node with 500 pods](performance/scale.md).\n"+
		"- With creates under way on two processors, the slowest calls wait: [the tables](performance/run.md#lists)\n"+
		"  have beside them how long the threads of server and client ran and waited for a processor.\n"+
		"- PodSandboxStatus of crius has the states of the pod's containers, which a kubelet wants\n"+
		"  that follows events (KEP-3386); containerd's has not.\n"+
		"- A row fails, and there is no page, unless what it measures has worked and has left\n"+
		"  nothing behind.\n\n"+
		"## The run\n\nOn %s, by\n\n```\n%s\n```\n\n| | |\n|---|---|\n", r.Date, r.Command)
	for _, fact := range r.Machine {
		fmt.Fprintf(w, "| %s | %s |\n", fact[0], fact[1])
	}
}

// markdown writes the values of a plot as a table.
func (p *plot) markdown(w io.Writer) {
	names := p.names()
	fmt.Fprintf(w, "| %s | %s | %s |\n|---|%s--:|\n", p.unit, strings.Join(names, " | "), ratio, strings.Repeat("--:|", len(names)))
	for _, g := range p.groups {
		cells := []string{g.label}
		for _, name := range names {
			i := slices.IndexFunc(g.values, func(v figure) bool { return v.name == name })
			if i < 0 {
				cells = append(cells, "")
				continue
			}
			cells = append(cells, g.values[i].text)
		}
		fmt.Fprintf(w, "| %s |\n", strings.Join(append(cells, g.ratio), " | "))
	}
}
