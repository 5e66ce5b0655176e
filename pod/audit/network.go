package audit

import (
	"context"
	"fmt"

	"github.com/crius-run/crius/internal/ids"
	"github.com/crius-run/crius/network"
)

// CollectNetwork has the network plugins remove what they hold for pods of this server
// that are gone (network.Collect). It is for the start of a server, after recovery:
// whatever was lost with an earlier one has no record any more.
func (a *Auditor) CollectNetwork(ctx context.Context) error {
	var dirs []string // of handlers that have networks of their own
	for _, name := range a.Runtimes.Names() {
		if runtime, err := a.Runtimes.Get(name); err == nil && runtime.Handler().CNIConfDir != "" {
			dirs = append(dirs, runtime.Handler().CNIConfDir)
		}
	}
	ours := func(id string) bool { return ids.Valid(id) && ids.HasMark(id, a.Layout.Mark) }
	return a.Network.Collect(ctx, dirs, network.Live{Attached: a.attached, Ours: ours})
}

// attached are the pods on record that have a network, or are about to get one. The
// record comes before the network: of a pod that the plugins know there is one.
func (a *Auditor) attached() (map[string]string, error) {
	pods, _, damaged, err := a.Records.Pods.Read()
	if err != nil {
		return nil, fmt.Errorf("read pod records: %w", err)
	}
	attached := map[string]string{}
	for _, d := range damaged { // its network is not known
		return nil, fmt.Errorf("read pod records: %w", d.Err)
	}
	for id, rec := range pods {
		if rec.Network != nil {
			attached[id] = rec.Network.Interface
		}
	}
	return attached, nil
}

// OpaqueIPAM are the IPAM plugins that nobody but themselves can compare with the
// records.
func (a *Auditor) OpaqueIPAM() []string {
	_, opaque, _ := a.Network.Leases(a.attachments()) // Verify has told the error
	return opaque
}

// attachments are the networks that the node's pods have.
func (a *Auditor) attachments() []*network.Attachment {
	var all []*network.Attachment
	for _, p := range a.Node.Pods() {
		if n := p.Now().Network; n != nil {
			all = append(all, n)
		}
	}
	return all
}
