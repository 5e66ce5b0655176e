package pod

import (
	"log/slog"
	"strings"
	"sync"

	"github.com/crius-run/crius/pod/records"
)

// mostGone is how many removed objects keep their names, for the last lines that the log writes
// about them.
const mostGone = 1024

// names are the names of pods and containers by id, also of those that are being made or whose
// cleanup is not finished.
type names struct {
	mu   sync.RWMutex
	byID map[string]objectName
	gone []string // ids of removed objects, the oldest first
}

type objectName struct{ pod, container string }

func (n objectName) String() string {
	if n.container == "" {
		return n.pod
	}
	return n.pod + "/" + n.container
}

func (n *names) notePod(id string, plan *records.PodPlan) {
	m := plan.Config.M.GetMetadata()
	n.note(id, objectName{pod: brief(m.GetNamespace()) + "/" + brief(m.GetName())})
}

func (n *names) noteContainer(id, podID string, plan *records.ContainerPlan) {
	n.note(id, objectName{n.find(podID).pod, brief(plan.Config.M.GetMetadata().GetName())})
}

func (n *names) note(id string, name objectName) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.byID == nil {
		n.byID = map[string]objectName{}
	}
	n.byID[id] = name
}

// retire lets the name of a removed object go once more objects have been removed.
func (n *names) retire(id string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.gone = append(n.gone, id); len(n.gone) > mostGone {
		delete(n.byID, n.gone[0])
		n.gone = n.gone[1:]
	}
}

func (n *names) find(id string) objectName {
	n.mu.RLock()
	defer n.mu.RUnlock()
	return n.byID[id]
}

// of returns the name of the object whose id is the last word of text, "" if there is none:
// "namespace/pod" or "namespace/pod/container".
func (n *names) of(text string) string {
	return n.find(text[strings.LastIndexByte(text, ' ')+1:]).String()
}

// attrs returns the names of an object as attributes for the log.
func (n *names) attrs(id string) []slog.Attr {
	name := n.find(id)
	if name == (objectName{}) {
		return nil
	}
	attrs := []slog.Attr{slog.String("pod_name", name.pod)}
	if name.container != "" {
		attrs = append(attrs, slog.String("container_name", name.container))
	}
	return attrs
}

// brief bounds a name, which requests choose.
func brief(name string) string {
	const most = 253 // as for names in Kubernetes
	return strings.ToValidUTF8(name[:min(len(name), most)], "?")
}

// NamesForLog returns the names of the pod or container that has an id, as attributes for the log.
func (e *Engine) NamesForLog(id string) []slog.Attr { return e.names.attrs(id) }
