package pod

import (
	"context"
	"fmt"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/record"
	"github.com/crius-run/crius/pod/audit"
	"github.com/crius-run/crius/pod/records"
)

// Inspect is Audit().Verify for a node without a server: it reads the records, as Recover does,
// and changes nothing. The engine is good for nothing else afterwards. The caller holds the
// Lock.
func (e *Engine) Inspect(ctx context.Context) ([]audit.Finding, error) {
	pods, _, damagedPods, err := e.records.Pods.Read()
	if err != nil {
		return nil, fmt.Errorf("read pod records: %w", err)
	}
	ctrs, _, damagedCtrs, err := e.records.Containers.Read()
	if err != nil {
		return nil, fmt.Errorf("read container records: %w", err)
	}
	findings := append(damagedFindings("pod", damagedPods), damagedFindings("container", damagedCtrs)...)
	for id, rec := range pods {
		s, err := e.newSandbox(id, *rec)
		if err != nil {
			findings = append(findings, audit.Finding{Object: "pod " + id, Wrong: fault.Text(err), Advice: "add the handler to runtime.handlers again; until then the pod is not touched"})
			continue
		}
		e.sandboxes.Publish(id, s)
	}
	for id, rec := range ctrs {
		s, err := e.sandboxes.Find(rec.SandboxID)
		switch {
		case err == nil:
			c := e.newContainer(id, s, *rec)
			s.Change(func(now *livePod) { now.add(c) })
			e.containers.Publish(id, c)
		case pods[rec.SandboxID] == nil:
			findings = append(findings, audit.Finding{Object: "container " + id, Wrong: "its pod " + rec.SandboxID + " has no record", Remedy: "remove it"})
		}
	}
	e.deps.Network.Load(records.Attached(pods, e.planner().Boot))
	found, err := e.audit.Verify(ctx, false)
	return append(findings, found...), err
}

func damagedFindings(noun string, damaged []record.Damaged) []audit.Finding {
	var findings []audit.Finding
	for _, d := range damaged {
		findings = append(findings, audit.Finding{
			Object: noun + " " + d.ID, Wrong: fmt.Sprintf("its record %s cannot be read: %v", d.File, d.Err), Remedy: "move the record aside and remove the " + noun,
		})
	}
	return findings
}
