package storage

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/test/kit/image"
)

// BenchmarkPull pulls and removes an image in a process of its own, like a server. Its figures are
// in docs/decisions/0019-pull-worker.md and 0051-unpack-program.md: cpu-ms is the CPU of one pull
// and removal in that process and its children, own-ms in the process alone; peak-MiB is the peak
// of memory of the process itself.
func BenchmarkPull(b *testing.B) {
	words := []byte(strings.Repeat("some words that compress well enough ", 3000))
	var files []image.File
	for i := range 400 {
		files = append(files, image.Regular(fmt.Sprint("file", i), 0o644, append(random(100<<10), words...)))
	}
	var deep []image.Layer
	for i := range 100 {
		deep = append(deep, layer(b, image.Regular(fmt.Sprint("file", i), 0o644, random(200<<10))))
	}
	var wide []image.Layer
	for i := range 100 {
		var files []image.File
		for j := range 20 {
			half := random(10 << 10)
			files = append(files, image.Regular(fmt.Sprintf("d%d/file%d", i, j), 0o644, append(half, words[:10<<10]...)))
		}
		wide = append(wide, layer(b, files...))
	}
	var packed []image.Layer
	for _, l := range deep {
		l.Blob = zstdOf(b, contentOf(b, l))
		l.Digest = digest.FromBytes(l.Blob)
		packed = append(packed, l)
	}
	for name, a := range map[string]*image.Artifact{
		"small": motd(b, "x"),
		"large": build(b, image.Image{Layers: []image.Layer{layer(b, files...), layer(b, image.Regular("noise", 0o644, random(20<<20)))}}),
		"deep":  build(b, image.Image{Layers: deep}),
		"wide":  build(b, image.Image{Layers: wide}),
		"zstd":  build(b, image.Image{Layers: packed}),
	} {
		b.Run(name, func(b *testing.B) {
			n := newNode(b)
			r := serve(b, "app", "1", a)
			if err := n.Close(b.Context()); err != nil {
				b.Fatal(err)
			}
			defer n.open()
			cmd := n.childCommand(task{Verb: "measure", Config: n.cfg, Ref: r.Addr() + "/app:1", Times: b.N})
			cmd.Stderr = os.Stderr
			out, err := cmd.Output()
			if err != nil {
				b.Fatal(err)
			}
			var spent measured
			if err := json.Unmarshal(out, &spent); err != nil {
				b.Fatal(err)
			}
			b.ReportMetric(spent.Own, "own-ms/op")
			b.ReportMetric(spent.CPU, "cpu-ms/op")
			b.ReportMetric(spent.Peak, "peak-MiB")
		})
	}
}

// BenchmarkPullOfWhatIsUpToDate is the pull for which a pod with the pull policy Always waits.
// "changed" is the same with a name that the image does not have yet.
func BenchmarkPullOfWhatIsUpToDate(b *testing.B) {
	n := newNode(b)
	a := motd(b, "here")
	r := serve(b, "app", "0", a)
	n.pull(r.Addr() + "/app:0")
	b.Run("same", func(b *testing.B) {
		for b.Loop() {
			n.pull(r.Addr() + "/app:0")
		}
	})
	tag := 0
	b.Run("changed", func(b *testing.B) {
		for b.Loop() {
			tag++
			r.Push("app", fmt.Sprint(tag), a)
			n.pull(r.Addr() + "/app:" + fmt.Sprint(tag))
		}
	})
}

type measured struct{ CPU, Own, Peak float64 }

// measure pulls and removes an image times times, and prints what that takes.
func measure(ctx context.Context, s *Store, ref string, times int) error {
	own, children := cpuTime(unix.RUSAGE_SELF), cpuTime(unix.RUSAGE_CHILDREN)
	for range times {
		img, err := s.Pull(ctx, PullRequest{Image: ref})
		if err == nil {
			err = s.Remove(ctx, img.ID)
		}
		if err != nil {
			return err
		}
	}
	own, children = cpuTime(unix.RUSAGE_SELF)-own, cpuTime(unix.RUSAGE_CHILDREN)-children
	spent := measured{CPU: (own + children) / float64(times), Own: own / float64(times)}
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return err
	}
	_, peak, _ := strings.Cut(string(status), "VmHWM:")
	if _, err := fmt.Sscan(peak, &spent.Peak); err != nil {
		return err
	}
	spent.Peak /= 1 << 10
	return json.NewEncoder(os.Stdout).Encode(spent)
}

// cpuTime is of this process or its children that have ended, in milliseconds.
func cpuTime(who int) float64 {
	var u unix.Rusage
	if err := unix.Getrusage(who, &u); err != nil {
		panic(err)
	}
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e6
}
