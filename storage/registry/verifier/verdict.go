package verifier

import (
	"cmp"
	"slices"
	"time"

	"github.com/opencontainers/go-digest"
)

// Verdict is what the programs said about an image when they were asked last. It is not on disk: a
// restart and a reload forget it, and have the image verified again when it is used.
type Verdict struct {
	Name     string        `json:"name"`
	Digest   digest.Digest `json:"digest"` // of the manifest or index to which the name leads
	Accepted bool          `json:"accepted"`
	Said     string        `json:"verdict"` // of each program, or the reason for the refusal
	At       time.Time     `json:"at"`
}

// note keeps a verdict, unless other programs count by now. Of a refusal err is the reason.
func (v *Verifiers) note(uses int, verdict Verdict, err error) {
	if err != nil {
		verdict.Said = err.Error()
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if uses != v.uses {
		return
	}
	if v.last == nil || len(v.last) >= maxAnswers {
		v.last = map[string]Verdict{}
	}
	v.last[verdict.Name+" "+verdict.Digest.String()] = verdict
}

// Verdicts returns the verdicts on manifests and indexes with these digests, by name.
func (v *Verifiers) Verdicts(digests []digest.Digest) (all []Verdict) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, verdict := range v.last {
		if slices.Contains(digests, verdict.Digest) {
			all = append(all, verdict)
		}
	}
	slices.SortFunc(all, func(a, b Verdict) int { return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Digest, b.Digest)) })
	return all
}
