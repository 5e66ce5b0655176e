package main

import (
	"context"
	"fmt"
)

// flatWindows is the number of equal parts that are compared.
const flatWindows = 5

// flatRow fills nodes far beyond their usual number of pods, one pod at a time,
// and shows the cost of the first hundred and of each further one.
func flatRow(ctx context.Context) (tables []table, err error) {
	const handler = "runc"
	pods, err := amount("PODS", 500)
	if err != nil {
		return nil, err
	}
	window := max(pods/flatWindows, 1)
	c, err := newContest(ctx, handler)
	if err != nil {
		return nil, err
	}
	defer func() { err = c.end(ctx, err) }()
	times := compare(fmt.Sprintf("Up to %d pods with %s, one at a time: ms until a pod is up", flatWindows*window, handler), 95, c.names()...)
	costs := compare(fmt.Sprintf("Up to %d pods with %s, one at a time: CPU ms a pod", flatWindows*window, handler), 0, c.names()...)
	var first, last []outcome
	for from := 0; from < flatWindows*window; from += window {
		var took, cpu [][]float64
		last = nil
		for _, t := range c.targets {
			o, err := fill(ctx, t, from, from+window, 1)
			if err != nil {
				return nil, err
			}
			took, cpu, last = append(took, o.of(podUp)), append(cpu, []float64{o.each()}), append(last, o)
		}
		if from == 0 {
			first = last
		}
		name := fmt.Sprintf("pods %d to %d", from+1, from+window)
		times.line(name, took...)
		costs.line(name, cpu...)
	}
	var took, cpu [][]float64
	for i := range c.targets {
		took = append(took, []float64{median(last[i].of(podUp)) / median(first[i].of(podUp))})
		cpu = append(cpu, []float64{last[i].each() / first[i].each()})
	}
	times.line("last to first, times", took...)
	costs.line("last to first, times", cpu...)
	for _, t := range c.targets {
		if _, err := drain(ctx, t, flatWindows*window, nodeAtOnce); err != nil {
			return nil, err
		}
	}
	return []table{times.table, costs.table}, nil
}
