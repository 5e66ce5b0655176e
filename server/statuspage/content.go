package statuspage

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"
	"unicode"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/storage/pull/progress"
)

const (
	mostRows    = 500 // of a table
	longestText = 256 // bytes of a foreign text
	// stuck is the duration from which an operation deserves attention.
	stuck = 10 * time.Second
)

// content is the data of the page. All of its texts are short and printable.
type content struct {
	Version    string
	Time       time.Time
	Up         time.Duration
	Cleanups   int
	Conditions []condition
	Work       table[work]
	Pulls      table[progress.Pull]
	Handlers   table[handlerRow]
	Stopped    table[containerRow]
	Pods       table[podRow]
}

// table is the first rows of a list.
type table[T any] struct {
	Rows []T
	More int
}

func first[T any](rows []T) table[T] {
	shown := rows[:min(len(rows), mostRows)]
	return table[T]{shown, len(rows) - len(shown)}
}

type condition struct {
	Name    string
	Known   bool
	Problem string
	But     string // what is wrong although the condition is met
}

type work struct {
	trace.Work
	Stuck bool
}

type handlerRow struct {
	Name, Version, Problem string
	Default                bool
}

type podRow struct {
	Name, ID, Handler string
	Ready             bool
	Age               time.Duration
	Running, All      int // containers
}

type containerRow struct {
	Pod, Name, ID, State string
	Reason               string
	Code                 int32
	Age                  time.Duration // of the state
}

func (s Sources) collect(ctx context.Context, now time.Time) content {
	node := s.Node()
	c := content{Version: s.Version, Time: now, Up: now.Sub(s.Since), Cleanups: node.Cleanups, Conditions: s.conditions(ctx)}
	operations := make([]work, len(node.Work))
	for i, w := range node.Work {
		w.Operation, w.Object, w.Step, w.WaitsFor = short(w.Operation), short(cmp.Or(w.Name, w.Object)), short(w.Step), short(w.WaitsFor)
		operations[i] = work{w, w.Took > stuck}
	}
	c.Work = first(operations)
	pulls := s.Pulls()
	for i := range pulls {
		pulls[i].Image = short(pulls[i].Image)
	}
	c.Pulls = first(pulls)
	c.Handlers = first(handlers(s.Handlers(ctx)))
	c.Pods, c.Stopped = s.pods(now)
	return c
}

func (s Sources) conditions(ctx context.Context) []condition {
	list := []condition{{Name: cri.RuntimeReady}, {Name: cri.NetworkReady}}
	if status, err := s.Runtime(ctx); err == nil {
		list[0].found(status.NotReady)
	}
	if status, err := s.Network(ctx); err == nil {
		list[1].found(status.NotReady)
		if status.Grace != nil {
			list[1].But = short(fault.Text(status.Grace))
		}
	}
	return list
}

func (c *condition) found(notReady error) {
	c.Known = true
	if notReady != nil {
		c.Problem = short(fault.Text(notReady))
	}
}

func handlers(reports []oci.Report) []handlerRow {
	rows := make([]handlerRow, len(reports))
	for i, r := range reports {
		rows[i] = handlerRow{Name: short(r.Name), Version: short(r.Version), Default: r.Default}
		if !r.Ready {
			rows[i].Problem = short(cmp.Or(r.Error, "not ready"))
		}
	}
	return rows
}

// pods returns the pods of the node, and the containers that do not run: most
// recently changed first.
func (s Sources) pods(now time.Time) (table[podRow], table[containerRow]) {
	byID := map[string]*podRow{}
	var pods []*podRow
	for _, v := range s.Pods() {
		p := &podRow{
			Name: short(v.Config.GetMetadata().GetNamespace() + "/" + v.Config.GetMetadata().GetName()), ID: v.ID,
			Handler: short(v.Handler), Ready: v.State == cri.PodSandboxState_SANDBOX_READY, Age: now.Sub(v.CreatedAt),
		}
		byID[v.ID] = p
		pods = append(pods, p)
	}
	var stopped []containerRow
	for _, v := range s.Containers() {
		p := byID[v.SandboxID]
		if p == nil { // created after the pods were listed
			continue
		}
		p.All++
		row := containerRow{Pod: p.Name, Name: short(v.Config.GetMetadata().GetName()), ID: v.ID}
		switch v.State {
		case cri.ContainerState_CONTAINER_RUNNING:
			p.Running++
			continue
		case cri.ContainerState_CONTAINER_EXITED:
			row.State, row.Reason, row.Code, row.Age = "exited", short(v.Reason), v.ExitCode, now.Sub(v.FinishedAt)
		default:
			row.State, row.Age = "created", now.Sub(v.CreatedAt)
		}
		stopped = append(stopped, row)
	}
	slices.SortFunc(stopped, func(a, b containerRow) int { return cmp.Or(cmp.Compare(a.Age, b.Age), cmp.Compare(a.ID, b.ID)) })
	slices.SortFunc(pods, func(a, b *podRow) int { return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.ID, b.ID)) })
	rows := make([]podRow, len(pods))
	for i, p := range pods {
		rows[i] = *p
	}
	return first(rows), first(stopped)
}

// short returns a text without unprintable characters, such as marks that
// reverse its direction in a browser, and no longer than longestText.
func short(text string) string {
	if len(text) > longestText {
		text = text[:longestText] + "…"
	}
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return unicode.ReplacementChar
		}
		return r
	}, text)
}

// brief formats a duration for people.
func brief(d time.Duration) string { return d.Round(time.Second).String() }

// percent returns the progress of a pull.
func percent(p progress.Pull) int64 {
	if p.Total <= 0 {
		return 0
	}
	return min(100*p.Bytes/p.Total, 100)
}
